"""Support for user-defined loops in which some ranks have more batches than others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ...common.messages import name_type, warn
from .accumulation import Accumulation
from .prepared_scheduler import PreparedScheduler


@contextmanager
def join_uneven_inputs(
    accumulation: Accumulation, schedulers: list[Any], joinables: Iterable[Any], even_batches: bool | None = None
) -> Iterator[None]:
    """Return a context in which ranks may have different numbers of batches; see `Accelerator.join_uneven_inputs`.

    ``even_batches=True`` means that all ranks have the same number of batches; the context then has no effect.
    """
    if even_batches is not None and not isinstance(even_batches, bool):
        raise TypeError(f"even_batches={even_batches!r} must be True, False or None.")
    if isinstance(joinables, nn.Module) or not isinstance(joinables, Iterable):
        raise TypeError(f"joinables is {name_type(joinables)}, but must be a list of prepared models. Pass [model].")
    joinables = list(joinables)
    for value in joinables:
        if not isinstance(value, nn.Module) and not hasattr(value, "step"):
            raise TypeError(
                f"joinables contains {name_type(value)}, but may contain only prepared models and optimizers."
            )
    if even_batches or accumulation.world.size == 1:
        yield
        return
    accumulation.agreement.joined = True
    try:
        with accumulation.strategy.join([value for value in joinables if isinstance(value, nn.Module)]):
            yield
    finally:
        accumulation.agreement.joined = False
    _catch_up(accumulation, schedulers)


def _catch_up(accumulation: Accumulation, schedulers: list[Any]) -> None:
    """Copy the states of optimizers, schedulers and the scaler from the rank that took the most steps to other ranks.

    torch synchronizes only parameters and buffers. Different optimizer moments would make the replicas diverge at the
    next step.
    """
    world, optimizers = accumulation.world, accumulation.optimizers
    local_steps = [o.steps_taken for o in optimizers]
    counts = world.gather_objects((local_steps, accumulation.position))
    if all(of_rank == counts[0] for of_rank in counts):
        return
    if any(position for _, position in counts):
        warn(
            "join_uneven_inputs: on at least one rank, the batches ended inside an accumulation group. The gradients "
            "of this unfinished group are dropped."
        )
        accumulation.drop_gradients()
    steps_by_rank = [of_rank for of_rank, _ in counts]
    if all(of_rank == steps_by_rank[0] for of_rank in steps_by_rank):
        return
    source = max(range(len(steps_by_rank)), key=lambda rank: sum(steps_by_rank[rank]))
    state, loss_scale = None, accumulation.loss_scale
    if world.rank == source:
        state = {
            "optimizers": [(o.steps_taken, o.skipped, o.state_dict()) for o in optimizers],
            "schedulers": [(s.state_dict(), getattr(s, "since", None)) for s in schedulers],
            "scaler": None if loss_scale is None else loss_scale.state_dict(),
        }
    state = world.broadcast(state, source)
    if local_steps == steps_by_rank[source]:
        return
    for optimizer, (count, skipped, values) in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(values)
        optimizer.steps_taken, optimizer.skipped = count, skipped
    for scheduler, (values, since) in zip(schedulers, state["schedulers"], strict=True):
        if isinstance(scheduler, PreparedScheduler):
            scheduler.resume(values, since, scheduler.advances, batch_size_unchanged=True)
        else:
            scheduler.load_state_dict(values)
    if loss_scale is not None:
        loss_scale.load_state_dict(state["scaler"])
