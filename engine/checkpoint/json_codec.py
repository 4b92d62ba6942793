"""Encoding of a nested state as a plain JSON document and a dict of tensors, which are decoded without running code.

Text, booleans, None, finite floats, integers of up to 256 bits, lists, and dicts with text keys are stored as the
corresponding JSON values. A value of another type is stored as an object with one key that starts with ``$``, a tag:
``{"$tuple": [1, 2]}``. A user's dict with such a key, or with keys that are not text, is stored as pairs,
``{"$dict": [[key, value], ...]}``, so users' keys are never mistaken for tags. Containers that `encode` converts, such
as an ``OrderedDict``, are stored as plain dicts or lists.

Decoding looks tags up in one fixed table of data types. No tag creates an object of a class that the document names, so
a document cannot choose code to import or call. For the same reason, objects of other classes, such as enums,
dataclasses and named tuples, are refused when encoding. To store one, use a `Record`; the code that reads the state
then decides which class to create.
"""

import base64
import itertools
import math
import pathlib
import re
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from typing import Any, NoReturn

import numpy as np
import torch

from ...common.messages import name_type
from ...common.optional import is_config
from ...strategies.distributed import is_sharded, make_view_key
from .filesystem import CODES

__all__ = ["MAX_DEPTH", "Record", "check_tensor", "decode", "encode"]

MAX_DEPTH = 100
"""Maximum nesting of a state; real states have fewer than 10 levels, and Python's recursion limit is about 1000."""

_ALL_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
_INTEGERS = {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
_FLOATS = {"float16", "float32", "float64"}
_NUMPY_SCALARS = {"bool", "str", "complex64", "complex128"} | _INTEGERS | _FLOATS
_NUMPY_ARRAYS = {"bool", "complex64"} | _INTEGERS | _FLOATS

# Decimal text of a huge integer takes quadratic time, and Python refuses it beyond 4300 digits; hexadecimal text has no
# limit.
_PLAIN_INT_BITS = 256
_WIDEST_TEXT = 2**8  # bytes of one text in an array of any width
_HEX = re.compile(r"-?0x[0-9a-f]+")
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True)
class Record:
    """Inert description of an object in a stored state: `json_codec.decode` returns the record, never the object.

    Attributes:
        kind: The kind of object that the reader may create, such as ``"enum"``.
        name: The name of the object's class.
        content: The object's data, anything that `json_codec.encode` accepts.
    """

    kind: str
    name: str
    content: Any


def encode(state: Any, prefix: str = "") -> tuple[Any, dict[str, torch.Tensor]]:
    """Split a nested state into a document that ``json`` can write and the tensors that it refers to by name.

    An ``OrderedDict`` or ``defaultdict`` becomes a plain dict, a parameter a plain tensor, and a container of OmegaConf
    a plain dict or list.

    Tensors are not copied. If two tensors are the same view of one storage (tied weights), they are stored once, and
    `decode` returns the same object at both places.

    Args:
        state: The state to store.
        prefix: Prefix of every tensor's name and of every place in an error, for example ``"optimizer"``. Default:
            none.

    Raises:
        TypeError: If the state contains a value that cannot be stored. The error names the place, the type and the fix.
        ValueError: If the state contains itself, or is nested more than 100 levels deep.
    """
    encoder = _Encoder(prefix)
    return encoder.encode_value(state, encoder.root), encoder.tensors


def decode(document: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Restore the state from the results of `encode`. No code is imported or run, regardless of the document's content.

    Tensors become part of the state without being copied; numpy arrays share the memory of CPU tensors.

    Raises:
        ValueError: If the document is not valid, or names a missing tensor.
    """
    return _Decoder(tensors).decode_value(document, ())


def check_tensor(tensor: torch.Tensor, place: str, *, any_dtype: bool = False) -> None:
    """Raise a TypeError for a tensor that cannot be stored; the error names ``place``."""
    problem = ""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) and not is_sharded(tensor):
        kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
        problem = f"is a tensor of class {kind}, but only plain tensors can be stored. Unwrap it into a torch.Tensor"
    elif tensor.layout != torch.strided:
        problem = f"is a {tensor.layout} tensor, but only dense tensors can be stored. Convert it with .to_dense()"
    elif tensor.device.type == "meta":
        problem = "is a tensor on the meta device, so it has no values that can be stored. Materialize it"
    elif not any_dtype and tensor.dtype not in CODES:
        problem = f"is a {tensor.dtype} tensor, but safetensors files can't contain this dtype. Convert it"
    if problem:
        raise TypeError(f"{place} {problem} first, or remove it from the state.")


def _refuse(value: Any, place: str, fix: str, kind: str = "") -> NoReturn:
    kind = kind or f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    raise TypeError(
        f"{place}: {'an' if kind[0] in 'aeioAEIO' else 'a'} {kind} can't be stored in a checkpoint. A checkpoint "
        "contains only data (numbers, text, bytes, None, dicts, lists, tuples, sets, tensors, numpy values, dtypes, "
        "devices, paths, dates), so that loading never imports or runs code. To fix this, "
        f"{fix}, or remove it from the state."
    )


def _convert_config(config: Any, path: tuple[str, ...]) -> Any:
    """Return an OmegaConf container as plain dicts and lists, with interpolations resolved."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        reason = str(error).partition("\n")[0]
        _refuse(config, _format_place(path), "set the value that it refers to", f"{type(config).__name__} ({reason})")


def _encode_float(value: float) -> Any:
    return value if math.isfinite(value) else {"$float": str(value)}


_PLAIN = {type(None), bool, str}  # JSON represents them directly

# Looked up by exact type, because a subclass (an enum that is also an int, a named tuple) would be read back as another
# type.
_LEAVES: dict[type, Callable[[Any], Any]] = {
    int: lambda v: v if v.bit_length() <= _PLAIN_INT_BITS else {"$int": hex(v)},
    float: _encode_float,
    complex: lambda v: {"$complex": [_encode_float(v.real), _encode_float(v.imag)]},
    bytes: lambda v: {"$bytes": base64.b64encode(v).decode("ascii")},
    torch.dtype: lambda v: {"$dtype": str(v).removeprefix("torch.")},
    torch.device: lambda v: {"$device": str(v)},
    torch.Size: lambda v: {"$size": list(v)},
    type(pathlib.Path()): lambda v: {"$path": str(v)},
    pathlib.PurePosixPath: lambda v: {"$posix_path": str(v)},
    pathlib.PureWindowsPath: lambda v: {"$windows_path": str(v)},
    timedelta: lambda v: {"$timedelta": [v.days, v.seconds, v.microseconds]},
    date: lambda v: {"$date": v.isoformat()},
}


def _copy_plain_ints(value: list[Any] | tuple[Any, ...]) -> list[Any] | None:
    """Return the items as a list if all are integers that JSON represents directly, else None.

    This makes it fast to encode long lists, such as the 625 integers in the state of Python's generator.
    """
    if set(map(type, value)) != {int} or max(value).bit_length() > _PLAIN_INT_BITS:
        return None
    return list(value) if min(value).bit_length() <= _PLAIN_INT_BITS else None


class _Encoder:
    def __init__(self, prefix: str) -> None:
        self.root: tuple[str, ...] = (prefix,) if prefix else ()
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}  # tensor name by view
        self._arrays: list[torch.Tensor] = []  # kept alive, so that no other tensor gets the same address and key
        self._open: set[int] = set()  # the containers that are being encoded
        self._in_key = False

    def encode_value(self, value: Any, path: tuple[str, ...]) -> Any:
        if type(value) in _PLAIN:
            return value
        leaf = _LEAVES.get(type(value))
        if leaf is not None:
            return leaf(value)
        if isinstance(value, (torch.Tensor, np.ndarray)) and getattr(value.dtype, "kind", "") not in ("U", "O"):
            return self._encode_array(value, path)
        if isinstance(value, np.generic):
            return self._encode_numpy_scalar(value, path)
        if type(value) in (datetime, time):
            return self._encode_clock(value, path)
        return self._encode_container(value, path)

    def _encode_container(self, value: Any, path: tuple[str, ...]) -> Any:
        if len(path) - len(self.root) >= MAX_DEPTH:
            raise ValueError(
                f"{_format_place(path[:8])}...: the state is nested more than {MAX_DEPTH} levels deep. Flatten it."
            )
        if id(value) in self._open:
            raise ValueError(f"{_format_place(path)}: the state contains itself. Break the cycle.")
        self._open.add(id(value))
        kind = type(value)
        if kind in (dict, OrderedDict, defaultdict):
            document = self._encode_dict(value, path)
        elif kind is Namespace:
            document = {"$namespace": self._encode_dict(vars(value), path)}
        elif kind is Record:
            document = {"$record": [value.kind, value.name, self.encode_value(value.content, (*path, value.kind))]}
        elif kind is Counter:
            document = {"$counter": self._encode_pairs(value, path)}
        elif kind in (list, tuple):
            items = _copy_plain_ints(value)
            if items is None:
                items = [self.encode_value(item, (*path, str(i))) for i, item in enumerate(value)]
            document = items if kind is list else {"$tuple": items}
        elif kind in (set, frozenset):
            # Sorted, because the order of a set of strings differs between Python processes.
            document = {f"${kind.__name__}": sorted((self._encode_key(item, path) for item in value), key=repr)}
        elif kind is np.ndarray:  # of text or objects
            items = [self.encode_value(item, (*path, str(i))) for i, item in enumerate(value.ravel().tolist())]
            document = {"$object_array": [value.dtype.str, list(value.shape), *items]}
        elif is_config(value):
            document = self.encode_value(_convert_config(value, path), path)
        else:
            _refuse(value, _format_place(path), _suggest_storage(value))
        self._open.remove(id(value))
        return document

    def _encode_clock(self, value: datetime | time, path: tuple[str, ...]) -> Any:
        if value.tzinfo is not None and value.tzinfo != timezone(value.utcoffset() or timedelta(0)):
            _refuse(
                value,
                _format_place(path),
                "store it in UTC, or its .isoformat()",
                f"{type(value).__name__} in a named zone",
            )
        return {f"${type(value).__name__}": [value.isoformat(), value.fold]}

    def _encode_dict(self, value: dict[Any, Any], path: tuple[str, ...]) -> Any:
        if set(map(type, value)) <= {str} and "$" not in {key[:1] for key in value}:
            return {  # plain values without a call, because most values are plain
                key: item if type(item) in _PLAIN else self.encode_value(item, (*path, key))
                for key, item in value.items()
            }
        return {"$dict": self._encode_pairs(value, path)}

    def _encode_pairs(self, value: dict[Any, Any], path: tuple[str, ...]) -> list[list[Any]]:
        return [
            [self._encode_key(key, path), self.encode_value(item, (*path, str(key)))] for key, item in value.items()
        ]

    def _encode_key(self, key: Any, path: tuple[str, ...]) -> Any:
        outer, self._in_key = self._in_key, True
        document = self.encode_value(key, (*path, "key or set element"))
        self._in_key = outer
        return document

    def _encode_array(self, value: torch.Tensor | np.ndarray, path: tuple[str, ...]) -> Any:
        if self._in_key:  # it is hashed by identity, which no file can preserve
            kind = f"{type(value).__name__} as a key or set element"
            _refuse(value, _format_place(path), "use a name or a number instead", kind)
        if isinstance(value, torch.Tensor):
            check_tensor(value, _format_place(path))
            return {"$tensor": self._name_tensor(value, path)}
        if type(value) is not np.ndarray or value.dtype.name not in _NUMPY_ARRAYS or not value.dtype.isnative:
            kind = f"numpy {type(value).__name__} of dtype {value.dtype}"
            _refuse(
                value,
                _format_place(path),
                "convert it with .astype() to a native numeric dtype or with .tolist()",
                kind,
            )
        # Copied, because torch does not accept negative strides, and warns about read-only memory.
        self._arrays.append(torch.from_numpy(np.array(value, order="C")))
        return {"$array": self._name_tensor(self._arrays[-1], path)}

    def _name_tensor(self, tensor: torch.Tensor, path: tuple[str, ...]) -> str:
        key = make_view_key(tensor)
        if key not in self._names:
            dotted_path = ".".join(path).encode(errors="replace").decode() or "tensor"
            spellings = itertools.chain([dotted_path], (f"{dotted_path}~{n}" for n in itertools.count(2)))
            # safetensors stores its own notes under __metadata__ and cannot read a tensor of that name.
            name = next(n for n in spellings if n not in self.tensors and n != "__metadata__")
            self._names[key] = name
            self.tensors[name] = tensor.detach()
        return self._names[key]

    def _encode_numpy_scalar(self, value: np.generic, path: tuple[str, ...]) -> Any:
        name = "str" if isinstance(value, np.str_) else value.dtype.name
        if name not in _NUMPY_SCALARS:
            _refuse(value, _format_place(path), "convert it to a Python number or text", f"numpy {value.dtype} scalar")
        return {"$numpy": [name, self.encode_value(value.item(), path)]}


def _format_place(path: tuple[str, ...]) -> str:
    return ".".join(path) or "state"


def _suggest_storage(value: Any) -> str:
    if hasattr(value, "_asdict"):
        return "store its ._asdict()"
    if hasattr(value, "__dataclass_fields__"):
        return "store the result of dataclasses.asdict()"
    if hasattr(type(value), "__members__"):
        return "store the enum member's .name or .value"
    if hasattr(value, "state_dict"):
        return "store its .state_dict()"
    if callable(value):
        return "store its name, and look it up after loading"
    return "store its fields as a dict"


class _Decoder:
    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._depth = 0

    def decode_value(self, document: Any, path: tuple[str, ...]) -> Any:
        if document is None or type(document) in (bool, int, float, str):
            return document
        if self._depth > MAX_DEPTH + 2:  # a key and its tag may be below the deepest container
            raise _Malformed(f"{_format_place(path[:8])}...: the document is nested more than {MAX_DEPTH} levels deep.")
        self._depth += 1
        try:
            state = self._decode_container(document, path)
        except _Malformed:
            raise
        except (ValueError, TypeError, OverflowError, RuntimeError) as error:
            raise _Malformed(f"{_format_place(path)}: {error}.") from error
        self._depth -= 1
        return state

    def _decode_container(self, document: Any, path: tuple[str, ...]) -> Any:
        if type(document) is list:
            return self._decode_items(document, path)
        if type(document) is not dict:
            raise ValueError(f"{name_type(document)} is not a JSON value")
        _require(set(map(type, document)) <= {str}, "the keys of a JSON object must be strings")
        if not any(key.startswith("$") for key in document):
            return {key: self.decode_value(item, (*path, key)) for key, item in document.items()}
        tag, content = next(iter(document.items()))
        if len(document) != 1 or tag not in _READERS:
            raise ValueError(f"{', '.join(document)[:80]!r} is not a tag that this version of Treadle supports")
        return _READERS[tag](self, content, (*path, tag))

    def _decode_items(self, content: Any, path: tuple[str, ...]) -> list[Any]:
        _require(type(content) is list, "it must be a list")
        return [self.decode_value(item, (*path, str(i))) for i, item in enumerate(content)]

    def _decode_pairs(self, content: Any, path: tuple[str, ...]) -> dict[Any, Any]:
        pairs = [
            tuple(self._decode_items(pair, (*path, str(i)))) for i, pair in enumerate(_require_type(list, content))
        ]
        _require(all(len(pair) == 2 for pair in pairs), "every entry must be a key and a value")
        return _require_no_duplicates(dict(pairs), pairs)

    def _look_up_tensor(self, name: Any, path: tuple[str, ...]) -> torch.Tensor:
        _require(type(name) is str and name in self._tensors, f"unknown tensor {name!r}")
        return self._tensors[name]

    def _decode_numpy_array(self, name: Any, path: tuple[str, ...]) -> np.ndarray:
        tensor = self._look_up_tensor(name, path)
        _require(str(tensor.dtype).removeprefix("torch.") in _NUMPY_ARRAYS, f"numpy has no dtype {tensor.dtype}")
        return tensor[...].cpu().numpy()

    def _decode_object_array(self, content: Any, path: tuple[str, ...]) -> np.ndarray:
        dtype, shape, *items = self._decode_items(content, path)
        array_type = np.dtype(_require_type(str, dtype))
        _require(array_type.kind in "UO", f"{dtype!r} is no dtype of text or objects")
        if array_type.itemsize > _WIDEST_TEXT:  # each text is padded to it, and a file could ask for 8 GB
            array_type = np.dtype(f"U{max([1, *map(len, map(str, items))])}")
        return np.fromiter(items, array_type, len(items)).reshape(shape)

    def _decode_numpy_scalar(self, content: Any, path: tuple[str, ...]) -> np.generic:
        name, value = self._decode_items(content, path)
        _require(type(name) is str and name in _NUMPY_SCALARS, f"unknown numpy type {name!r}")
        if name == "str":
            return np.str_(_require_type(str, value))
        dtype = np.dtype(name)
        _require_type({"b": bool, "i": int, "u": int, "f": float, "c": complex}[dtype.kind], value)
        if dtype.kind in "iu":  # numpy 1 would wrap around
            _require(np.iinfo(dtype).min <= value <= np.iinfo(dtype).max, f"{value} is out of range for {name}")
        return dtype.type(value)

    def _decode_record(self, content: Any, path: tuple[str, ...]) -> Record:
        kind, name, inside = _require_type(list, content)
        return Record(_require_type(str, kind), _require_type(str, name), self.decode_value(inside, path))

    def _decode_complex(self, content: Any, path: tuple[str, ...]) -> complex:
        real, imaginary = self._decode_items(content, path)
        return complex(_require_type(float, real), _require_type(float, imaginary))


class _Malformed(ValueError):
    """ValueError whose text already names a place in the document."""


def _require(condition: bool, rule: str) -> None:
    if not condition:
        raise ValueError(rule)


def _require_type(kind: type, value: Any) -> Any:
    _require(type(value) is kind, f"it must be of type {kind.__name__}, not {type(value).__name__}")
    return value


def _require_no_duplicates(built: Any, items: list[Any]) -> Any:
    _require(len(built) == len(items), "the same key or element occurs twice")
    return built


def _parse_ints(content: Any) -> Iterable[int]:
    return [_require_type(int, item) for item in _require_type(list, content)]


def _parse_hex_int(content: Any) -> int:
    _require(_HEX.fullmatch(_require_type(str, content)) is not None, "it must be a hexadecimal number")
    return int(content, 16)


def _parse_clock(kind: type[Any], content: Any) -> Any:
    text, fold = _require_type(list, content)
    return kind.fromisoformat(_require_type(str, text)).replace(fold=_require_type(int, fold))


def _lookup(table: dict[str, Any], content: Any) -> Any:
    _require(_require_type(str, content) in table, f"unknown name {content!r}")
    return table[content]


def _decode_set(decoder: _Decoder, content: Any, path: tuple[str, ...]) -> set[Any]:
    items = decoder._decode_items(content, path)
    return _require_no_duplicates(set(items), items)


_READERS: dict[str, Callable[[_Decoder, Any, tuple[str, ...]], Any]] = {
    "$namespace": lambda d, c, p: Namespace(**_require_type(dict, d.decode_value(c, p))),
    "$tuple": lambda d, c, p: tuple(d._decode_items(c, p)),
    "$dict": _Decoder._decode_pairs,
    "$counter": lambda d, c, p: Counter(d._decode_pairs(c, p)),
    "$set": _decode_set,
    "$frozenset": lambda d, c, p: frozenset(_decode_set(d, c, p)),
    "$tensor": _Decoder._look_up_tensor,
    "$array": _Decoder._decode_numpy_array,
    "$object_array": _Decoder._decode_object_array,
    "$numpy": _Decoder._decode_numpy_scalar,
    "$complex": _Decoder._decode_complex,
    "$int": lambda d, c, p: _parse_hex_int(c),
    "$float": lambda d, c, p: _lookup(_NON_FINITE, c),
    "$bytes": lambda d, c, p: base64.b64decode(_require_type(str, c), validate=True),
    "$dtype": lambda d, c, p: _lookup(_ALL_DTYPES, c),
    "$device": lambda d, c, p: torch.device(_require_type(str, c)),
    "$size": lambda d, c, p: torch.Size(_parse_ints(c)),
    "$path": lambda d, c, p: pathlib.Path(_require_type(str, c)),
    "$posix_path": lambda d, c, p: pathlib.PurePosixPath(_require_type(str, c)),
    "$windows_path": lambda d, c, p: pathlib.PureWindowsPath(_require_type(str, c)),
    "$timedelta": lambda d, c, p: timedelta(*_parse_ints(c)),
    "$date": lambda d, c, p: date.fromisoformat(_require_type(str, c)),
    "$datetime": lambda d, c, p: _parse_clock(datetime, c),
    "$time": lambda d, c, p: _parse_clock(time, c),
    "$record": _Decoder._decode_record,
}
