"""Checks of values that must be the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parameter import is_lazy
from xxhash import xxh3_64

from ..common.messages import abbreviate, named_ranks
from . import data

if TYPE_CHECKING:
    from ..strategies import World


_SHOWN = 10
_FIX = "Pass the same values on every rank."


def check_values_match(subject: str, values: Mapping[str, Any], world: World, fix: str = _FIX) -> None:
    """Check that all ranks have the same values, in the same order. Must be called on all ranks.

    Args:
        subject: The beginning of the error message.
        values: The values of this rank, by name. They are compared by their ``repr``.
        world: The ranks to compare.
        fix: The end of the error message. Default: ``"Pass the same values on every rank."``

    Raises:
        ValueError: If the values or their order differ between ranks. Every rank raises the error.
    """
    if world.size == 1:
        return
    digest = xxh3_64(repr(list(values.items())).encode()).hexdigest()
    if len(set(world.gather_objects(digest))) == 1:
        return
    every = world.gather_objects(dict(values))
    lines = []
    for name in dict.fromkeys(name for rank_values in every for name in rank_values):
        ranks: dict[str, list[int]] = {}
        for rank, rank_values in enumerate(every):
            ranks.setdefault(repr(rank_values[name]) if name in rank_values else "missing", []).append(rank)
        if len(ranks) > 1:
            separator = "; " if any("," in named_ranks(holders) for holders in ranks.values()) else ", "
            parts = [f"{value} on {named_ranks(holders)}" for value, holders in ranks.items()]
            lines.append(f"{name}: {separator.join(parts)}")
    listed = abbreviate(lines, _SHOWN, "\n  ") or "the same values, in a different order"
    raise ValueError(
        f"{subject}, so the ranks would take different steps, or wait for each other forever:\n  {listed}\n{fix}"
    )


def check_loaders_match(loader: Any, world: World) -> None:
    """Raise a ValueError on every rank if the loaders of the ranks differ in number, class or settings.

    A `CombinedLoader` is compared by its loaders. Samplers are compared by class. The data is not compared.
    """
    values: dict[str, Any] = {}
    loaders = loader.flattened if isinstance(loader, data.CombinedLoader) else [loader]
    for number, loader in enumerate(loaders):
        values[f"dataloader {number}"] = type(loader).__name__
        if data.shards_itself(loader):
            values[f"dataloader {number}, sampler"] = "each rank's own"
            continue
        for name in ("batch_size", "drop_last"):
            values[f"dataloader {number}, {name}"] = getattr(loader, name, None)
        for name in ("sampler", "batch_sampler"):
            values[f"dataloader {number}, {name}"] = type(getattr(loader, name, None)).__name__
    check_values_match(
        "the ranks have different dataloaders", values, world, "Create the same dataloaders on every rank."
    )


def check_model_matches(model: nn.Module, world: World) -> None:
    """Raise a ValueError on every rank if parameters or buffers of the ranks differ in form, such as shape or dtype.

    With several ranks, a lazy parameter also raises a ValueError, because replication and sharding need the parameter's
    values before the first batch.
    """
    if world.size == 1:
        return
    lazy = next((name for name, parameter in model.named_parameters() if is_lazy(parameter)), None)
    if lazy is not None:
        raise ValueError(
            f"{type(model).__name__}.{lazy} belongs to a lazy layer that has no weights yet, but {world.size} ranks "
            "need its weights before the first batch. Run a batch through the model when it is built (in __init__ or "
            "configure_model)."
        )
    values = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        shape = f"{str(tensor.dtype)[6:]} {list(tensor.shape)}"
        values[name] = f"{shape}, trained" if tensor.requires_grad else shape
    name = type(model).__name__
    check_values_match(f"the {name} differs between the ranks", values, world, f"Build the same {name} on every rank.")
