"""Random sampler that draws its order from a seed and the epoch number."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler


class SeedableRandomSampler(RandomSampler):
    """Random sampler that draws its order from a seed and the epoch number, as in Accelerate.

    The generator of an epoch is seeded with ``seed + epoch``. ``sampler`` is the user's sampler, whose generator is not
    used.
    """

    def __init__(self, sampler: RandomSampler, seed: int) -> None:
        super().__init__(sampler.data_source, sampler.replacement, sampler._num_samples)
        self.seed = seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        # A separate generator for each pass, so that another pass started in the meantime does not reseed it.
        self.generator = torch.Generator(torch.get_default_device()).manual_seed(self.seed + self.epoch)
        yield from super().__iter__()

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose order the next iteration draws."""
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the seed and the epoch number."""
        return {"seed": self.seed, "epoch": self.epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a state returned by `state_dict`, so that a resumed run keeps its seed."""
        self.seed, self.epoch = state_dict["seed"], state_dict["epoch"]


def replace_random_sampler(loader: Any, seed: int) -> Any:
    """Return a shallow copy of a ``DataLoader`` in which `SeedableRandomSampler` replaces torch's ``RandomSampler``.

    Any other object is returned unchanged.
    """
    if not isinstance(loader, DataLoader):
        return loader
    view, replaced = copy.copy(loader), dict[int, Any]()
    settings = view.__dict__  # a DataLoader refuses to set these by name after its construction
    settings["_iterator"] = None
    for name in ("sampler", "batch_sampler"):
        settings[name] = _replace_sampler(settings[name], seed, replaced)
    return view


def _replace_sampler(sampler: Any, seed: int, replaced: dict[int, Any]) -> Any:
    """Return ``sampler`` unchanged, or a replacement that draws its order from the seed."""
    # A subclass with its own order keeps it.
    if isinstance(sampler, RandomSampler) and type(sampler).__iter__ is RandomSampler.__iter__:
        return replaced.setdefault(id(sampler), SeedableRandomSampler(sampler, seed))
    within = getattr(sampler, "sampler", None)  # the sampler of a batch sampler
    replacement = _replace_sampler(within, seed, replaced) if within is not None else None
    if replacement is within:
        return sampler
    copied = copy.copy(sampler)
    copied.sampler = replacement
    return copied
