"""Hooks of ``accelerate.hooks`` that move or cast a module's weights for the forward pass."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...engine.big_models import (
    ModelHook,
    OffloadedTensor,
    add_hook_to_module,
    group_tied_names,
    iter_direct_tensors,
    load_all,
    make_placeholder,
    move,
    named_tensors,
    release_all,
    resolve,
    restore,
    set_tensor_by_names,
)
from ...utils import find_device
from .module_tensors import (
    Device,
    TiedParams,
    get_non_persistent_buffers,
    named_module_tensors,
    set_module_tensor_to_device,
)
from .offload_files import PrefixedDataset


@dataclass(frozen=True)
class _MappedPiece:
    """Tensor that is looked up in a mapping at each access, so that the mapping can change."""

    weights: Mapping[str, Tensor]
    name: str

    @property
    def shape(self) -> torch.Size:
        return self.weights[self.name].shape

    @property
    def dtype(self) -> torch.dtype:
        return self.weights[self.name].dtype

    def get(self, exact: bool = True) -> Tensor:
        return self.weights[self.name]

    def fill(self, out: Tensor) -> None:
        out.copy_(self.weights[self.name])


@dataclass(eq=False, repr=False)
class AlignDevicesHook(ModelHook):
    """Hook that moves a module's inputs and its offloaded weights to the device on which the module runs.

    Args:
        execution_device: The device on which the module runs. Required if weights are offloaded. Default: None, which
            moves no inputs.
        offload: Whether weights are offloaded except during the forward pass. Default: False.
        io_same_device: Whether to return the output on the device of the first input tensor. Default: False.
        weights_map: Values of offloaded weights by name in the module. Default: the current values, kept on the CPU.
        offload_buffers: Whether ``offload`` also applies to persistent buffers. Default: False.
        place_submodules: Whether the hook also handles the weights of submodules. Default: False.
        skip_keys: Names of keyword arguments and output entries that are not moved. Default: none.
        tied_params_map: See `set_module_tensor_to_device`.
    """

    execution_device: Device | None = None
    offload: bool = False
    io_same_device: bool = False
    weights_map: Mapping[str, Tensor] | None = None
    offload_buffers: bool = False
    place_submodules: bool = False
    skip_keys: str | list[str] | None = None
    tied_params_map: TiedParams | None = None
    input_device: torch.device | None = field(default=None, init=False)
    original_devices: dict[str, torch.device] = field(default_factory=dict, init=False)
    _has_own_map: bool = field(default=False, init=False)
    _offloaded: dict[str, OffloadedTensor] = field(default_factory=dict, init=False)

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Offload the module's weights if ``offload`` is set, and move its other tensors to ``execution_device``."""
        if str(self.execution_device) == "meta":
            self.tied_params_map = None  # all meta tensors have the same address
        tensors = named_tensors(module) if self.place_submodules else dict(iter_direct_tensors(module))
        if self.offload:
            self.original_devices = {name: tensor.device for name, tensor in tensors.items()}
        for names in group_tied_names(tensors):
            if self.offload and self._goes_away(module, tensors[names[0]], names[0]):
                self._offload(module, names, tensors[names[0]])
            elif self.execution_device is not None:
                ties = self.tied_params_map
                set_module_tensor_to_device(module, names[0], self._get_device(), tied_params_map=ties)
                _tie(module, names)
        return module

    def _goes_away(self, module: nn.Module, tensor: Tensor, name: str) -> bool:
        if isinstance(tensor, nn.Parameter):
            return True
        return self.offload_buffers and name not in get_non_persistent_buffers(module, self.place_submodules, fqns=True)

    def _offload(self, module: nn.Module, names: list[str], tensor: Tensor) -> None:
        """Replace a tensor of the module with a placeholder, under all its names."""
        if self.weights_map is None or self._has_own_map:
            self.weights_map, self._has_own_map = self.weights_map or {}, True
            self.weights_map |= dict.fromkeys(names, tensor.detach().to("cpu"))  # type: ignore[operator]
        source = next((name for name in names if name in self.weights_map), None)
        if source is None:
            raise ValueError(f"weights_map has no values for {names[0]!r}. Add them, or remove weights_map.")
        shape, placeholder = make_placeholder(tensor)
        for name in names:
            path, _, last = name.rpartition(".")
            piece = _MappedPiece(self.weights_map, source)
            self._offloaded[name] = OffloadedTensor(module.get_submodule(path), last, piece, shape, placeholder)
        set_tensor_by_names(module, names, placeholder)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Load the offloaded weights, and move the inputs to ``execution_device``."""
        if self.io_same_device:
            self.input_device = find_device([args, kwargs])
        if self._offloaded:
            load_all(self._offloaded.values(), self._get_device())
        if self.execution_device is None:
            return args, kwargs
        device = self._get_device()
        return move(args, device, ()), move(kwargs, device, self._get_skip_keys())

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        """Release the offloaded weights and, with ``io_same_device``, move the output to the first input's device."""
        release_all(self._offloaded.values())
        if self.io_same_device and self.input_device is not None:
            return move(output, self.input_device, self._get_skip_keys())
        return output

    def detach_hook(self, module: nn.Module) -> nn.Module:
        """Restore the weights on their original devices if ``offload`` is set, except those from the meta device."""
        origins = {name: device for name, device in self.original_devices.items() if device.type != "meta"}
        restore((self._offloaded[name], device) for name, device in origins.items() if name in self._offloaded)
        for name, device in origins.items():
            if name not in self._offloaded:
                set_module_tensor_to_device(module, name, device)
        self._offloaded = {}
        return module

    def _get_device(self) -> torch.device:
        if isinstance(self.execution_device, torch.device):
            return self.execution_device
        if self.execution_device is None:
            raise ValueError(
                "offload=True requires execution_device, the device to which the weights are moved for the forward "
                "pass. Pass execution_device."
            )
        return resolve(self.execution_device, f"execution_device={self.execution_device!r}")

    def _get_skip_keys(self) -> Collection[str]:
        return (self.skip_keys,) if isinstance(self.skip_keys, str) else self.skip_keys or ()


def _tie(module: nn.Module, names: list[str]) -> None:
    if len(names) > 1:
        path, _, last = names[0].rpartition(".")
        set_tensor_by_names(module, names[1:], getattr(module.get_submodule(path), last))


def attach_execution_device_hook(
    module: nn.Module,
    execution_device: Device,
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: TiedParams | None = None,
) -> None:
    """Add an `AlignDevicesHook` to ``module`` and each of its submodules that has weights but no hook.

    Submodules of modules whose classes ``preload_module_classes`` names get no hooks. The other arguments are those of
    `AlignDevicesHook`.
    """
    if not hasattr(module, "_hf_hook") and module.state_dict():
        hook = AlignDevicesHook(execution_device, skip_keys=skip_keys, tied_params_map=tied_params_map)
        add_hook_to_module(module, hook)
    if type(module).__name__ in (preload_module_classes or ()):
        return
    for child in module.children():
        attach_execution_device_hook(child, execution_device, skip_keys, preload_module_classes, tied_params_map)


def attach_align_device_hook(
    module: nn.Module,
    execution_device: Device | None = None,
    offload: bool = False,
    weights_map: Mapping[str, Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: TiedParams | None = None,
) -> None:
    """Add an `AlignDevicesHook` to ``module`` and each of its submodules that owns tensors directly.

    ``module_name`` is the prefix of names in ``weights_map``. With ``offload``, modules whose classes
    ``preload_module_classes`` names load all weights of their submodules, which get no hooks. The other arguments are
    those of `AlignDevicesHook`.
    """

    def visit(path: str, part: nn.Module) -> None:
        whole = offload and type(part).__name__ in (preload_module_classes or ())
        prefix = f"{path}." if path else ""
        if whole or next(named_module_tensors(part), None) is not None:
            hook = AlignDevicesHook(
                execution_device,
                offload=offload,
                weights_map=None if weights_map is None else PrefixedDataset(weights_map, prefix),
                offload_buffers=offload_buffers,
                place_submodules=whole,
                skip_keys=skip_keys,
                tied_params_map=tied_params_map,
            )
            add_hook_to_module(part, hook, append=True)
        for name, child in part.named_children() if not whole else ():
            visit(prefix + name, child)

    visit(module_name, module)


def attach_align_device_hook_on_blocks(
    module: nn.Module,
    execution_device: Device | Mapping[str, Device] | None = None,
    offload: bool | Mapping[str, bool] = False,
    weights_map: Mapping[str, Tensor] | None = None,
    offload_buffers: bool = False,
    module_name: str = "",
    skip_keys: str | list[str] | None = None,
    preload_module_classes: list[str] | None = None,
    tied_params_map: TiedParams | None = None,
) -> None:
    """Add hooks of class `AlignDevicesHook` to the named blocks of a model, or to the whole model.

    The arguments are those of `attach_align_device_hook`. If ``execution_device`` or ``offload`` is a dict, its keys
    name the blocks. If both are dicts, only the blocks that both contain are used.
    """
    shared: dict[str, Any] = {"skip_keys": skip_keys, "tied_params_map": tied_params_map}
    away: dict[str, Any] = {"weights_map": weights_map, "offload_buffers": offload_buffers, **shared}
    if not isinstance(execution_device, Mapping) and not isinstance(offload, Mapping):
        if offload:
            attach_align_device_hook(module, execution_device, offload=True, module_name=module_name, **away)
        else:
            hook = AlignDevicesHook(execution_device, io_same_device=True, place_submodules=True, **shared)
            add_hook_to_module(module, hook)
        return
    names: Any = execution_device if isinstance(execution_device, Mapping) else offload

    def by_name(value: Any) -> Mapping[str, Any]:
        return value if isinstance(value, Mapping) else dict.fromkeys(names, value)

    devices, offloads = by_name(execution_device), by_name(offload)
    blocks = {name: (devices[name], offloads[name]) for name in devices if name in offloads}
    preload = preload_module_classes

    def visit(path: str, block: nn.Module) -> None:
        if path in blocks:
            device, is_away = blocks[path]
            if is_away:
                attach_align_device_hook(
                    block, device, offload=True, module_name=path, preload_module_classes=preload, **away
                )
            if not (is_away and hasattr(block, "_hf_hook")):
                place = {"io_same_device": not path, "place_submodules": not is_away, **shared}
                add_hook_to_module(block, AlignDevicesHook(device, **place))
            attach_execution_device_hook(block, device, preload_module_classes=preload if is_away else None, **shared)
        elif not path:
            add_hook_to_module(block, AlignDevicesHook(io_same_device=True, **shared))
        for name, child in block.named_children():
            visit(f"{path}.{name}" if path else name, child)

    visit(module_name, module)
