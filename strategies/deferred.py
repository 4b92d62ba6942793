"""A model that is built without memory for its parameters, and their values once there is a place for them."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# In-place operations that read nothing of what they write to: what was there before is of no use.
_OVERWRITES = ("aten::uniform_", "aten::normal_", "aten::zero_", "aten::fill_", "aten::copy_", "aten::bernoulli_")


@dataclass(frozen=True, eq=False)
class _Call:
    """One operation of the construction.

    Attributes:
        function: the operator.
        arguments: positional and by name; tensors of the model are on the meta device.
        reads, writes: the storages it takes from, and changes or makes.
        output: what it returned.
        random: the state of the random number generator before it, if it drew.
        default: the default floating-point format then, on which results may depend.
    """

    function: Any
    arguments: tuple[Any, Any]
    reads: frozenset[int]
    writes: frozenset[int]
    output: Any
    random: Tensor | None
    default: torch.dtype


class Tape(TorchDispatchMode):
    """Records how tensors on the meta device would have got their values, to compute them later, a few at a time.

    Random numbers are drawn (and dropped) while it records, so that what follows, the order of data for one, is as
    if the model had been built for real; the generator's state before each draw is kept (5 kB), so that values can be
    computed later in any order. Only what a value depends on is computed again.

    With ``torch.device("meta")`` alone the values are lost, and every module needs a ``reset_parameters`` to find them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[_Call] = []
        self._touched: dict[int, list[int]] = {}  # storage: the calls that change it
        self._storages: dict[int, Any] = {}  # kept, so that no other takes the same address
        self._scratch = mmap.mmap(-1, mmap.PAGESIZE)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and note it if it makes or changes a tensor without memory."""
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and _is_meta(args[0]):
            return self.values(args[0]).item()  # the model's own code, or torch's, looks at what it has drawn
        random = _kept(torch.get_rng_state()) if torch.Tag.nondeterministic_seeded in func.tags else None
        output = func(*args, **kwargs)
        made = {self._key(t) for t in tree_leaves(output) if _is_meta(t)}
        if not made:
            return output
        taken = {self._key(t) for t in tree_leaves((args, kwargs)) if _is_meta(t)}
        if made <= taken and not func._schema.is_mutable:
            return output  # a view of what is there
        if random is not None:
            self._draw(func, args, kwargs)
        default = torch.get_default_dtype()
        call = _Call(func, (args, kwargs), frozenset(taken), frozenset(made), output, random, default)
        for key in made:
            self._touched.setdefault(key, []).append(len(self._calls))
        self._calls.append(call)
        return output

    def _key(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        self._storages.setdefault(storage._cdata, storage)
        return storage._cdata

    def _draw(self, func: Any, args: Any, kwargs: Any) -> None:
        """Draw as the operator would have."""

        def real(value: Any) -> Any:
            if not _is_meta(value):
                return value
            if not value.numel():
                return torch.empty(value.shape, dtype=value.dtype, device="cpu")
            size = value.numel() * value.element_size()
            if len(self._scratch) < size:
                self._scratch = mmap.mmap(-1, size)
            return torch.frombuffer(self._scratch, dtype=value.dtype, count=value.numel()).view(value.shape)

        func(*tree_map(real, args), **_on_cpu(tree_map(real, kwargs)))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Build models in this context, with ``meta`` as the default device."""
        with _Pretence(), self:
            yield

    def knows(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` was built while this recorded."""
        return tensor.untyped_storage()._cdata in self._touched

    def values(self, tensor: Tensor) -> Tensor:
        """The values that ``tensor`` would have, in memory of the CPU. The random state is left as it is."""
        key = tensor.untyped_storage()._cdata
        wanted = self._needed(key)
        real: dict[int, Any] = {}
        state, default = torch.get_rng_state(), torch.get_default_dtype()
        try:
            with torch.no_grad():
                for index in sorted(wanted):
                    self._replay(self._calls[index], real)
        finally:
            torch.set_rng_state(state)
            torch.set_default_dtype(default)
        return _seen(real[key], tensor)

    def _needed(self, key: int) -> set[int]:
        """The calls that the last value of a storage depends on."""
        wanted: set[int] = set()
        open_ends = [(key, len(self._calls))]
        while open_ends:
            storage, before = open_ends.pop()
            for index in reversed([i for i in self._touched.get(storage, ()) if i < before]):
                if index in wanted:
                    continue
                wanted.add(index)
                call = self._calls[index]
                open_ends += [(other, index) for other in call.reads - {storage}]
                if _starts_afresh(call):
                    break
        return wanted

    @staticmethod
    def _replay(call: _Call, real: dict[int, Any]) -> None:
        def value(item: Any) -> Any:
            return _seen(real[item.untyped_storage()._cdata], item) if _is_meta(item) else item

        args, kwargs = call.arguments
        torch.set_default_dtype(call.default)
        if call.random is not None:
            torch.set_rng_state(call.random)
        if _starts_afresh(call):
            whole = args[0].untyped_storage()
            real.setdefault(whole._cdata, torch.empty(whole.nbytes(), dtype=torch.uint8).untyped_storage())
        output = call.function(*tree_map(value, args), **_on_cpu(tree_map(value, kwargs)))
        for promised, made in zip(tree_leaves(call.output), tree_leaves(output), strict=True):
            if _is_meta(promised):
                real.setdefault(promised.untyped_storage()._cdata, made.untyped_storage())


def _starts_afresh(call: _Call) -> bool:
    """Whether a call gives every element of a storage a value that does not depend on the one before."""
    if not call.function._schema.name.startswith(_OVERWRITES):
        return False
    target, *others = call.arguments[0]
    key = target.untyped_storage()._cdata
    if any(_is_meta(other) and other.untyped_storage()._cdata == key for other in others):
        return False  # copied within itself
    return target.numel() * target.element_size() == target.untyped_storage().nbytes()


class _Pretence(TorchFunctionMode):
    """Lets no one see that there is no memory: torch's own initialisers would do nothing then (2.13)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == _IS_META:
            return False
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is None:
            # On the meta device these would drop their data unseen.
            return func(*args, **{**kwargs, "device": "cpu"}).to("meta")
        return func(*args, **kwargs)


_IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]


def _is_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type == "meta"


def _kept(state: Tensor) -> Tensor:
    """A copy outside of the heap: small things that stay, among large ones that go, keep it from shrinking (glibc)."""
    kept = torch.frombuffer(mmap.mmap(-1, state.nbytes), dtype=state.dtype)
    return kept.copy_(state)


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**kwargs, "device": torch.device("cpu")} if kwargs.get("device") is not None else kwargs


def _seen(storage: Any, like: Tensor) -> Tensor:
    """A tensor over ``storage`` that lies in it as ``like`` does in its own."""
    plain = torch.empty(0, dtype=like.dtype, device="cpu")
    return plain.set_(storage, like.storage_offset(), like.size(), like.stride())
