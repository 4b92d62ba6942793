"""Lightning's summaries of a model and of one layer, and their number formats."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from ..callbacks import Summary
from ..callbacks import summarize as summarize_model

UNKNOWN_SIZE = "?"
_UNITS = (" ", "K", "M", "B", "T")


class ModelSummary(Summary):
    """Table of a model's modules; see `treadle.callbacks.summarize`.

    Args:
        model: The model.
        max_depth: Number of levels of modules to list; -1 lists all levels, 0 lists only the totals. Default: 1.
    """

    def __init__(self, model: nn.Module, max_depth: int = 1) -> None:
        self.__dict__.update(vars(summarize_model(model, max_depth)))
        self._model, self._max_depth = model, max_depth
        self._rows = self.layers
        modules = dict(model.named_modules())
        self.layers = [row for row in self.layers if row.name in modules]  # without the model's own parameters

    @property
    def named_modules(self) -> list[tuple[str, nn.Module]]:
        """Modules in the summary, by name."""
        if self._max_depth == 1:
            return list(self._model.named_children())
        return list(self._model.named_modules())[1:] if self._max_depth else []

    @property
    def total_training_modes(self) -> dict[str, int]:  # type: ignore[override]  # those of now
        """Numbers of modules that are in training and in evaluation mode now, without the model itself."""
        modes = [module.training for module in self._model.modules()][1:]
        return {"train": modes.count(True), "eval": modes.count(False)}

    @property
    def in_sizes(self) -> list[Any]:
        """Shapes of the modules' inputs; unknown for a call without inputs."""
        return [size or UNKNOWN_SIZE for size in super().in_sizes]

    @property
    def _layer_summary(self) -> dict[str, SimpleNamespace]:  # Lightning's name, which public projects read
        names = ("layer_type", "num_parameters", "in_size", "out_size", "training")
        rows = zip(self.layer_types, self.param_nums, self.in_sizes, self.out_sizes, self.training_modes, strict=True)
        return {
            name: SimpleNamespace(**dict(zip(names, row, strict=True)))
            for name, row in zip(self.layer_names, rows, strict=True)
        }

    @property
    def total_layer_params(self) -> int:
        """Sum of `param_nums`."""
        return sum(self.param_nums)

    def columns(self) -> list[tuple[str, list[str]]]:
        """See `Summary.columns`. The table also has a row for the model's own parameters."""
        shown = copy.copy(self)
        shown.layers = self._rows
        return Summary.columns(shown)

    def __repr__(self) -> str:
        return str(self)


def summarize(lightning_module: nn.Module, max_depth: int = 1) -> ModelSummary:
    """Return the table of a model's modules; see `ModelSummary`."""
    return ModelSummary(lightning_module, max_depth)


class LayerSummary:
    """Summary of a layer: its class, its parameters, and the input and output shapes of its first call.

    Args:
        module: The layer. A hook on it records the shapes. Those of TorchScript modules stay unknown.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._sizes: tuple[Any, Any] = (UNKNOWN_SIZE, UNKNOWN_SIZE)
        self._handle: RemovableHandle | None = None
        if not isinstance(module, torch.jit.ScriptModule):  # ScriptModules do not support hooks
            self._handle = module.register_forward_hook(self._note_sizes, with_kwargs=True)

    def _note_sizes(self, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        inputs = (*args, *kwargs.values())
        self._sizes = parse_batch_shape(inputs[0] if len(inputs) == 1 else inputs), parse_batch_shape(output)
        self.detach_hook()

    def detach_hook(self) -> None:
        """Remove the hook. The recorded shapes are kept."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def __del__(self) -> None:
        self.detach_hook()

    @property
    def in_size(self) -> Any:
        """Shape of the inputs of the first call; see `parse_batch_shape`."""
        return self._sizes[0]

    @property
    def out_size(self) -> Any:
        """Shape of the output of the first call; see `parse_batch_shape`."""
        return self._sizes[1]

    @property
    def layer_type(self) -> str:
        """Name of the layer's class."""
        return type(self._module).__name__

    @property
    def num_parameters(self) -> int:
        """Number of elements of all parameters, except uninitialized ones."""
        return sum(p.numel() for p in self._module.parameters() if not is_lazy(p))

    @property
    def training(self) -> bool:
        """Return whether the layer is in train mode."""
        return self._module.training


def parse_batch_shape(batch: Any) -> Any:
    """Return the shape of a tensor as a list, or nested shapes for lists and tuples; ``"?"`` for any other value."""
    if hasattr(batch, "shape"):
        return list(batch.shape)
    return [parse_batch_shape(part) for part in batch] if isinstance(batch, list | tuple) else UNKNOWN_SIZE


def get_formatted_model_size(total_model_size: float) -> str:
    """Return a size as text with thousands separators and three decimals, such as ``"1,234.500"``."""
    return f"{total_model_size:,.3f}"


def get_human_readable_count(number: float) -> str:
    """Return a count of at least 0 as text with the unit K, M, B or T, such as ``"1.2 K"`` or ``"400 T"``.

    Counts below 1000 have no unit and end with two spaces.
    """
    if number < 0:
        raise ValueError(f"number={number} must be at least 0.")
    groups = min(max(len(str(int(number))) - 1, 0) // 3, len(_UNITS) - 1)
    scaled = number * 10 ** (-3 * groups)
    text = f"{int(scaled):,d}" if groups < 1 or scaled >= 100 else f"{scaled:,.1f}"
    return f"{text} {_UNITS[groups]}"
