"""Averaged weights: each process averages what it holds, and can put the averages into the model and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
"""Where the callbacks' states are among what a checkpoint's hooks have added."""

Average = Callable[[list[Tensor], list[Tensor], int], None]
"""Changes averages in place, given the current values and how many went into the averages before."""


def lerp(share: float) -> Average:
    """The average moves by this share of the way to the current value."""
    return lambda averages, current, count: torch._foreach_lerp_(averages, current, share)


def average_equally(averages: list[Tensor], current: list[Tensor], count: int) -> None:
    """All that was averaged counts the same."""
    torch._foreach_lerp_(averages, current, 1 / (count + 1))


def wrap_avg_fn(function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Average:
    """torch's ``avg_fn(averaged, current, num_averaged)``."""

    def average(averages: list[Tensor], current: list[Tensor], count: int) -> None:
        for averaged, value in zip(averages, current, strict=True):
            averaged.copy_(function(averaged, value, torch.tensor(count, device="cpu")))

    return average


class Averages:
    """Averages of a model's parameters, and of those of its buffers that are saved.

    Averages of half-precision values are float32: in bfloat16 a step of a thousandth of the way is lost in rounding.
    What is not a floating-point number is not averaged: the newest counts. Where the model is pruned, so are the
    averages that it is given and those that are saved.

    Args:
        module: The model, as the strategy has laid it out.
        buffers: Whether buffers are averaged; else the model keeps its own.
        device: Where averages lie; None for where the values are.

    Attributes:
        count: How many times the model was averaged.
        values: The averages by name, tied parameters by each of theirs; of a sharded parameter this process's part.
    """

    def __init__(self, module: nn.Module, buffers: bool, device: torch.device | None = None) -> None:
        self.count = 0
        self.values: dict[str, Tensor] = {}
        self._module = module
        self._parameters = list(module.parameters())
        self._buffers: list[tuple[dict[str, Any], str]] = []  # a module may put another tensor in a buffer's place
        self._before: list[Tensor] | None = None
        self._names: list[list[str]] = []  # of each tensor, all that are tied in it
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
        half = tensor.dtype in (torch.float16, torch.bfloat16)
        value = tensor.detach().clone().to(device=device, dtype=torch.float32 if half else None)
        self.values |= dict.fromkeys(names, value)
        self._names.append(names)
        self._local_averages.append(local(value))

    def _list_tensors(self) -> list[Tensor]:
        return [*self._parameters, *self.buffers]

    @property
    def buffers(self) -> list[Tensor]:
        """The model's buffers that are averaged."""
        return [table[name] for table, name in self._buffers]

    @torch.no_grad()
    def update(self, average: Average) -> None:
        """Take the model's values in; the first time they are the averages."""
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
        """Whether the model has the averages."""
        return self._before is not None

    def apply_to_model(self) -> None:
        """Give the model the averages. What it had before is kept for `restore_model`, whatever happens in between."""
        if self._before is None:
            with torch.inference_mode(False), torch.no_grad():
                tensors = self._list_tensors()
                before = [
                    tensor.data if _can_swap_data(tensor, average) else local(tensor.detach()).clone()
                    for tensor, average in zip(tensors, self._local_averages, strict=True)
                ]
                self._before = before  # from here on it can be taken back
                self._write_values(tensors, self._prune_averages())

    def restore_model(self) -> None:
        """Give the model back what it had. May be called at any time."""
        if self._before is not None:
            with torch.inference_mode(False), torch.no_grad():
                self._write_values(self._list_tensors(), self._before)
            self._before = None

    def keep_in_model(self) -> None:
        """The model keeps the averages."""
        self._before = None

    def _prune_averages(self) -> list[Tensor]:
        """The averages, zero where all that computes with them is pruned."""
        masks = collect_masks(self._module)
        return [
            _apply_masks(average, [masks.get(name) for name in names])
            for average, names in zip(self._local_averages, self._names, strict=True)
        ]

    def _write_values(self, tensors: list[Tensor], values: list[Tensor]) -> None:
        for tensor, average, value in zip(tensors, self._local_averages, values, strict=True):
            if _can_swap_data(tensor, average):
                tensor.data = value  # nothing is copied
            else:  # also where it is sharded: what gathers it knows this memory
                local(tensor.detach()).copy_(value)

    # -- state ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The count and the averages, as they lie on the processes."""
        masks = collect_masks(self._module)
        weights = {name: _apply_masks(value, [masks.get(name)]) for name, value in self.values.items()}
        return {"count": self.count, "weights": weights if self.count else {}}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned, of any layout; tensors may be unread.

        Raises:
            ValueError: If it is another model's.
        """
        saved = state_dict["weights"]
        if saved and saved.keys() != self.values.keys():
            other = sorted(saved.keys() ^ self.values.keys())
            raise ValueError(
                f"the checkpoint's averaged weights are another model's, or others were averaged (use_buffers): only "
                f"one of both has {', '.join(other[:5])}."
            )
        for name, value in saved.items():
            average = self.values[name]
            part = value if is_sharded(value) else cut_like(value, average)
            local(average).copy_(local(part))
        self.count = state_dict["count"]


def _apply_masks(value: Tensor, masks: list[Tensor | None]) -> Tensor:
    """A value with zeros where each of the masks has them; None has none."""
    mask: Tensor | None = None
    for other in masks:
        if other is None:
            return value
        mask = other if mask is None else torch.maximum(mask, other)
    return value if mask is None else value * mask.to(value.device, value.dtype)


def _can_swap_data(tensor: Tensor, average: Tensor) -> bool:
    return not is_sharded(tensor) and (tensor.dtype, tensor.device) == (average.dtype, average.device)


def resolve_averages_device(trainer: Trainer, device: Any, name: str, strict: bool) -> torch.device | None:
    """Where averages are to lie.

    Args:
        trainer: Whose run it is.
        device: What the user gave.
        name: The callback's.
        strict: Whether a device that can't be had is an error; else averages lie where the values are.

    Raises:
        ValueError: If the run can't be averaged so.
    """
    strategy = trainer.accelerator.strategy
    if getattr(strategy, "local_steps", None) is not None:
        raise ValueError(
            f"{name} can't run with DDP(local_sgd_steps): between two exchanges each process trains a model of its "
            "own. Leave out one of them."
        )
    place = None if device is None else torch.device(device)
    if place is None or not strategy.sharded or place.type == trainer.accelerator.device.type:
        return place
    if strict:
        raise ValueError(
            f"{name}(device={str(device)!r}) with strategy={strategy.name!r}: the averages of a sharded model lie "
            "where its parts do. Leave out device."
        )
    return None


def find_saved_averages(opened: OpenCheckpoint) -> Mapping[str, Any] | None:
    """Return what an averaging callback has put into a checkpoint, its tensors unread; None where there is nothing."""
    added = open_added(opened)
    return next((added[key] for key in KEYS if key in added), None)


def averaged_weights(path: Path | str) -> dict[str, Tensor]:
    """The averaged weights in a checkpoint, for ``load_state_dict``; what was not averaged is as it was trained.

    Args:
        path: The checkpoint, saved in a run with an averaging callback.

    Raises:
        ValueError: If it is damaged, or holds no averaged weights.
    """
    opened = OpenCheckpoint(path)
    opened.verify()
    saved = find_saved_averages(opened)
    if saved is None or not saved["weights"]:
        raise ValueError(f"{path} holds no averaged weights: it was saved before any, or without such a callback.")
    weights: dict[str, Tensor] = opened.read_part(model_part(0))
    return weights | dict(_cast(saved["weights"], weights))


def _cast(averages: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, value in averages.items():
        tensor = value.read() if isinstance(value, Stored) else value
        yield name, tensor.to(weights[name].dtype) if name in weights else tensor
