"""Joining of replicas that run out of batches at different times."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def joined(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Return a context in which a rank may run ``modules`` fewer times than other ranks.

    Each reduction is the mean over the ranks that still have a batch. All ranks leave the block together, with the
    parameters and buffers of a rank that had the most batches.
    """
    from torch.distributed.algorithms.join import Join, Joinable

    trained = [module for module in modules if any(p.requires_grad for p in module.parameters())]
    for module in trained:
        if not isinstance(module, Joinable):
            raise ValueError(
                f"{type(module).__name__} is not a prepared model, so its gradients are not reduced. Call "
                "join_uneven_inputs with the model that Accelerator.prepare returned."
            )
    if not trained:
        yield
        return
    join = Join(trained, divide_by_initial_world_size=False)  # type: ignore[arg-type]
    try:
        with warnings.catch_warnings():  # torch sets a warning filter
            with join:
                yield
    finally:
        Join(trained, enable=False)  # type: ignore[arg-type]  # else every later forward would announce itself
