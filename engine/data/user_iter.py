"""Batches of a ``DataLoader`` with a user-defined ``__iter__``, which is read by a single process."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from ...common.messages import warn
from ..rng import Draw, host_state, isolated_random_state, set_host_state
from .epoch_position import EpochPosition, Phase
from .micro_batches import Micro, avoid_rewind
from .sampler_rng import load_states, read_states
from .sharded_sampler import GroupIndices, ShardedBatches


class UserBatches:
    """Groups of the batches that a user-defined ``__iter__`` yields, which may differ from those that it reads.

    Such a method may read other loaders, or drop, merge and repeat batches. A run can then only resume within an epoch
    by reading the epoch again up to its position.

    Args:
        name: Class name of the loader.
        plan: Batch sampler of the loader.
        generators: Generators of the loader's dataset.
        evaluation: Whether the batches are used for evaluation.

    Attributes:
        micros: See `ShardedBatches`. The draws and indices are None for a batch that was not read from the loader.
        regroups: Whether the method yields other batches than it reads; None until an epoch has shown it.
        start_state: States of the process when the epoch began, to read it again.
    """

    def __init__(self, name: str, plan: ShardedBatches, generators: list[Any], evaluation: bool) -> None:
        self._name = name
        self._plan = plan
        self._generators = generators
        self._evaluation = evaluation
        self.micros: deque[tuple[Micro, Draw | None, GroupIndices | None]] = deque()
        self.regroups: bool | None = None
        self.start_state: dict[str, Any] | None = None

    def iterate(self, view: Iterable[Any], limit: int | None) -> Iterator[Any]:
        """Return an iterator over at most ``limit`` batches of ``view``, whose ``__iter__`` is user-defined."""
        return self._regroup(self._open(view), limit)

    def _open(self, view: Iterable[Any]) -> Iterator[Any]:
        """Start the user's iterator at the position; read the epoch again up to it, if this is necessary."""
        plan, position = self._plan, self._plan.position
        self.micros.clear()
        within = position.order is not None and bool(position.passing or position.batches)
        if not within or self.start_state is None or self.regroups is False:
            self.start_state = {"host": host_state(), "draws": plan.draws.state()}
            return plan.iterate(view, None)
        position.samples += position.passing * plan.full
        position.batches += position.passing
        plan.begin(None, EpochPosition(position.epoch))
        # The epoch begins as it did, with all loaders that the user's iterator reads.
        position.order, position.phase = None, Phase.BETWEEN
        states, stream = read_states(self._generators), plan.draws.stream.get_state()
        with isolated_random_state():
            set_host_state(self.start_state["host"])
            plan.draws.load(self.start_state["draws"])
            batches = iter(view)
            for _ in itertools.islice(batches, position.batches):
                if plan.micros:
                    plan.micros.popleft()
        plan.draws.stream.go_to(stream)
        load_states(self._generators, states)
        return batches

    def _regroup(self, batches: Iterator[Any], remaining: int | None) -> Iterator[Any]:
        """Yield at most ``remaining`` batches, in groups of the yielded batches instead of those of the sampler."""
        plan, position = self._plan, self._plan.position
        batches, number = avoid_rewind(batches), 0
        while remaining is None or remaining > 0:
            width = plan.planner.accumulate(number)
            width, number = width if remaining is None else min(remaining, width), number + 1
            group = list(itertools.islice(batches, width))
            if position.order is None:  # no sampler of this dataloader was read, but the epoch has begun
                position.begin(plan.draws.state())
            read = [plan.micros.popleft() if plan.micros else None for _ in group]
            if None in read or (plan.micros and len(group) < width):
                self._note_regrouping()
            unknown = plan.full, plan.full
            sizes = [unknown if facts is None else (facts[0].samples, facts[0].everyone) for facts in read]
            for micro, batch, facts in zip(plan.planner.plan(sizes), group, read, strict=True):
                drawn, indices = (None, None) if facts is None else facts[1:]
                self.micros.append((micro, drawn, None if self.regroups else indices))
                yield batch
            if len(group) < width:
                self.regroups = bool(self.regroups)
                return
            remaining = None if remaining is None else remaining - len(group)

    def _note_regrouping(self) -> None:
        if self.regroups:
            return
        self.regroups = True
        if not self._evaluation:
            warn(
                f"{self._name}.__iter__ does not yield one batch for each batch that it reads. A run that resumes "
                "within an epoch therefore reads the epoch's batches again, up to its position."
            )

    def describe_position(self, drawn: Draw | None) -> dict[str, Any]:
        """Return the plan's state and the states at the beginning of the epoch, unless the position is enough."""
        start = {} if self.regroups is False else {"start": self.start_state}
        return {**self._plan.describe_position(drawn), **start}

    def resume_at(self, state: dict[str, Any]) -> None:
        """Restore the result of `describe_position`, which is part of ``state``."""
        self._plan.resume_at(state)
        self.start_state = state.get("start")
        if "start" not in state:  # an epoch before the checkpoint has shown that the position is enough
            self.regroups = False
