"""Loops over batches of the user's own, of which one process has more than another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..strategies import warn
from ..strategies.join import joined
from .agreement import Agreement

if TYPE_CHECKING:
    from .accelerator import Accelerator


class _NoVotes(Agreement):
    def vote(self, weight: float | Tensor | None) -> None:
        raise ValueError(
            "inside join_uneven_inputs a process that has run out of batches can't take part in summing what others "
            "report: use backward(loss) without weight=."
        )


@contextmanager
def join_uneven_inputs(
    accelerator: Accelerator, joinables: Iterable[Any], even_batches: bool | None = None
) -> Iterator[None]:
    """See `Process.join_uneven_inputs`."""
    if even_batches:
        raise ValueError(
            "join_uneven_inputs(even_batches=True): Treadle repeats no sample to make processes even. Leave it out."
        )
    joinables = list(joinables)
    for value in joinables:
        if not isinstance(value, nn.Module) and not hasattr(value, "step"):
            raise TypeError(f"join_uneven_inputs takes prepared models (and optimizers), not {type(value).__name__}.")
    if accelerator.world.size == 1:
        yield
        return
    agreement, accelerator.agreement = (
        accelerator.agreement,
        _NoVotes(accelerator.world, accelerator.strategy),
    )
    try:
        with joined(value for value in joinables if isinstance(value, nn.Module)):
            yield
    finally:
        accelerator.agreement = agreement
    _catch_up(accelerator)


def _catch_up(accelerator: Accelerator) -> None:
    """Bring optimizers and schedulers, of processes that took fewer steps, to where the others are.

    torch evens out parameters and buffers only: moments that differ would part the replicas at the next step.
    """
    optimizers, schedulers = accelerator.optimizers, accelerator.schedulers
    own = [o.taken for o in optimizers]
    every = accelerator.world.gather_objects((own, accelerator._count))
    if any(count for _, count in every):
        warn(
            "join_uneven_inputs: the batches ended inside a group of gradient_accumulation_steps on some process; "
            "what the group had gathered is left out."
        )
        accelerator.drop_gradients()
        accelerator._count = 0
    taken = [counts for counts, _ in every]
    if all(counts == taken[0] for counts in taken):
        return
    source = max(range(len(taken)), key=lambda rank: sum(taken[rank]))
    state = None
    if accelerator.process_index == source:
        state = {
            "optimizers": [o.state_dict() for o in optimizers],
            "schedulers": [s.state_dict() for s in schedulers],
            "scaler": None if accelerator.scaler is None else accelerator.scaler.state_dict(),
        }
    state = accelerator.world.broadcast(state, source)
    if own == taken[source]:
        return
    for optimizer, values, count in zip(optimizers, state["optimizers"], taken[source], strict=True):
        optimizer.load_state_dict(values)
        optimizer.taken = count
    for scheduler, values in zip(schedulers, state["schedulers"], strict=True):
        scheduler.load_state_dict(values)
    if accelerator.scaler is not None:
        accelerator.scaler.load_state_dict(state["scaler"])
