"""Replicas that run out of batches at different times."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def joined(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, a process may run ``modules`` fewer times than others, and adds nothing to their reductions after that.

    Each reduction is the mean over the processes that still had a batch. All leave together, with the parameters and
    buffers of those that had the most.

    Args:
        modules: what a strategy's ``wrap`` returned.

    Raises:
        ValueError: for a model whose reductions can't be taken part in.
    """
    from torch.distributed.algorithms.join import Join, Joinable

    trained = [module for module in modules if any(p.requires_grad for p in module.parameters())]
    for module in trained:
        if not isinstance(module, Joinable):
            raise ValueError(
                f"{type(module).__name__} can't be joined: processes may run out of batches at different times only "
                "where each holds a whole replica (strategy='ddp'). Let a prepared DataLoader share the batches out: "
                "then no process runs out before another."
            )
    if not trained:
        yield
        return
    join = Join(trained, divide_by_initial_world_size=False)  # type: ignore[arg-type]
    try:
        with warnings.catch_warnings():  # torch sets a filter
            with join:
                yield
    finally:
        Join(trained, enable=False)  # type: ignore[arg-type]  # else every later forward would announce itself
