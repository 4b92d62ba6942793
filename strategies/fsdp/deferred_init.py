"""Deferred initialization: a model is created on the meta device, and its values are computed later."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import module as registration
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# In-place operations that do not read the tensor that they write, so its earlier values are not needed.
_OVERWRITES = ("aten::uniform_", "aten::normal_", "aten::zero_", "aten::fill_", "aten::copy_", "aten::bernoulli_")
_COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)
_SMALL = 1 << 20  # bytes up to which an external tensor is copied instead of assuming that it does not change


@dataclass(frozen=True)
class _Place:
    """Location of a meta tensor in its storage, as recorded for one call."""

    key: int
    storage_bytes: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @property
    def is_all(self) -> bool:
        """True if the tensor covers its whole storage."""
        return self.size.numel() * self.dtype.itemsize == self.storage_bytes

    def view(self, storage: Any) -> Tensor:
        return torch.empty(0, dtype=self.dtype, device=storage.device).set_(
            storage, self.offset, self.size, self.stride
        )


@dataclass(frozen=True)
class _OutsideTensor:
    """Tensor from outside the model, whose values must not change until they are used."""

    tensor: Tensor
    version: int

    def value(self) -> Tensor:
        if _get_version(self.tensor) != self.version:
            raise ValueError(
                f"a tensor of shape {tuple(self.tensor.shape)} from which the model is initialized was changed before "
                "the model was prepared, so the initial values are lost. Change the tensor after the model is "
                "prepared, or initialize the model from a clone() of the tensor."
            )
        return self.tensor


@dataclass(frozen=True, eq=False)
class _Call:
    """One operation in the construction of a model."""

    function: Any
    arguments: tuple[Any, Any]
    reads: frozenset[int]
    writes: frozenset[int]
    output: list[Any]
    random: tuple[torch.Generator, Tensor] | None
    default: torch.dtype

    def starts_afresh(self) -> bool:
        """Return whether the call overwrites every element of a storage, independently of the previous values."""
        if not self.function._schema.name.startswith(_OVERWRITES):
            return False
        target, *others = self.arguments[0]
        if any(isinstance(other, _Place) and other.key == target.key for other in others):
            return False  # copied within itself
        return bool(target.is_all)


class Tape(TorchDispatchMode):
    """Recorder of the operations that initialize tensors on the meta device, in order to compute their values later.

    Random numbers are drawn and discarded during the recording, so that later draws, such as the order of samples, are
    the same as with a model that is created with memory.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._calls: list[_Call] = []
        self._touched: dict[int, list[int]] = {}  # by storage, the calls that change it
        self._storages: dict[int, Any] = {}  # kept alive, so that their addresses are not reused
        self._scratch = mmap.mmap(-1, mmap.PAGESIZE)
        self._built: dict[int, weakref.ref[Tensor]] = {}  # parameters and buffers by their ids
        self._versions: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        input_keys = {self._register_storage(t) for t in tensors if _is_meta(t)}
        if input_keys and _needs_values(func, args, kwargs):
            # The model's or torch's code reads the values of what it has created.
            return func(*tree_map(self._materialize, args), **tree_map(self._materialize, kwargs))
        if input_keys and len(input_keys) < len(tensors) and func not in _COPIES:
            args, kwargs = tree_map(self._convert_to_meta, args), tree_map(self._convert_to_meta, kwargs)
            input_keys = {self._register_storage(t) for t in tree_leaves((args, kwargs)) if _is_meta(t)}
        random = self._find_generator(args, kwargs) if torch.Tag.nondeterministic_seeded in func.tags else None
        # Recorded before the call, which may change its arguments.
        noted = tree_map(self._note, (args, kwargs))
        try:
            output = func(*args, **kwargs)
        except NotImplementedError:  # torch supports it for real memory only; its callers interpret the error as "no"
            output = self._infer_output(func, args, kwargs)
        output_keys = {self._register_storage(t) for t in tree_leaves(output) if _is_meta(t)}
        if not output_keys or (output_keys <= input_keys and not func._schema.is_mutable):
            return output  # the result does not belong to the model, or is a view of an existing tensor
        if random is not None:
            self._draw(func, args, kwargs)
        places = [self._note(leaf) for leaf in tree_leaves(output)]
        default = torch.get_default_dtype()
        call = _Call(func, noted, frozenset(input_keys), frozenset(output_keys), places, random, default)
        for key in output_keys:
            self._touched.setdefault(key, []).append(len(self._calls))
        self._calls.append(call)
        return output

    def _register_storage(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        self._storages.setdefault(storage._cdata, storage)
        return int(storage._cdata)

    def _note(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if _is_meta(value):
            self._register_storage(value)
            return _place(value)
        recorded = value.detach().clone() if value.nbytes <= _SMALL else value
        return _OutsideTensor(recorded, _get_version(recorded))

    def _materialize(self, value: Any) -> Any:
        """Return the values of a meta tensor, the tape's device for the meta device, and anything else unchanged."""
        return self.values(value) if _is_meta(value) else self._replace_meta_device(value)

    def _replace_meta_device(self, value: Any) -> Any:
        return self._device if isinstance(value, torch.device) and value.type == "meta" else value

    def _infer_output(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operator that does not support the meta device, as tensors without memory."""
        if func._schema.is_mutable:
            raise RuntimeError(
                f"{func} can't change a tensor without memory. Create this module outside init_module() and "
                "configure_model."
            )
        output = func(*tree_map(self._materialize, args), **tree_map(self._materialize, kwargs))

        def shape(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")

        return tree_map(shape, output)

    def _convert_to_meta(self, value: Any) -> Any:
        """Return a tensor from outside the model as a tensor without memory, unless it is 0-d."""
        if not isinstance(value, Tensor) or _is_meta(value) or not value.ndim:
            return value
        to_meta = torch.ops.aten._to_copy.default
        return self.__torch_dispatch__(to_meta, (), (value,), {"device": torch.device("meta")})

    def _find_generator(self, args: Any, kwargs: Any) -> tuple[torch.Generator, Tensor]:
        generators = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Generator))
        generator = next(generators, None) or get_generator(self._device)
        return generator, _copy_off_heap(generator.get_state())

    def _draw(self, func: Any, args: Any, kwargs: Any) -> None:
        """Draw and discard the random numbers of an operator."""

        def real(value: Any) -> Any:
            if not _is_meta(value):
                return self._replace_meta_device(value)
            if self._device.type != "cpu" or not value.numel():
                return torch.empty(value.shape, dtype=value.dtype, device=self._device)
            size = value.numel() * value.element_size()
            if len(self._scratch) < size:
                self._scratch = mmap.mmap(-1, size)
            return torch.frombuffer(self._scratch, dtype=value.dtype, count=value.numel()).view(value.shape)

        func(*tree_map(real, args), **tree_map(real, kwargs))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Return a context that records the construction of models. The default device must be ``meta``."""

        def register_built(part: Any, name: str, value: Tensor | None) -> None:
            if _is_meta(value):
                self._built[id(value)] = weakref.ref(value)  # type: ignore[arg-type]

        hooks = (
            registration.register_module_parameter_registration_hook(register_built),
            registration.register_module_buffer_registration_hook(register_built),
        )
        try:
            with _HiddenMeta(self), self:
                yield
        finally:
            for hook in hooks:
                hook.remove()
            alive = [tensor for built in self._built.values() if (tensor := built()) is not None]
            self._versions = {id(tensor): _get_version(tensor) for tensor in alive}

    def knows(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` was created during the recording."""
        return tensor.untyped_storage()._cdata in self._touched

    def is_done(self) -> bool:
        """Return whether none of the recorded parameters and buffers exists anymore."""
        return all(tensor() is None for tensor in self._built.values())

    def is_unchanged(self, tensor: Tensor) -> bool:
        """Return whether a parameter or buffer has not been written to since the recording ended."""
        built = self._built.get(id(tensor))
        return built is None or built() is not tensor or _get_version(tensor) == self._versions.get(id(tensor))

    def values(self, tensor: Tensor) -> Tensor:
        """Compute the values of ``tensor`` on the tape's device. The RNG state is not changed."""
        place = _place(tensor)
        calls = [self._calls[index] for index in sorted(self._find_needed_calls(place.key))]
        drawn = {call.random[0] for call in calls if call.random is not None}
        states, default = [(generator, generator.get_state()) for generator in drawn], torch.get_default_dtype()
        real: dict[int, Any] = {}
        try:
            with torch.no_grad():
                for call in calls:
                    self._replay(call, real)
        finally:
            for generator, state in states:
                generator.set_state(state)
            torch.set_default_dtype(default)
        return place.view(real[place.key])

    def _replay(self, call: _Call, real: dict[int, Any]) -> None:
        """Run a call with real memory. ``real`` maps storages of the meta device to real ones."""

        def value(item: Any) -> Any:
            if isinstance(item, _Place):
                return item.view(real[item.key])
            return item.value() if isinstance(item, _OutsideTensor) else self._replace_meta_device(item)

        args, kwargs = call.arguments
        torch.set_default_dtype(call.default)
        if call.random is not None:
            generator, state = call.random
            generator.set_state(state)
        if call.starts_afresh() and args[0].key not in real:
            size = args[0].storage_bytes
            real[args[0].key] = torch.empty(size, dtype=torch.uint8, device=self._device).untyped_storage()
        output = call.function(*tree_map(value, args), **tree_map(value, kwargs))
        for place, computed in zip(call.output, tree_leaves(output), strict=True):
            if isinstance(place, _Place):
                real.setdefault(place.key, computed.untyped_storage())

    def _find_needed_calls(self, key: int) -> set[int]:
        """Return the indices of the calls that the final values of a storage depend on."""
        needed: set[int] = set()
        pending = [(key, len(self._calls))]
        while pending:
            storage, limit = pending.pop()
            for index in reversed([i for i in self._touched.get(storage, ()) if i < limit]):
                call = self._calls[index]
                if index not in needed:
                    needed.add(index)
                    pending += [(other, index) for other in call.reads - {storage}]
                if call.starts_afresh():
                    break
        return needed


def get_generator(device: torch.device) -> torch.Generator:
    """Return the default generator of a CUDA device; for any other device, that of the CPU."""
    if device.type != "cuda":
        return torch.default_generator
    torch.cuda.init()
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


class _HiddenMeta(TorchFunctionMode):
    """Mode in which a model's constructor can use meta tensors as if they had values.

    ``is_meta`` is False, because torch 2.13 would otherwise not initialize them.
    """

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == _IS_META:
            return False
        if func in (torch.tensor, torch.as_tensor) and torch.device(kwargs.get("device") or "meta").type == "meta":
            # On the meta device these would silently drop their data.
            return func(*args, **{**kwargs, "device": "cpu"}).to("meta")
        if func in _LOOKS and _is_meta(args[0]):
            args = (self._tape.values(args[0]).cpu(), *args[1:])
        elif func == _SET_DATA and _is_meta(args[0]) is not _is_meta(args[1]):
            target, value = args
            args = (target, value.to("meta") if _is_meta(target) else self._tape.values(value))
        return func(*args, **kwargs)


_IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_LOOKS = (Tensor.numpy, Tensor.tolist, Tensor.__array__)


def _needs_values(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an operator needs the values of tensors without memory, not only their shapes and dtypes."""
    if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
        return True
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != "meta":
        return func is torch.ops.aten._to_copy.default
    return func._schema.is_mutable and isinstance(args[0], Tensor) and not _is_meta(args[0])


def _get_version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _is_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "meta"


def _place(tensor: Tensor) -> _Place:
    storage = tensor.untyped_storage()
    offset = int(tensor.storage_offset())
    return _Place(storage._cdata, storage.nbytes(), tensor.dtype, tensor.size(), tensor.stride(), offset)


def _copy_off_heap(state: Tensor) -> Tensor:
    """Copy an RNG state to memory outside of the heap and return the copy.

    On the heap, small states between large objects that have been freed would keep glibc from shrinking the heap.
    """
    off_heap = torch.frombuffer(mmap.mmap(-1, state.nbytes), dtype=state.dtype)
    return off_heap.copy_(state)
