"""RNG states of the ranks of a run, and the random stream that determines the order of samples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..strategies import Strategy, World
from .rng import (
    ProcessStream,
    RandomStream,
    State,
    isolated_random_state,
    random_state,
    seed_from,
    seed_generators,
    set_random_state,
)

_common_seeds: dict[int, int] = {}  # the seed before `RunRng.draw_apart`, by the seed that it has set


def read_common_seed() -> int:
    """Return the seed of torch's generator, or the one that all ranks shared before each drew its own numbers."""
    seed = torch.initial_seed()
    return _common_seeds.get(seed, seed)


class RunRng:
    """RNG states of the ranks of a run, and the stream from which the order of samples is drawn.

    With a world size of one and no ``data_seed``, the order of samples is drawn from the process's own generators, as
    in a plain loop. Otherwise, it is drawn from a separate stream.

    Attributes:
        stream: The stream from which the order of samples is drawn; None until `start`.
        first_state: The RNG state with which the stream began; empty until `start`.
    """

    def __init__(self, world: World, strategy: Strategy) -> None:
        self.stream: RandomStream | None = None
        self.first_state: State = {}
        self._world = world
        self._strategy = strategy
        self._ranks_differ = False

    def start(self, data_seed: int | None = None) -> RandomStream:
        """Start the stream, and give all ranks rank zero's RNG state on the CPU.

        The stream starts from ``data_seed`` if that is set, otherwise from rank zero's RNG state. Until `draw_apart` is
        called, all ranks draw the same random numbers on the CPU.
        """
        with isolated_random_state():
            if data_seed is not None:
                seed_generators(data_seed)
            order = random_state()
        # The state of a CUDA generator is of no use to other ranks, and its size differs between ranks that see
        # different devices.
        order, common = self._world.broadcast((_select_host_state(order), _select_host_state(random_state())))
        self.stream = ProcessStream() if self._world.size == 1 and data_seed is None else RandomStream(order)
        self.first_state = order
        self._ranks_differ = False
        if self._world.rank:
            set_random_state(common)
        return self.stream

    def draw_apart(self) -> None:
        """Give each data rank its own RNG state, so that dropout does not drop the same units on every rank.

        Ranks that process the same sample together keep the same RNG state.
        """
        if self._ranks_differ or self.stream is None:
            return
        self._ranks_differ = True
        rank = self._strategy.data_world.rank
        if rank:
            seed = seed_from(self.first_state, f"process {rank}") % 2**32
            _common_seeds[seed] = read_common_seed()
            seed_generators(seed)

    @contextmanager
    def drawing_alike(self, purpose: str) -> Iterator[None]:
        """Return a context in which all ranks draw the same random numbers, for use after `draw_apart`.

        Different values of ``purpose`` result in different random numbers.
        """
        if self._world.size == 1 or not self._ranks_differ:
            yield
            return
        with isolated_random_state():
            seed_generators(seed_from(self.first_state, purpose) % 2**32)
            yield


def _select_host_state(state: State) -> State:
    return {name: state[name] for name in ("python", "numpy", "torch")}
