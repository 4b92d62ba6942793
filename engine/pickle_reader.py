"""Pickle reader without code execution: Python's own unpickler, which here cannot import or call anything.

Python's unpickler executes the content of a file. This reader only records it: the name of a class or function becomes
a `Name`, and a call becomes an `UnbuiltCall`, a record of the name and the arguments. Other modules decide which names
they accept and how they convert them to data. The code behind a name therefore never runs, even if the process has
passed it to ``torch.serialization.add_safe_globals``.
"""

from __future__ import annotations

import pickle
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..common.messages import name_type

# 30,000 tensors with their optimizer's state take about 2.5 million, which are read in at most 5 s.
MAX_OPCODES = 3_000_000
MAX_BYTES = 512 * 2**20

# Names that only a malicious file of weights contains. They would have no effect here, but a person who loads such a
# file should be informed. Names that are not listed have no effect either.
_HARMFUL = {
    *("os", "posix", "nt", "subprocess", "sys", "importlib", "runpy", "ctypes", "_ctypes", "socket", "_socket"),
    *("shutil", "pty", "codeop", "webbrowser", "pickle", "_pickle", "marshal", "pip", "pydoc", "pdb", "bdb", "timeit"),
}
_PLAIN_BUILTINS = {
    *("set", "frozenset", "complex", "bytearray", "bytes", "slice", "range", "object", "type", "getattr"),
    *("int", "float", "bool", "str", "list", "dict", "tuple", "long", "unicode", "print", "len", "sum", "min", "max"),
}


@dataclass(frozen=True)
class Name:
    """Name of a class or function in a pickle, such as ``"torch.FloatStorage"``. It is never imported."""

    path: str


@dataclass(eq=False, slots=True)
class UnbuiltCall:
    """Record of a call in a pickle. The call is not executed.

    Attributes:
        name: The name of the called class or function; ``"persistent"`` for data stored outside the pickle, such as the
            memory of tensors.
        state: The state that the pickle would set on the result, or the keyword arguments of the call, if any.
        pairs: The key-value pairs that the pickle would set on the result.
        items: The items that the pickle would append to the result.
    """

    name: str
    args: tuple[Any, ...] = ()
    state: Any = None
    pairs: dict[Any, Any] = field(default_factory=dict)
    items: list[Any] = field(default_factory=list)


def read(stream: Any) -> Any:
    """Read one pickle from a binary stream. Data after the end of the pickle is not read.

    Returns:
        The object in the pickle, which consists of built-in data types, `Name` and `UnbuiltCall`.

    Raises:
        ValueError: If the pickle is damaged, harmful or too large.
    """
    try:
        return _Reader(stream).load()
    except _Refused as error:
        raise ValueError(str(error)) from None
    except (
        *(pickle.UnpicklingError, EOFError, struct.error, ValueError, IndexError, KeyError),
        *(TypeError, AttributeError, OverflowError, RecursionError, MemoryError),
    ) as error:
        raise ValueError(f"its pickle is damaged ({type(error).__name__}). Copy or download the file again") from error


# Python's own in Python, which type checkers take for the one in C.
_PythonUnpickler: Any = vars(pickle)["_Unpickler"]


class _Refused(Exception):
    """Error about an intact pickle whose content is not accepted."""


class _Handlers(dict[int, Callable[["_Reader"], None]]):
    """Methods of the unpickler by opcode, which count the opcodes that they are looked up for."""

    def __init__(self, handlers: dict[int, Callable[[_Reader], None]]) -> None:
        super().__init__(handlers)
        self._count = 0

    def __getitem__(self, opcode: int) -> Callable[[_Reader], None]:
        self._count += 1
        if self._count > MAX_OPCODES:
            raise _Refused(f"its pickle has more than {MAX_OPCODES:,} opcodes. Save the weights as safetensors")
        handler = self.get(opcode)
        if handler is None:
            raise _Refused(
                f"its pickle has the opcode {bytes([opcode])!r}, which torch.save never writes. Save the weights as "
                "safetensors"
            )
        return handler


class _Reader(_PythonUnpickler):
    """Unpickler, in Python, whose opcodes that would import, call or change an object record this instead."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream, encoding="latin-1")  # text that Python 2 wrote
        self.dispatch = _Handlers(_HANDLERS)

    def find_class(self, module: str, name: str) -> Name:
        if len(module) + len(name) > 500:
            raise _Refused("its pickle has an invalid class or function name. Copy or download the file again")
        module = {"__builtin__": "builtins", "copy_reg": "copyreg"}.get(module, module)
        root = module.partition(".")[0]
        if root in _HARMFUL or (root == "builtins" and name not in _PLAIN_BUILTINS):
            raise _Refused(
                f"it asks to run {module}.{name}, which is not data. The file was made to attack programs that load "
                "it. Nothing in it was run. Delete it, and get the weights from another source, as safetensors if "
                "possible"
            )
        return Name(sys.intern(f"{module}.{name}"))

    def persistent_load(self, pid: Any) -> UnbuiltCall:
        return UnbuiltCall("persistent", (pid,))

    def record_call(self, named: Any = None) -> None:
        args, callee = self.stack.pop(), self.stack.pop()
        if not isinstance(args, tuple):
            raise TypeError
        self.append(UnbuiltCall(callee.path if isinstance(callee, Name) else "a call of a call", args, named))

    def record_named_call(self) -> None:
        self.record_call(self.stack.pop())

    def record_state(self) -> None:
        state = self.stack.pop()
        if isinstance(self.stack[-1], UnbuiltCall):
            self.stack[-1].state = state  # for any other object it is a note, such as a state_dict's `_metadata`

    def add_pairs(self, flat: list[Any]) -> None:
        target = self.stack[-1]
        into = target.pairs if isinstance(target, UnbuiltCall) else target
        if not isinstance(into, dict) or len(flat) % 2:
            raise TypeError
        for key, value in zip(flat[::2], flat[1::2], strict=True):
            into[_check_key(key)] = value

    def add_pair(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.add_pairs([key, value])

    def make_dict(self) -> None:
        flat = self.pop_mark()
        self.append({})
        self.add_pairs(flat)

    def make_frozenset(self) -> None:
        elements = self.pop_mark()  # first, because it replaces `append`
        self.append(frozenset(map(_check_key, elements)))

    def append_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        into = target.items if isinstance(target, UnbuiltCall) else target
        if not isinstance(into, list):
            raise TypeError
        into.extend(items)

    def add_elements(self) -> None:
        elements = self.pop_mark()
        if not isinstance(self.stack[-1], set):
            raise TypeError
        self.stack[-1].update(map(_check_key, elements))


def _check_key(value: Any) -> Any:
    """Return a dict key or set item. Raise an error if it is unsupported.

    Large integers and tuples are unsupported, because a file could contain many with the same hash to slow a dict down.
    """
    if isinstance(value, int) and value.bit_length() > 64:
        raise _Refused(f"its pickle has an integer of {value.bit_length():,} bits as a key, but at most 64 are allowed")
    if isinstance(value, tuple):
        if len(value) > 16:
            raise _Refused(f"its pickle has a tuple of {len(value):,} items as a key, but at most 16 are allowed")
        for item in value:
            if isinstance(item, tuple) and any(isinstance(inner, tuple) for inner in item):
                raise _Refused("its pickle has deeply nested keys, which are not supported")
            _check_key(item)
    elif not isinstance(value, str | bytes | int | float | Name | None):
        raise _Refused(f"its pickle has {name_type(value)} as a key, which is not supported")
    return value


_RECORDING: dict[bytes, Callable[[_Reader], None]] = {
    pickle.REDUCE: _Reader.record_call,
    pickle.NEWOBJ: _Reader.record_call,
    pickle.NEWOBJ_EX: _Reader.record_named_call,
    pickle.BUILD: _Reader.record_state,
    pickle.SETITEM: _Reader.add_pair,
    pickle.SETITEMS: lambda reader: reader.add_pairs(reader.pop_mark()),
    pickle.DICT: _Reader.make_dict,
    pickle.APPEND: lambda reader: reader.append_items([reader.stack.pop()]),
    pickle.APPENDS: lambda reader: reader.append_items(reader.pop_mark()),
    pickle.ADDITEMS: _Reader.add_elements,
    pickle.FROZENSET: _Reader.make_frozenset,
    # Python's own allocates what the file announces.
    pickle.BYTEARRAY8: lambda reader: reader.append(bytearray(reader.read(*struct.unpack("<Q", reader.read(8))))),
}
# Old ways to call, numbers for classes, and data outside the file.
_UNSUPPORTED = (
    *(pickle.INST, pickle.OBJ, pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.PERSID),
    *(pickle.NEXT_BUFFER, pickle.READONLY_BUFFER),
)
_HANDLERS = {
    opcode: handler for opcode, handler in _PythonUnpickler.dispatch.items() if bytes([opcode]) not in _UNSUPPORTED
} | {opcode[0]: handler for opcode, handler in _RECORDING.items()}
