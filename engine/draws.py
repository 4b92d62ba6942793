"""What a loader's order is drawn from: the run's stream, and the private generators of the user's samplers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from .random_state import RandomStream

_KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


class Draws:
    """The random sources of one loader, read and put back together.

    Args:
        stream: what is drawn from wherever the user gave no generator.
        owners: the user's loader and samplers; generators among their attributes are found, one level deep.
    """

    def __init__(self, stream: RandomStream, *owners: Any) -> None:
        self.stream = stream
        self.private: list[Any] = []
        for owner in owners:
            for _, value in sorted(getattr(owner, "__dict__", {}).items()):
                if isinstance(value, _KINDS) and not any(value is known for known in self.private):
                    self.private.append(value)

    def state(self) -> dict[str, Any]:
        """Where all of them are now."""
        return {"stream": self.stream.now(), "generators": self.private_states()}

    def load(self, state: dict[str, Any]) -> None:
        """Go back to a `state`."""
        self.stream.go_to(state["stream"])
        self.load_private(state["generators"])

    def private_states(self) -> list[Any]:
        """Where the private generators are now."""
        return [_get(generator) for generator in self.private]

    def load_private(self, states: list[Any]) -> None:
        """Put the private generators back.

        Raises:
            ValueError: if the states are those of another number of generators.
        """
        if len(states) != len(self.private):
            raise ValueError(
                f"the checkpoint's loader drew from {len(states)} generators of its own, this one has "
                f"{len(self.private)}: pass the same kind of sampler, or resume with weights only."
            )
        for generator, state in zip(self.private, states, strict=True):
            _set(generator, state)


def _get(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()


def _set(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)
