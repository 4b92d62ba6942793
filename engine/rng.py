"""RNG states of a process and of the ranks of a run, and the random stream from which the order of data is drawn."""

from __future__ import annotations

import hashlib
import os
import random
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from ..strategies import Strategy, World

State = dict[str, Any]


def random_state() -> State:
    """Return the RNG states of Python, NumPy, torch and the devices.

    The states of CUDA devices are included only if this process has initialized CUDA.
    """
    state = host_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
        state["cuda_device"] = torch.cuda.current_device()
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def host_state() -> State:
    """Return the states of Python's, NumPy's and torch's CPU generators."""
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}


def set_host_state(state: Mapping[str, Any]) -> None:
    """Restore states that `host_state` returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore the RNG states of Python, NumPy, torch and the devices.

    Args:
        state: A result of `random_state`. States of devices that this process does not have are skipped.
    """
    set_host_state(state)
    if "cuda" in state and torch.cuda.is_available():
        count = min(len(state["cuda"]), torch.cuda.device_count())
        for device in range(count):
            torch.cuda.set_rng_state(state["cuda"][device], device)
        if "cuda_device" in state:  # the process may now compute on another device
            torch.cuda.set_rng_state(state["cuda"][state["cuda_device"]], torch.cuda.current_device())
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])


@contextmanager
def isolated_random_state() -> Iterator[None]:
    """Return a context manager that restores the process's RNG state (see `random_state`) on exit."""
    saved_state = random_state()
    try:
        yield
    finally:
        set_random_state(saved_state)


_SEEDERS: dict[str, Callable[[int], Any]] = {
    "python": random.seed,
    "numpy": np.random.seed,
    "torch": torch.default_generator.manual_seed,
}


class Draw(NamedTuple):
    """States of a random stream before and after a draw."""

    before: State
    after: State


class RandomStream:
    """Random number stream that is used only to draw the order of the data.

    The stream has its own RNG state. The ranks therefore draw the same order of samples, regardless of the random
    numbers that their models draw.

    Args:
        state: A state that `random_state` returned.

    Examples:
        >>> import random, treadle
        >>> from treadle.engine import RandomStream, random_state
        >>> _ = treadle.seed_everything(0)
        >>> first, second = RandomStream(random_state()), RandomStream(random_state())
        >>> with first.drawing():
        ...     number = random.random()
        >>> with second.drawing():
        ...     print(random.random() == number)
        True
    """

    def __init__(self, state: State) -> None:
        self.state: State = {name: state[name] for name in ("python", "numpy", "torch")}
        self._is_drawing = False

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Return a context in which the process's generators draw from this stream."""
        if self._is_drawing:
            yield
            return
        process_state = host_state()
        set_host_state(self.state)
        self._is_drawing = True
        try:
            yield
        finally:
            self._is_drawing = False
            self.state = host_state()
            set_host_state(process_state)

    def get_state(self) -> State:
        """Return the current state of the stream."""
        return host_state() if self._is_drawing else dict(self.state)

    def go_to(self, state: State) -> None:
        """Continue the stream from a saved state.

        Args:
            state: A result of `get_state`.
        """
        if self._is_drawing:
            set_host_state(state)
        else:
            self.state = dict(state)

    def follow(self, draw: Draw) -> None:
        """Skip numbers that were already drawn from a copy of this stream.

        Args:
            draw: The states of the copy before and after these numbers were drawn.
        """
        self.state = draw.after

    def find_departures(self, expected: State) -> dict[str, int]:
        """Return no seeds, because only dataloaders draw from this stream; see `ProcessStream.find_departures`.

        Args:
            expected: A state that `get_state` returned.
        """
        return {}

    def reseed(self, name: str, seed: int) -> None:
        """Continue one of the generators with the numbers of a seed.

        Args:
            name: ``"python"``, ``"numpy"`` or ``"torch"``.
            seed: The seed, a 32-bit integer.
        """
        with self.drawing():
            _SEEDERS[name](seed)

    def advance(self) -> None:
        """Draw and discard one number from each generator of the stream."""
        with self.drawing():
            random.random()
            np.random.random()
            torch.rand((), device="cpu")


class ProcessStream(RandomStream):
    """Stream that uses the process's own generators, as a plain loop does."""

    def __init__(self) -> None:
        pass

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Return a context that has no effect."""
        yield

    def get_state(self) -> State:
        """Return the state of the process's CPU generators."""
        return host_state()

    def go_to(self, state: State) -> None:
        """Set the state of the process's CPU generators."""
        set_host_state(state)

    def follow(self, draw: Draw) -> None:
        """Continue each generator from the state after a draw, if it is still in the state before it."""
        moved = [name for name in _SEEDERS if not _is_same(name, draw.before, draw.after)]
        if moved:
            current = host_state()
            kept = [name for name in moved if _is_same(name, current, draw.before)]
            set_host_state(current | {name: draw.after[name] for name in kept})

    def find_departures(self, expected: State) -> dict[str, int]:
        """Return a 32-bit seed for each generator that is no longer in the expected state, derived from its state."""
        current = host_state()
        return {name: _hash(name, current) for name in _SEEDERS if not _is_same(name, current, expected)}


def _is_same(name: str, first: State, second: State) -> bool:
    """Return whether one of the generators has the same state in two results of `host_state`."""
    value, other = first[name], second[name]
    if name == "numpy":
        return value[0] == other[0] and value[2:] == other[2:] and np.array_equal(value[1], other[1])
    return torch.equal(value, other) if name == "torch" else bool(value == other)


def _hash(name: str, state: State) -> int:
    """Return a 32-bit hash of one of the generators' states."""
    value = state["torch"].tolist() if name == "torch" else state[name]
    content = (value[1].tolist(), value[2:]) if name == "numpy" else value
    return int.from_bytes(hashlib.sha256(repr(content).encode()).digest()[:4], "little")


def are_equal(first: State, second: State) -> bool:
    """Return whether two states returned by `host_state` are the same."""
    return all(_is_same(name, first, second) for name in _SEEDERS)


def seed_from(state: State, purpose: int | str) -> int:
    """Return a 63-bit seed for a purpose, derived from a stream's state without drawing from it."""
    digest = hashlib.sha256(state["torch"].numpy().tobytes() + str(purpose).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def seed_at(epoch_seed: int, position: int) -> int:
    """Return a 32-bit seed for the micro-batch that begins at a position in an epoch with this seed."""
    return int.from_bytes(hashlib.sha256(f"{epoch_seed} {position}".encode()).digest()[:4], "little")


def seed_micro_batch(seed: int) -> None:
    """Seed the generators of Python, NumPy, torch's CPU and the current device with a 32-bit integer.

    ``torch.manual_seed`` takes 0.4 ms where CUDA is not initialized, because it records a stack for a later call.
    """
    for seed_generator in _SEEDERS.values():
        seed_generator(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(seed)
    elif torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)


_rank_seed: int | None = None  # the latest seed, if the script has chosen it for this rank alone


def seed_everything(seed: int | None = None, workers: bool = True, verbose: bool = True) -> int:
    """Seed the random number generators of Python, NumPy and torch, including those of all devices.

    As in Lightning, the seed is also written to the environment variable ``PL_GLOBAL_SEED``, which child processes
    inherit.

    Args:
        seed: An integer from 0 to 2**32 - 1. Default: the value of Lightning's environment variable ``PL_GLOBAL_SEED``,
            or 0 if it is not set.
        workers: Written to ``PL_SEED_WORKERS``, as in Lightning; otherwise unused.
        verbose: Accepted for compatibility with Lightning; unused.

    Returns:
        The seed that was set.

    Raises:
        ValueError: If the seed is not an integer from 0 to 2**32 - 1.
    """
    if seed is None:
        text = os.environ.get("PL_GLOBAL_SEED", "0")
        if not re.fullmatch("[0-9]{1,10}", text):  # isdigit() also accepts "²", which int() cannot read
            raise ValueError(f"PL_GLOBAL_SEED={text!r} must be an integer from 0 to 2**32 - 1.")
        seed = int(text)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed!r} must be an integer from 0 to 2**32 - 1.")
    global _rank_seed
    _rank_seed = None
    seed_generators(seed)
    os.environ |= {"PL_GLOBAL_SEED": str(seed), "PL_SEED_WORKERS": str(int(workers))}
    return seed


def seed_generators(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch with an integer from 0 to 2**32 - 1."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


_common_seeds: dict[int, int] = {}  # the seed of all ranks, by the seed that this rank was given instead


def seed_rank(seed: int, rank: int) -> None:
    """Seed the generators of this rank with ``seed + rank``. `RunRng` keeps these random numbers."""
    global _rank_seed
    own = seed_everything((seed + rank) % 2**32)
    _common_seeds[own], _rank_seed = seed, own


def read_common_seed() -> int:
    """Return the seed of torch's generator, or the one that all ranks shared before each drew its own numbers."""
    seed = torch.initial_seed()
    return _common_seeds.get(seed, seed)


class RunRng:
    """RNG states of the ranks of a run, and the stream from which the order of samples is drawn.

    With a world size of one and no ``data_seed``, the order of samples is drawn from the process's own generators, as
    in a plain loop. Otherwise, it is drawn from a separate stream.

    Attributes:
        keyed: Whether each micro-batch is seeded by its position in the data, whatever process computes it.
        stream: The stream from which the order of samples is drawn; None until `start`.
        first_state: The RNG state with which the stream began; empty until `start`.
    """

    def __init__(self, world: World, strategy: Strategy, keyed: bool = False) -> None:
        self.keyed = keyed
        self.stream: RandomStream | None = None
        self.first_state: State = {}
        self._world = world
        self._strategy = strategy
        self._ranks_differ = False

    def start(self, data_seed: int | None = None) -> RandomStream:
        """Start the stream, and give all ranks rank zero's RNG state on the CPU.

        The stream starts from ``data_seed`` if that is set, otherwise from rank zero's RNG state. Until `draw_apart` is
        called, all ranks draw the same random numbers on the CPU, unless the script has seeded each rank differently
        with `seed_rank`.
        """
        with isolated_random_state():
            if data_seed is not None:
                seed_generators(data_seed)
            order = host_state()
        # The state of a CUDA generator is of no use to other ranks, and its size differs between ranks that see
        # different devices.
        apart = torch.initial_seed() == _rank_seed and self._strategy.data_world.size == self._world.size
        order, common, apart = self._world.broadcast((order, host_state(), apart))
        own = self._world.size > 1 or data_seed is not None or self.keyed
        self.stream = RandomStream(order) if own else ProcessStream()
        self.first_state = order
        self._ranks_differ = apart
        if self._world.rank and not apart:
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
        if rank and not self.keyed:
            seed = seed_from(self.first_state, f"process {rank}") % 2**32
            _common_seeds[seed] = read_common_seed()
            seed_generators(seed)

    @contextmanager
    def drawing_alike(self, purpose: str) -> Iterator[None]:
        """Return a context in which all ranks draw the same random numbers, for use after `draw_apart`.

        Different values of ``purpose`` result in different random numbers.
        """
        if not self._ranks_differ or (self._world.size == 1 and not self.keyed):
            yield
            return
        with isolated_random_state():
            seed_generators(seed_from(self.first_state, purpose) % 2**32)
            yield
