"""Conversion of the names and calls in other programs' pickles to plain data."""

from __future__ import annotations

import pathlib
import re
from argparse import Namespace
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import numpy as np
import torch

from ..pickle_reader import Name, UnbuiltCall

_MAX_DEPTH = 100
_NUMPY_DTYPE = re.compile(r"(\?|b1|[iufc](1|2|4|8|16)|U\d{1,6}|S\d{1,6})")


class Unknown(Exception):
    """Error for a name without a conversion, or a value that is not data. Its message is the name or a description."""


class Reader:
    """Converter that turns results of `pickle_reader.read` into plain data, such as numbers, arrays and containers.

    Args:
        persistent: Function that returns the object for a reference to data outside the pickle, such as a storage.
        calls: Additional functions that convert a call to data, by name of the called function. Each receives this
            `Reader` and the arguments of the call.
        budget: Maximum number of bytes that conversions may copy. It bounds the memory for a file that refers to one
            long text a million times. Default: 256 MiB.

    Attributes:
        dropped: The types or descriptions of the items that `mapping` omitted because they are not data, by
            position, such as ``"state_dict.bias"``.
    """

    def __init__(
        self, persistent: Callable[[Any], Any], calls: Mapping[str, Callable[..., Any]], budget: int = 2**28
    ) -> None:
        self.persistent = persistent
        self.calls = {**_CALLS, **calls}
        self.budget = budget
        self.dropped: dict[str, str] = {}
        self._built: dict[int, tuple[Any, Any]] = {}
        self._open: set[int] = set()

    def mapping(self, value: Any, place: str) -> dict[Any, Any]:
        """Return the items of a dict that are plain data, and record the types of the others in ``dropped``.

        ``place`` is the position of the dict in the file, such as ``"state_dict"``, or "" at the top level. Items whose
        key is a class or function are skipped and not recorded.

        Raises:
            ValueError: If ``value`` is not a dict, or if an item is invalid.
        """
        value = self.container(value)
        if not isinstance(value, dict):
            raise ValueError(f"{place} is not a dict")
        entries = {}
        for name, item in value.items():
            if isinstance(name, Name):
                continue
            try:
                entries[name] = self.data(item)
            except Unknown as error:
                self.dropped[f"{place}.{name}" if place else str(name)] = str(error)
        return entries

    def container(self, value: Any) -> Any:
        """Convert a recorded dict, such as an ``OrderedDict``, to a plain dict with unconverted items.

        Any other value is returned unchanged.
        """
        if isinstance(value, UnbuiltCall):
            name = value.name
            if name == "collections.OrderedDict" and value.args:  # in the form that Python 2 wrote
                return _build_ordered_dict(self, value.args[0]) | value.pairs
            if name.rpartition(".")[2] in ("OrderedDict", "AttributeDict", "defaultdict"):
                return value.pairs
            if name == "argparse.Namespace" and isinstance(value.state, dict):
                return value.state
            if name == "copyreg._reconstructor" and len(value.args) == 3 and isinstance(value.args[2], dict):
                return value.args[2] | value.pairs
            if name == "omegaconf.dictconfig.DictConfig" and isinstance(value.state, dict):
                return value.state.get("_content")
        return value

    def data(self, value: Any, depth: int = 0) -> Any:
        """Return a value converted to data, including all nested values.

        Raises:
            Unknown: If the value, or a nested value, is not data.
            ValueError: If the value is invalid, or if its conversion would copy more bytes than the budget.
        """
        if isinstance(value, Name):
            return self._resolve_name(value)
        if not isinstance(value, UnbuiltCall | dict | list | tuple):
            return value
        if id(value) in self._built:
            return self._built[id(value)][1]
        if id(value) in self._open or depth > _MAX_DEPTH:
            raise ValueError("one of its values contains itself or is nested too deeply. Save only model.state_dict()")
        self._open.add(id(value))
        try:
            built = self._build(value, depth + 1)
        finally:
            self._open.discard(id(value))
        self._built[id(value)] = (value, built)  # kept alive, so that its id is not reused
        return built

    def charge(self, size: int) -> None:
        """Reduce the budget by the number of bytes that a conversion is about to copy.

        Raises:
            ValueError: If the budget is exceeded.
        """
        self.budget -= size
        if self.budget < 0:
            raise ValueError("it requests far more memory than its data needs. Save the weights as safetensors")

    def _build(self, value: Any, depth: int) -> Any:
        if isinstance(value, dict):
            return {key: self.data(item, depth) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self.data(item, depth) for item in value)
        if value.name == "persistent":
            return self.persistent(*value.args)
        if value.name == "copyreg._reconstructor" and value.args and isinstance(value.args[0], Name):
            value = UnbuiltCall(value.args[0].path, value.args[1:], value.state, value.pairs, value.items)
        if value.name.endswith(".AttributeDict"):
            inside = self.container(value)
            return self.data(inside if value.pairs else next((a for a in value.args if isinstance(a, dict)), {}), depth)
        if value.name.startswith("omegaconf.") and isinstance(value.state, dict):
            return self.data(value.state["_content" if "_content" in value.state else "_val"], depth)
        if value.name not in self.calls:
            raise Unknown(value.name)
        args = [arg if isinstance(arg, Name) else self.data(arg, depth) for arg in value.args]
        state = value.state if value.name in _WITH_STATE else None
        try:
            if state is not None:
                return self.calls[value.name](self, *args, state=self.data(state, depth))
            built = self.calls[value.name](self, *args)
        except (TypeError, AttributeError, IndexError, OverflowError, RuntimeError, LookupError) as error:
            raise ValueError(
                f"it calls {value.name} with invalid arguments ({error}). Save the weights as safetensors"
            ) from error
        if value.pairs:
            built.update(self.data(value.pairs, depth))
        return built

    def _resolve_name(self, name: Name) -> Any:
        dtype = vars(torch).get(name.path[6:]) if name.path.startswith("torch.") else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise Unknown(name.path)


def check_extent(value: Any, limit: int = 1_000_000) -> None:
    """Raise an error if data refers to the same objects so often that a traversal would take too long.

    Raises:
        ValueError: If a traversal has more than ``limit`` items.
        RecursionError: If the data contains itself or is nested too deeply.
    """
    extents: dict[int, int] = {}

    def extent(part: Any) -> int:
        if not isinstance(part, dict | list | tuple | Namespace):
            return 1
        if id(part) not in extents:
            inside = vars(part) if isinstance(part, Namespace) else part
            extents[id(part)] = 1 + sum(map(extent, inside.values() if isinstance(inside, dict) else inside))
        return extents[id(part)]

    if extent(value) > limit:
        raise ValueError(f"it has more than {limit:,} items, counting each object every time it occurs")


def _build_ordered_dict(reader: Reader, pairs: Any = ()) -> dict[Any, Any]:
    if not isinstance(pairs, dict | list | tuple):
        raise Unknown("a dict with unsupported contents")
    reader.charge(100 * len(pairs))
    try:
        return {_check_text(key): value for key, value in (pairs.items() if isinstance(pairs, dict) else pairs)}
    except (TypeError, ValueError) as error:
        raise Unknown("a dict with unsupported contents") from error


def _check_text(key: Any) -> Any:
    if not isinstance(key, str | int | bytes | bool | float | None):
        raise Unknown(type(key).__name__)
    return key


def _make_path_builder(kind: type[pathlib.PurePath]) -> Callable[..., Any]:
    def make(reader: Reader, *parts: str) -> Any:
        reader.charge(sum(len(part) for part in parts))
        return kind(*parts)

    return make


def _encode_text(reader: Reader, text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise Unknown("_codecs.encode")
    reader.charge(len(text))
    return text.encode("latin-1")


def _build_bytes(reader: Reader, data: bytes | str = b"", encoding: str = "latin-1") -> bytes:
    if isinstance(data, str):
        return _encode_text(reader, data, encoding.replace("latin-1", "latin1"))
    if not isinstance(data, bytes | bytearray):
        raise Unknown("builtins.bytes")  # bytes(10**11) would allocate that many zeros
    reader.charge(len(data))
    return bytes(data)


def _make_set_builder(kind: type) -> Callable[..., Any]:
    def make(reader: Reader, items: Any = ()) -> Any:
        reader.charge(100 * len(items))
        return kind(_check_text(item) for item in items)

    return make


def _build_dtype(reader: Reader, code: Any, *_: Any, state: Any = None) -> np.dtype[Any]:
    if not isinstance(code, str) or not _NUMPY_DTYPE.fullmatch(code):
        raise Unknown(f"numpy.dtype({code!r:.40})")
    dtype = np.dtype(code)
    return dtype.newbyteorder(">") if isinstance(state, tuple) and state[1:2] == (">",) else dtype


def _build_scalar(reader: Reader, dtype: np.dtype[Any], data: bytes) -> Any:
    if not isinstance(dtype, np.dtype) or not isinstance(data, bytes) or len(data) != dtype.itemsize:
        raise Unknown("an unsupported numpy scalar")
    return np.frombuffer(data, dtype)[0]


def _build_array(reader: Reader, *_: Any, state: Any = None) -> Any:
    if not isinstance(state, tuple) or len(state) != 5:
        raise Unknown("an unsupported numpy array")
    _, shape, dtype, in_columns, data = state
    if not isinstance(dtype, np.dtype) or not isinstance(data, bytes):
        raise Unknown("a numpy array of objects")
    reader.charge(len(data))
    return np.frombuffer(data, dtype).reshape(shape, order="F" if in_columns else "C").copy()


def _build_namespace(reader: Reader, state: Any = None) -> Namespace:
    namespace = Namespace()
    vars(namespace).update({key: value for key, value in (state or {}).items() if isinstance(key, str)})
    return namespace


def _name_in_modules(
    modules: tuple[str, ...], calls: Mapping[str, Callable[..., Any]]
) -> dict[str, Callable[..., Any]]:
    return {f"{module}.{name}": call for module in modules for name, call in calls.items()}


_CALLS: dict[str, Callable[..., Any]] = {
    "collections.OrderedDict": _build_ordered_dict,
    "collections.Counter": _build_ordered_dict,
    "collections.defaultdict": lambda reader, factory=None: {},
    "argparse.Namespace": _build_namespace,
    "_codecs.encode": _encode_text,
    "builtins.bytes": _build_bytes,
    "builtins.bytearray": _build_bytes,
    "builtins.set": _make_set_builder(set),
    "builtins.frozenset": _make_set_builder(frozenset),
    "builtins.complex": lambda reader, real, imag: complex(float(real), float(imag)),
    "datetime.timedelta": lambda reader, *parts: timedelta(*parts),
    "torch.Size": lambda reader, sizes: torch.Size(sizes),
    "torch.device": lambda reader, *parts: torch.device(*parts),
    "numpy.dtype": _build_dtype,
    **_name_in_modules(
        ("numpy.core.multiarray", "numpy._core.multiarray"), {"scalar": _build_scalar, "_reconstruct": _build_array}
    ),
    **_name_in_modules(
        ("pathlib", "pathlib._local"),
        {
            **dict.fromkeys(("Path", "PosixPath", "WindowsPath"), _make_path_builder(pathlib.Path)),
            **dict.fromkeys(("PurePath", "PurePosixPath"), _make_path_builder(pathlib.PurePosixPath)),
            "PureWindowsPath": _make_path_builder(pathlib.PureWindowsPath),
        },
    ),
}
_WITH_STATE = {"argparse.Namespace", "numpy.dtype", *(name for name in _CALLS if name.endswith("._reconstruct"))}
