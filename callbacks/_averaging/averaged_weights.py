"""Averages of a model's weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ...engine import strip_compile_prefix
from ...engine.checkpoint import OpenCheckpoint, Stored, model_part, open_added
from ...strategies.distributed import cut_like, is_sharded, local
from .._pruning import collect_masks

if TYPE_CHECKING:
    from ...trainer import Trainer

KEYS: tuple[str, str] = ("weight_averaging", "stochastic_weight_averaging")
"""Names under which the averaging callbacks save their averages in a checkpoint."""

Average = Callable[[list[Tensor], list[Tensor], int], None]
"""Function that updates averages in place, from the current values and the number of earlier updates."""


def lerp(share: float) -> Average:
    """Return an averaging function that moves the average toward the current value.

    Args:
        share: Fraction of the distance that the average moves in each update, from 0 to 1.
    """
    return lambda averages, current, count: torch._foreach_lerp_(averages, current, share)


def average_equally(averages: list[Tensor], current: list[Tensor], count: int) -> None:
    """Update averages in place so that all averaged values have the same weight.

    Args:
        averages: The averages.
        current: The current values.
        count: Number of values that the averages already include.
    """
    torch._foreach_lerp_(averages, current, 1 / (count + 1))


def wrap_avg_fn(function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Average:
    """Return an averaging function that calls torch's ``avg_fn`` for each tensor.

    Args:
        function: ``avg_fn(averaged, current, num_averaged)``, which returns the new average.
    """

    def average(averages: list[Tensor], current: list[Tensor], count: int) -> None:
        for averaged, value in zip(averages, current, strict=True):
            averaged.copy_(function(averaged, value, torch.tensor(count, device="cpu")))

    return average


class Averages:
    """Averages of a model's parameters and persistent buffers.

    Half-precision values are averaged in float32. Integer and boolean tensors are not averaged; their latest values are
    kept. If the model is pruned, the averages that are applied or saved are pruned, too.

    Args:
        module: The model, as prepared by the strategy.
        buffers: Whether to average persistent buffers, too.
        device: Device of the averages; None uses the device of the model's tensors.

    Attributes:
        count: Number of updates.
        values: Averages by name, with the model's sharding. A tied parameter is listed under each of its names.
    """

    def __init__(self, module: nn.Module, buffers: bool, device: torch.device | None = None) -> None:
        self.count = 0
        self.values: dict[str, Tensor] = {}
        self._module = module
        self._parameters = list(module.parameters())
        self._buffers: list[tuple[dict[str, Any], str]] = []  # a module may replace a buffer by another tensor
        self._before: list[Tensor] | None = None
        self._names: list[list[str]] = []  # names of each tensor, including those of tensors tied to it
        self._local_averages: list[Tensor] = []
        masks = collect_masks(module)
        names: dict[int, list[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            name, stem = strip_compile_prefix(name), strip_compile_prefix(name).removesuffix("_orig")
            names.setdefault(id(parameter), []).append(stem if stem in masks else name)
        for parameter in self._parameters:
            self._hold(names[id(parameter)], parameter, device)
        if buffers:
            self._hold_buffers({f"{name}_mask" for name in masks}, device)
        continuous = [value.is_floating_point() or value.is_complex() for value in self._local_averages]
        self._floats = [n for n, is_float in enumerate(continuous) if is_float]
        self._others = [n for n, is_float in enumerate(continuous) if not is_float]

    def _hold_buffers(self, without: set[str], device: torch.device | None) -> None:
        names: dict[tuple[int, str], list[str]] = {}
        for path, part in self._module.named_modules(remove_duplicate=False):
            for name, buffer in part._buffers.items():
                full = strip_compile_prefix(f"{path}.{name}" if path else name)
                if buffer is None or full in without or name in part._non_persistent_buffers_set:
                    continue
                if (id(part), name) not in names:
                    self._buffers.append((part._buffers, name))
                names.setdefault((id(part), name), []).append(full)
        for tied_names, buffer in zip(names.values(), self.buffers, strict=True):
            self._hold(tied_names, buffer, device)

    def _hold(self, names: list[str], tensor: Tensor, device: torch.device | None) -> None:
        narrow = tensor.is_floating_point() and tensor.element_size() < 4
        value = tensor.detach().clone().to(device=device, dtype=torch.float32 if narrow else None)
        self.values |= dict.fromkeys(names, value)
        self._names.append(names)
        self._local_averages.append(local(value))

    def _list_tensors(self) -> list[Tensor]:
        return [*self._parameters, *self.buffers]

    @property
    def buffers(self) -> list[Tensor]:
        """Buffers of the model that are averaged."""
        return [table[name] for table, name in self._buffers]

    @torch.no_grad()
    def update(self, average: Average) -> None:
        """Add the model's current values to the averages. The first update copies them.

        Args:
            average: Function that updates the averages in place.
        """
        current_values = [local(tensor.detach()) for tensor in self._list_tensors()]
        averages = self._local_averages
        if not self.count:
            torch._foreach_copy_(averages, current_values)
        else:
            float_averages = [averages[n] for n in self._floats]
            average(
                float_averages,
                [current_values[n].to(averages[n].device, averages[n].dtype) for n in self._floats],
                self.count,
            )
            if self._others:
                torch._foreach_copy_([averages[n] for n in self._others], [current_values[n] for n in self._others])
        self.count += 1

    # -- in the model --------------------------------------------------------------------------------------------

    @property
    def is_applied(self) -> bool:
        """Return whether the averages are in the model."""
        return self._before is not None

    def apply_to_model(self) -> None:
        """Put the averages into the model."""
        if self._before is None:
            with torch.inference_mode(False), torch.no_grad():
                tensors = self._list_tensors()
                before = [
                    tensor.data if _can_swap_data(tensor, average) else local(tensor.detach()).clone()
                    for tensor, average in zip(tensors, self._local_averages, strict=True)
                ]
                self._before = before  # from here on `restore_model` can undo the change
                self._write_values(tensors, self._prune_averages())

    def restore_model(self) -> None:
        """Put the model's own values back."""
        if self._before is not None:
            with torch.inference_mode(False), torch.no_grad():
                self._write_values(self._list_tensors(), self._before)
            self._before = None

    def keep_in_model(self) -> None:
        """Keep the averages in the model, and discard the values that they replaced."""
        self._before = None

    def _prune_averages(self) -> list[Tensor]:
        masks = collect_masks(self._module)
        return [
            _apply_masks(average, [masks.get(name) for name in names])
            for average, names in zip(self._local_averages, self._names, strict=True)
        ]

    def _write_values(self, tensors: list[Tensor], values: list[Tensor]) -> None:
        for tensor, average, value in zip(tensors, self._local_averages, values, strict=True):
            if _can_swap_data(tensor, average):
                tensor.data = value  # no copy
            else:  # also for a shard: the all-gather reads from this memory
                local(tensor.detach()).copy_(value)

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the count and the averages, if any."""
        masks = collect_masks(self._module)
        weights = {name: _apply_masks(value, [masks.get(name)]) for name, value in self.values.items()}
        return {"count": self.count, "weights": weights if self.count else {}}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned, saved with any sharding. Its tensors may be read lazily.

        Args:
            state_dict: The saved state.

        Raises:
            ValueError: If the names of the averages differ from those of this model.
        """
        saved = state_dict["weights"]
        if saved and saved.keys() != self.values.keys():
            raise ValueError(
                f"the checkpoint's averaged weights do not match the model: "
                f"{_describe_difference(saved.keys(), self.values.keys())}. Use the same model and the same value of "
                "use_buffers as the run that saved the checkpoint."
            )
        for name, value in saved.items():
            average = self.values[name]
            part = value if is_sharded(value) else cut_like(value, average)
            local(average).copy_(local(part))
        self.count = state_dict["count"]


def _apply_masks(value: Tensor, masks: list[Tensor | None]) -> Tensor:
    """Return ``value`` with zeros where all masks are zero. None stands for a mask of ones."""
    mask: Tensor | None = None
    for other in masks:
        if other is None:
            return value
        mask = other if mask is None else torch.maximum(mask, other)
    return value if mask is None else value * mask.to(value.device, value.dtype)


def _can_swap_data(tensor: Tensor, average: Tensor) -> bool:
    return not is_sharded(tensor) and (tensor.dtype, tensor.device) == (average.dtype, average.device)


def resolve_averages_device(trainer: Trainer, device: Any, name: str, strict: bool) -> torch.device | None:
    """Return the device of the averages; None means the device of the weights.

    If the averages of a sharded model cannot be on ``device``, raise an error with ``strict``; otherwise, return None.
    """
    strategy = trainer.accelerator.strategy
    if (local_steps := getattr(strategy, "local_steps", None)) is not None:
        raise ValueError(
            f"{name} cannot run with DDP(local_sgd_steps={local_steps.every}), because each process trains "
            f"its own model between two synchronizations. Remove {name} or local_sgd_steps."
        )
    place = None if device is None else torch.device(device)
    if place is None or not strategy.sharded or place.type == trainer.accelerator.device.type:
        return place
    if strict:
        raise ValueError(
            f"{name}(device={str(device)!r}) cannot run with strategy={strategy.name!r}, because the averages of a "
            f"sharded model are on the device of its shards. Remove device={str(device)!r}."
        )
    return None


def _describe_difference(saved: Set[str], current: Set[str]) -> str:
    parts = []
    for owner, names in (("the checkpoint", sorted(saved - current)), ("the model", sorted(current - saved))):
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        parts += [f"only {owner} has {', '.join(names[:5])}{more}"] if names else []
    return "; ".join(parts)


def find_saved_averages(opened: OpenCheckpoint) -> Mapping[str, Any] | None:
    """Return the entry that an averaging callback added to a checkpoint, with lazily read tensors, or None.

    Args:
        opened: The opened checkpoint.
    """
    added = open_added(opened)
    return next((added[key] for key in KEYS if key in added), None)


def averaged_weights(path: Path | str) -> dict[str, Tensor]:
    """Return the averaged weights from a checkpoint as a dict that ``load_state_dict`` accepts.

    Tensors that were not averaged are returned with their trained values.

    Args:
        path: Path or URL of a checkpoint from a run with an averaging callback.

    Returns:
        Tensors by name.

    Raises:
        ValueError, TypeError: If the path is invalid, or the checkpoint is damaged or has no averaged weights.
        OSError: If the checkpoint cannot be read.
    """
    opened = OpenCheckpoint(path)
    opened.verify()
    saved = find_saved_averages(opened)
    if saved is None or not saved["weights"]:
        raise ValueError(
            f"{path} has no averaged weights: it was saved without an averaging callback, or before the weights were "
            "first averaged. Pass a later checkpoint of a run with such a callback."
        )
    weights: dict[str, Tensor] = opened.read_part(model_part(0))
    return weights | dict(_cast(saved["weights"], weights))


def _cast(averages: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the name of each average, and the average in the dtype of the weight with that name."""
    for name, value in averages.items():
        tensor = value.read() if isinstance(value, Stored) else value
        yield name, tensor.to(weights[name].dtype) if name in weights else tensor
