"""What happens around a dispatched module's forward: its weights come and go, its inputs follow them.

These are torch's own forward hooks; no forward is replaced.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from ..checkpoint import MemoryPiece, Piece
from .module_tensors import copy_attributes, is_buffer, set_tensor


class StandIn(Tensor):
    """What an offloaded tensor's place holds while its values are away: its shape, on device ``meta``.

    torch 2.13 multiplies a CPU tensor with a ``meta`` one and returns memory that nobody has written; this one says so.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse to compute with values that are away; what only looks at the stand-in goes on."""
        kwargs = kwargs or {}
        if any(not (isinstance(tensor, cls) or tensor.is_meta) for tensor in _iter_tensors((args, kwargs))):
            raise ValueError(
                "an offloaded weight was used outside its own module's forward, so its values were not there. Name the "
                "class of the module that uses it in preload_module_classes."
            )
        return super().__torch_function__(func, types, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """Another of the same shape; torch's own way is not for subclasses on device ``meta``."""
        new: Tensor = torch.empty(self.shape, dtype=self.dtype, device="meta").as_subclass(type(self))
        if isinstance(self, nn.Parameter):
            new = nn.Parameter(new, requires_grad=self.requires_grad)
        memo[id(self)] = new
        return new


class Loan:
    """One offloaded tensor of one module. Without its values, the module holds a stand-in.

    Args:
        module: The module that holds it.
        name: Under which name.
        piece: Where its values are.
        shape: What it is otherwise: of the right kind, dtype and shape, on device ``meta``.
        stand_in: What the module holds when it isn't running; one for all that are tied.
    """

    def __init__(self, module: nn.Module, name: str, piece: Piece, shape: Tensor, stand_in: Tensor) -> None:
        self.module, self.name, self.piece, self.shape, self.stand_in = module, name, piece, shape, stand_in
        self._mark = (0, -1)  # which tensor was lent, and its version then

    def read(self, device: torch.device) -> Tensor:
        """Its values on the device, in the model's dtype."""
        dtype = self.shape.dtype
        # A conversion makes an aligned copy by itself, and so does the way to another device.
        exact = device.type == "cpu" and self.piece.dtype == dtype
        return self.piece.get(exact).to(device=device, dtype=dtype)

    def lend(self, values: Tensor, grad: bool) -> None:
        """Give the module the values. Where gradients are computed, one for them is refused."""
        self._mark = (id(values), values._version)
        new = copy_attributes(self.shape, values)
        if grad and new.requires_grad:
            new.register_hook(_refuse_gradient)
        set_tensor(self.module, self.name, new)

    def take_back(self) -> None:
        """Let the values go. A buffer that the forward changed, such as a cache or running statistics, is kept."""
        buffer = self.module._buffers.get(self.name) if is_buffer(self.shape) else None
        if buffer is not None and buffer is not self.stand_in and self._is_changed(buffer):
            self.piece = MemoryPiece(buffer.detach().clone().to("cpu"))
        set_tensor(self.module, self.name, self.stand_in)

    def _is_changed(self, buffer: Tensor) -> bool:
        # Batch normalization doesn't count its writes as versions, but it writes in training only.
        return self.module.training or buffer.is_inference() or (id(buffer), buffer._version) != self._mark


def make_stand_in(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return what describes an offloaded tensor, and what the module holds in its place."""
    shape = tensor.detach().to("meta")
    return copy_attributes(tensor, shape), copy_attributes(tensor, shape.as_subclass(StandIn), plain=True)


def _refuse_gradient(gradient: Tensor) -> None:
    raise ValueError(
        "an offloaded weight got a gradient, which would be thrown away with its values. Run the model under "
        "torch.no_grad(), or call requires_grad_(False) on what isn't trained before it is dispatched."
    )


class Station:
    """One module's hooks: on entering, its offloaded tensors are brought and its inputs moved.

    Two threads may be inside at once, and a module inside itself: what was brought goes when the last one leaves.

    Args:
        device: Where the module runs.
        loans: Its offloaded tensors.
        moves: Whether inputs may lie elsewhere.
        skip: Names of arguments that are left where they are.
    """

    def __init__(self, device: torch.device, loans: list[Loan], moves: bool, skip: Collection[str]) -> None:
        self.device, self.loans, self.moves, self.skip = device, loans, moves, skip
        self._lock = threading.Lock()
        self._inside = 0
        self._handles: list[Any] = []

    def attach(self, module: nn.Module) -> None:
        """Hook a module."""
        self._handles = [module.register_forward_pre_hook(self.enter, prepend=True, with_kwargs=True)]
        if self.loans:
            self._handles.append(module.register_forward_hook(self.leave, always_call=True))

    def detach(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def enter(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Before the forward."""
        if self.loans:
            with self._lock:
                self._inside += 1
                if self._inside == 1:
                    self.bring()
        if self.moves:
            return move(args, self.device, ()), move(kwargs, self.device, self.skip)
        return None

    @contextmanager
    def lending(self, device: torch.device | None = None) -> Iterator[None]:
        """A context in which the module has its offloaded tensors, as during its forward.

        Args:
            device: Where they are. Default: where the module runs.
        """
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self.bring(device)
        try:
            yield
        finally:
            self._leave()

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """After the forward, also one that raised."""
        self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._inside = max(0, self._inside - 1)
            if self._inside == 0:
                with torch.inference_mode(False), torch.no_grad():
                    for loan in self.loans:
                        loan.take_back()

    def bring(self, device: torch.device | None = None) -> None:
        """Give the module its offloaded tensors. One that has several names is brought once."""
        grad = torch.is_grad_enabled()
        # Tensors made in inference mode would stay inference tensors wherever they end up.
        with torch.inference_mode(False), torch.no_grad():
            brought: dict[int, Tensor] = {}
            for loan in self.loans:
                if id(loan.stand_in) not in brought:
                    brought[id(loan.stand_in)] = loan.read(device or self.device)
                loan.lend(brought[id(loan.stand_in)], grad)

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the model has a lock of its own, and nobody inside."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_lock", "_inside")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """See `__getstate__`."""
        self.__dict__.update(state, _lock=threading.Lock(), _inside=0)


class Home:
    """The whole model's hooks: inputs to where it starts, outputs back to where the inputs came from.

    Args:
        device: Where the model starts.
        skip: Names of arguments, and of entries of the output, that are left where they are.
    """

    def __init__(self, device: torch.device, skip: Collection[str]) -> None:
        self.device, self.skip = device, skip
        self._calls = threading.local()
        self._handles: list[Any] = []

    def attach(self, module: nn.Module) -> None:
        """Hook the model."""
        self._handles = [
            module.register_forward_pre_hook(self.enter, prepend=True, with_kwargs=True),
            module.register_forward_hook(self.leave, always_call=True),
        ]

    def detach(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def enter(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Before the forward."""
        first = next(_iter_tensors((args, kwargs)), None)
        self._get_device_stack().append(None if first is None else first.device)
        return move(args, self.device, ()), move(kwargs, self.device, self.skip)

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """After the forward, also one that raised."""
        stack = self._get_device_stack()
        device = stack.pop() if stack else None
        return None if device is None or output is None else move(output, device, self.skip)

    def _get_device_stack(self) -> list[torch.device | None]:
        if not hasattr(self._calls, "devices"):
            self._calls.devices = []
        return self._calls.devices  # type: ignore[no-any-return]

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the model is inside no call."""
        return {name: value for name, value in self.__dict__.items() if name != "_calls"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """See `__getstate__`."""
        self.__dict__.update(state, _calls=threading.local())


def move(data: Any, device: torch.device, skip: Collection[str]) -> Any:
    """``data`` with its tensors on the device, except the entries of a mapping that are named in ``skip``."""
    if isinstance(data, Tensor):
        return data if data.device == device else data.to(device)
    if all(tensor.device == device for tensor in _iter_tensors(data)):
        return data  # most often; and then it is the very same object
    if skip and isinstance(data, Mapping):
        moved = apply_to_collection({k: v for k, v in data.items() if k not in skip}, Tensor, _move_tensor, device)
        entries = {name: moved.get(name, value) for name, value in data.items()}
        return entries if type(data) is dict else type(data)(entries)  # type: ignore[call-arg]
    return apply_to_collection(data, Tensor, _move_tensor, device)


def _move_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor if tensor.device == device else tensor.to(device)


def _iter_tensors(data: Any) -> Iterator[Tensor]:
    """The tensors in nested lists, tuples, mappings and dataclasses."""
    if isinstance(data, Tensor):
        yield data
    elif isinstance(data, Mapping):
        for item in data.values():
            yield from _iter_tensors(item)
    elif isinstance(data, list | tuple):
        for item in data:
            yield from _iter_tensors(item)
    elif hasattr(data, "__dataclass_fields__") and not isinstance(data, type):
        for field in data.__dataclass_fields__:
            yield from _iter_tensors(getattr(data, field, None))
