"""The random state of a process, and the stream that data order is drawn from."""

from __future__ import annotations

import hashlib
import os
import random
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

State = dict[str, Any]


def random_state() -> State:
    """The state of every generator a step may draw from: Python's, NumPy's, torch's, and each device's."""
    state = host_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
        state["cuda_device"] = torch.cuda.current_device()
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def host_state() -> State:
    """As `random_state`, without the devices'."""
    return {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}


def set_host_state(state: Mapping[str, Any]) -> None:
    """Put back what `host_state` returned."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])


def set_random_state(state: Mapping[str, Any]) -> None:
    """Put back what `random_state` returned."""
    set_host_state(state)
    if "cuda" in state and torch.cuda.is_available():
        count = min(len(state["cuda"]), torch.cuda.device_count())
        for device in range(count):
            torch.cuda.set_rng_state(state["cuda"][device], device)
        if "cuda_device" in state:  # the process may compute on another one now
            torch.cuda.set_rng_state(state["cuda"][state["cuda_device"]], torch.cuda.current_device())
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])


@contextmanager
def isolated_random_state() -> Iterator[None]:
    """Whatever is drawn inside leaves no trace outside."""
    before = random_state()
    try:
        yield
    finally:
        set_random_state(before)


class Draw(NamedTuple):
    """Where a stream was before something was drawn from it, and where it is since."""

    before: State
    after: State


class RandomStream:
    """A copy of a process's random state that only data order is drawn from.

    The ranks of a run draw the order of samples from one that rank zero's state began, so all draw the same one,
    whatever their models draw. Devices' generators are left alone: swapping them would wait for the device.

    Args:
        state: what `random_state` returned.
    """

    def __init__(self, state: State) -> None:
        self.state: State = {name: state[name] for name in ("python", "numpy", "torch")}
        self._lent = False

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Inside, the process's generators are this stream's. May be entered again from within."""
        if self._lent:
            yield
            return
        before = host_state()
        set_host_state(self.state)
        self._lent = True
        try:
            yield
        finally:
            self._lent = False
            self.state = host_state()
            set_host_state(before)

    def get_state(self) -> State:
        """Where it is, inside `drawing` or out."""
        return host_state() if self._lent else dict(self.state)

    def go_to(self, state: State) -> None:
        """Go on from a state that `get_state` returned, inside `drawing` or out."""
        if self._lent:
            set_host_state(state)
        else:
            self.state = dict(state)

    def follow(self, draw: Draw) -> None:
        """Go to where a copy of this stream is, of which the loop has reached what was drawn."""
        self.state = draw.after

    def advance(self) -> None:
        """Draw one number from each generator."""
        with self.drawing():
            random.random()
            np.random.random()
            torch.rand((), device="cpu")


class ProcessStream(RandomStream):
    """The process's own generators as the stream: a run on one process draws what a plain loop draws, when it does."""

    def __init__(self) -> None:
        pass

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Nothing has to be lent."""
        yield

    def get_state(self) -> State:
        """Where the process's generators are now."""
        return host_state()

    def go_to(self, state: State) -> None:
        """Set the process's generators."""
        set_host_state(state)

    def follow(self, draw: Draw) -> None:
        """Go to where a copy is, unless something else was drawn since the copy was where the process is."""
        if not are_equal(draw.before, draw.after) and are_equal(host_state(), draw.before):
            set_host_state(draw.after)


def are_equal(first: State, second: State) -> bool:
    """Whether two states that `host_state` returned are one."""
    name, keys, *rest = first["numpy"]
    other_name, other_keys, *other_rest = second["numpy"]
    return (
        torch.equal(first["torch"], second["torch"])
        and first["python"] == second["python"]
        and (name, rest) == (other_name, other_rest)
        and np.array_equal(keys, other_keys)
    )


def seed_from(state: State, purpose: int | str) -> int:
    """A 63-bit number that follows from a stream's state and an epoch or other purpose, without drawing from it."""
    digest = hashlib.sha256(state["torch"].numpy().tobytes() + str(purpose).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def seed_everything(seed: int | None = None, workers: bool = True, verbose: bool = True) -> int:
    """Seed Python's, NumPy's and torch's generators (all devices).

    Args:
        seed: from 0 to 2**32 - 1. None reads ``PL_GLOBAL_SEED``, which Lightning's users set, else takes 0.
        workers: accepted for Lightning's signature; loader workers are always seeded, sample by sample.
        verbose: accepted for Lightning's signature; nothing is printed.

    Returns:
        The seed.

    Raises:
        ValueError: if the seed is no whole number in that range.
    """
    if seed is None:
        text = os.environ.get("PL_GLOBAL_SEED", "0")
        if not re.fullmatch("[0-9]{1,10}", text):  # isdigit() also holds for "²", which int() can't read
            raise ValueError(f"PL_GLOBAL_SEED={text!r} is not a whole number from 0 to 2**32 - 1.")
        seed = int(text)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed!r} must be a whole number from 0 to 2**32 - 1.")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return seed
