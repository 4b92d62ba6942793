"""Hooks of dispatched modules, which load weights and move inputs for each forward pass."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...strategies import apply_nested, iter_tensors
from ..checkpoint import MemoryPiece, Piece
from .module_tensors import copy_attributes, is_buffer, set_tensor


class Placeholder(Tensor):
    """Placeholder for an offloaded tensor, with the tensor's shape on the meta device and without values.

    In torch 2.13, the matrix product of a CPU tensor and a ``meta`` tensor is uninitialized memory. This class raises
    an error instead.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(not (isinstance(tensor, cls) or tensor.is_meta) for tensor in iter_tensors((args, kwargs))):
            raise ValueError(
                "an offloaded weight was used outside the forward pass of its own module, but has values only during "
                "that pass. Add the class of the module that uses the weight to preload_module_classes."
            )
        return super().__torch_function__(func, types, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        new: Tensor = torch.empty(self.shape, dtype=self.dtype, device="meta").as_subclass(type(self))
        if isinstance(self, nn.Parameter):
            new = nn.Parameter(new, requires_grad=self.requires_grad)
        memo[id(self)] = new
        return new


@dataclass(eq=False)
class OffloadedTensor:
    """Offloaded tensor of a module, replaced by a placeholder while its values are not loaded.

    Args:
        module: The module that has the tensor.
        name: The tensor's name in the module.
        piece: Reference to the tensor's values in main memory or in a file.
        shape: A description of the tensor: its class, dtype and shape, on the meta device.
        placeholder: The placeholder; tied tensors share one.
    """

    module: nn.Module
    name: str
    piece: Piece
    shape: Tensor
    placeholder: Tensor
    _mark: tuple[int, int] = (0, -1)  # the tensor that was loaded, and its version at that time

    def read(self, device: torch.device) -> Tensor:
        """Return the tensor's values on a device, in the model's dtype.

        Args:
            device: The device to load the values to.
        """
        dtype = self.shape.dtype
        # Converting or moving the tensor makes an aligned copy in any case.
        exact = device.type == "cpu" and self.piece.dtype == dtype
        return self.piece.get(exact).to(device=device, dtype=dtype)

    def load(self, values: Tensor, grad: bool) -> None:
        """Put loaded values into the module. If ``grad`` is True, computing their gradient raises an error.

        Args:
            values: The result of `read`.
            grad: Whether autograd records the forward pass.
        """
        self._mark = (id(values), values._version)
        new = copy_attributes(self.shape, values)
        if grad and new.requires_grad:
            new.register_hook(_refuse_gradient)
        set_tensor(self.module, self.name, new)

    def release(self) -> None:
        """Put the placeholder back into the module. Values of a changed buffer, as of running statistics, are kept."""
        buffer = self.module._buffers.get(self.name) if is_buffer(self.shape) else None
        if buffer is not None and buffer is not self.placeholder and self._is_changed(buffer):
            self.piece = MemoryPiece(buffer.detach().clone().to("cpu"))
        set_tensor(self.module, self.name, self.placeholder)

    def _is_changed(self, buffer: Tensor) -> bool:
        # Batch normalization does not count its writes as versions, but it only writes in training.
        return self.module.training or buffer.is_inference() or (id(buffer), buffer._version) != self._mark


def make_placeholder(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the description of a tensor to offload, and its placeholder; see `OffloadedTensor`.

    Args:
        tensor: The parameter or buffer to offload.
    """
    shape = tensor.detach().to("meta")
    return copy_attributes(tensor, shape), copy_attributes(tensor, shape.as_subclass(Placeholder), plain=True)


def _refuse_gradient(gradient: Tensor) -> None:
    raise ValueError(
        "an offloaded weight got a gradient, which would be lost when the weight is offloaded again. Run the model "
        "under torch.no_grad(). Alternatively, before dispatching the model, call requires_grad_(False) on the weights "
        "that are not trained."
    )


def load_all(offloaded: Iterable[OffloadedTensor], device: torch.device) -> None:
    """Load the values of offloaded tensors into their modules. A tensor with several names is loaded once.

    Args:
        offloaded: The tensors.
        device: The device to load them to.
    """
    grad = torch.is_grad_enabled()
    # A tensor created in inference mode would remain an inference tensor on any device.
    with torch.inference_mode(False), torch.no_grad():
        loaded: dict[int, Tensor] = {}
        for tensor in offloaded:
            if id(tensor.placeholder) not in loaded:
                loaded[id(tensor.placeholder)] = tensor.read(device)
            tensor.load(loaded[id(tensor.placeholder)], grad)


def release_all(offloaded: Iterable[OffloadedTensor]) -> None:
    """Put the placeholders of offloaded tensors back into their modules; see `OffloadedTensor.release`.

    Args:
        offloaded: The tensors.
    """
    with torch.inference_mode(False), torch.no_grad():
        for tensor in offloaded:
            tensor.release()


def restore(offloaded: Iterable[tuple[OffloadedTensor, torch.device]]) -> None:
    """Put offloaded tensors back into their modules for good, on the given devices. Tied tensors stay tied.

    Args:
        offloaded: The tensors, each with its device.
    """
    restored: dict[int, Tensor] = {}
    for tensor, device in offloaded:
        key = id(tensor.placeholder)
        if key not in restored:
            values = torch.empty(tensor.shape.shape, dtype=tensor.shape.dtype, device=device)
            with torch.no_grad():
                tensor.piece.fill(values)
            restored[key] = copy_attributes(tensor.shape, values)
        set_tensor(tensor.module, tensor.name, restored[key])


class ForwardHooks:
    """Hooks of a dispatched module, which load its offloaded tensors and move its inputs and outputs.

    Two threads may run the module at the same time, and a module may call itself. The loaded values are therefore
    released only when the last call ends.

    Args:
        device: The device that runs the module.
        offloaded: The offloaded tensors that the module needs.
        moves_inputs: Whether inputs are moved to the device. Default: True.
        returns: Whether the output is moved to the device of the first tensor in the inputs, as for the whole model.
        skip: Keys whose values are not moved.
    """

    def __init__(
        self,
        device: torch.device,
        offloaded: list[OffloadedTensor],
        *,
        moves_inputs: bool = True,
        returns: bool = False,
        skip: Collection[str] = (),
    ) -> None:
        self.device, self.offloaded, self.skip = device, offloaded, skip
        self.moves_inputs, self.returns = moves_inputs, returns
        self._handles: list[Any] = []
        self._set_up_calls()

    def _set_up_calls(self) -> None:
        self._lock, self._inside = threading.Lock(), 0
        self._calls = threading.local()

    def attach(self, module: nn.Module) -> None:
        """Add the hooks to a module."""
        self._handles = [module.register_forward_pre_hook(self.enter, prepend=True, with_kwargs=True)]
        if self.offloaded or self.returns:
            self._handles.append(module.register_forward_hook(self.leave, always_call=True))

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def enter(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Load the offloaded tensors, and move the inputs before the forward pass."""
        if self.returns:
            first = next(iter_tensors((args, kwargs)), None)
            self._list_devices().append(None if first is None else first.device)
        if self.offloaded:
            self._load(self.device)
        return (move(args, self.device, ()), move(kwargs, self.device, self.skip)) if self.moves_inputs else None

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Release the offloaded tensors and move the output, even if the forward pass raised an error."""
        if self.offloaded:
            self._release()
        devices = self._list_devices()
        device = devices.pop() if devices else None
        return None if device is None or output is None else move(output, device, self.skip)

    @contextmanager
    def loaded(self, device: torch.device | None = None) -> Iterator[None]:
        """Return a context in which the module holds its offloaded tensors, as during its forward pass.

        ``device`` is the device to load them onto; it is ignored if they are already loaded. Default: the device that
        runs the module.
        """
        self._load(device or self.device)
        try:
            yield
        finally:
            self._release()

    def _load(self, device: torch.device) -> None:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                load_all(self.offloaded, device)

    def _release(self) -> None:
        with self._lock:
            self._inside = max(0, self._inside - 1)
            if self._inside == 0:
                release_all(self.offloaded)

    def _list_devices(self) -> list[torch.device | None]:
        """Return the devices of the first inputs of this thread's calls in progress."""
        return vars(self._calls).setdefault("devices", [])  # type: ignore[no-any-return]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_lock", "_inside", "_calls")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._set_up_calls()


def move(data: Any, device: torch.device, skip: Collection[str]) -> Any:
    """Return ``data`` with its tensors on a device, except the values of a mapping whose keys are in ``skip``.

    Args:
        data: A tensor, or a nested structure of mappings, lists, tuples and dataclasses that contains tensors.
        device: The target device.
        skip: Keys whose values are not moved, if ``data`` is a mapping.
    """
    if all(tensor.device == device for tensor in iter_tensors(data)):
        return data  # the usual case; the object itself is returned
    if skip and isinstance(data, Mapping):
        entries = {name: value if name in skip else move(value, device, ()) for name, value in data.items()}
        return entries if type(data) is dict else type(data)(entries)  # type: ignore[call-arg]
    return apply_nested(data, Tensor, lambda tensor: tensor.to(device))
