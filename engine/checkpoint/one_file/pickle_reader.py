"""Pickle reader without code execution: a stack machine that builds lists and dicts but cannot import or call.

Python's unpickler executes the content of a file. This reader only records it: the name of a class or function becomes
a `Name`, and a call becomes an `UnbuiltCall`, a record of the name and the arguments. Other modules decide which names
they accept and how they convert them to data. The code behind a name therefore never runs, even if the process has
passed it to ``torch.serialization.add_safe_globals``.
"""

from __future__ import annotations

import pickletools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ....common.messages import name_type

# 30,000 tensors with their optimizer's state take about 2.5 million, which are read in at most 5 s.
MAX_OPCODES = 3_000_000
MAX_BYTES = 512 * 2**20
_MARK = object()

# Names that only a malicious file of weights contains. They would have no effect here, but a person who loads such a
# file should be informed. Names that are not listed have no effect either.
_HARMFUL = {
    *("os", "posix", "nt", "subprocess", "sys", "importlib", "runpy", "ctypes", "_ctypes", "socket", "_socket"),
    *("shutil", "pty", "codeop", "webbrowser", "pickle", "_pickle", "marshal", "pip", "pydoc", "pdb", "bdb", "timeit"),
}
_PLAIN_BUILTINS = {
    "set",
    "frozenset",
    "complex",
    "bytearray",
    "bytes",
    "slice",
    "range",
    "object",
    "type",
    "getattr",
} | {*("int", "float", "bool", "str", "list", "dict", "tuple", "long", "unicode", "print", "len", "sum", "min", "max")}


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
    machine = _Machine()
    count = 0
    try:
        for opcode, arg, _ in _read_opcodes(stream):
            count += 1
            if count > MAX_OPCODES:
                raise ValueError(f"its pickle has more than {MAX_OPCODES:,} opcodes. Save the weights as safetensors")
            handler = _HANDLERS.get(opcode.name)
            if handler is None:
                raise ValueError(
                    f"its pickle has the opcode {opcode.name}, which torch.save never writes. Save the weights as "
                    "safetensors"
                )
            handler(machine, arg)
        return machine.stack[-1]
    except (IndexError, KeyError, TypeError, OverflowError, UnicodeError, RecursionError) as error:
        raise ValueError(f"its pickle is damaged ({type(error).__name__}). Copy or download the file again") from error


def _read_opcodes(stream: Any) -> Iterator[tuple[Any, Any, Any]]:
    try:
        yield from pickletools.genops(stream)
    except ValueError as error:
        raise ValueError(f"its pickle is damaged or truncated ({error}). Copy or download the file again") from error


class _Machine:
    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def pop_to_mark(self) -> list[Any]:
        start = self.marks.pop()
        if len(self.stack) < start:
            raise IndexError
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def pop_top(self, count: int) -> list[Any]:
        if len(self.stack) < count or (self.marks and len(self.stack) - count < self.marks[-1]):
            raise IndexError
        items = self.stack[-count:]
        del self.stack[-count:]
        return items

    def get_last(self) -> Any:
        return self.stack[-1]


def _check_key(value: Any) -> Any:
    """Return a dict key or set item. Raise an error if it is unsupported.

    Large integers and tuples are unsupported, because a file could contain many with the same hash to slow a dict down.
    """
    if isinstance(value, int) and value.bit_length() > 64:
        raise ValueError(
            f"its pickle has an integer of {value.bit_length():,} bits as a key, but at most 64 are allowed"
        )
    if isinstance(value, tuple):
        if len(value) > 16:
            raise ValueError(f"its pickle has a tuple of {len(value):,} items as a key, but at most 16 are allowed")
        for item in value:
            if isinstance(item, tuple) and any(isinstance(inner, tuple) for inner in item):
                raise ValueError("its pickle has deeply nested keys, which are not supported")
            _check_key(item)
    elif not isinstance(value, str | bytes | int | float | Name | None):
        raise ValueError(f"its pickle has {name_type(value)} as a key, which is not supported")
    return value


def _add_pairs(target: Any, flat: list[Any]) -> None:
    into = target.pairs if isinstance(target, UnbuiltCall) else target
    if not isinstance(into, dict) or len(flat) % 2:
        raise TypeError
    for key, value in zip(flat[::2], flat[1::2], strict=True):
        into[_check_key(key)] = value


def _append(target: Any, items: list[Any]) -> None:
    into = target.items if isinstance(target, UnbuiltCall) else target
    if not isinstance(into, list):
        raise TypeError
    into.extend(items)


def _add(target: Any, items: list[Any]) -> None:
    into: Any = target
    if not isinstance(into, set):
        raise TypeError
    into.update([_check_key(item) for item in items])


def _make_name(module: Any, name: Any) -> Name:
    if not isinstance(module, str) or not isinstance(name, str) or len(module) + len(name) > 500:
        raise ValueError("its pickle has an invalid class or function name. Copy or download the file again")
    module = {"__builtin__": "builtins", "copy_reg": "copyreg"}.get(module, module)
    root = module.partition(".")[0]
    if root in _HARMFUL or (root == "builtins" and name not in _PLAIN_BUILTINS):
        raise ValueError(
            f"it asks to run {module}.{name}, which is not data. The file was made to attack programs that load it. "
            "Nothing in it was run. Delete it, and get the weights from another source, as safetensors if possible"
        )
    return Name(sys.intern(f"{module}.{name}"))


def _make_call(callee: Any, args: Any) -> UnbuiltCall:
    if not isinstance(callee, Name):
        callee = Name("a call of a call")
    if not isinstance(args, tuple):
        raise TypeError
    return UnbuiltCall(callee.path, args)


def _reduce(m: _Machine, _: Any) -> None:
    m.stack.append(_make_call(*m.pop_top(2)))


def _make_named_call(m: _Machine, _: Any) -> None:
    callee, args, named = m.pop_top(3)
    call = _make_call(callee, args)
    call.state = named
    m.stack.append(call)


def _build(m: _Machine, _: Any) -> None:
    (state,) = m.pop_top(1)
    if isinstance(m.get_last(), UnbuiltCall):
        m.get_last().state = state  # for any other object it is a note, such as a state_dict's `_metadata`


def _build_from_mark(kind: Callable[[list[Any]], Any]) -> Callable[[_Machine, Any], object]:
    return lambda m, _: m.stack.append(kind(m.pop_to_mark()))


def _build_dict(flat: list[Any]) -> dict[Any, Any]:
    mapping: dict[Any, Any] = {}
    _add_pairs(mapping, flat)
    return mapping


def _extend_with(action: Callable[[Any, list[Any]], None], count: int = 0) -> Callable[[_Machine, Any], object]:
    def extend(m: _Machine, _: Any) -> None:
        items = m.pop_top(count) if count else m.pop_to_mark()
        action(m.get_last(), items)

    return extend


def _memoize(m: _Machine, number: Any) -> None:
    m.memo[len(m.memo) if number is None else number] = m.get_last()


_HANDLERS: dict[str, Callable[[_Machine, Any], object]] = {
    **dict.fromkeys(("PROTO", "FRAME", "STOP"), lambda m, arg: None),
    **dict.fromkeys(
        (
            *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
            *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
            *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
        ),
        lambda m, arg: m.stack.append(arg),
    ),
    "NONE": lambda m, _: m.stack.append(None),
    "NEWTRUE": lambda m, _: m.stack.append(True),
    "NEWFALSE": lambda m, _: m.stack.append(False),
    "EMPTY_LIST": lambda m, _: m.stack.append([]),
    "EMPTY_DICT": lambda m, _: m.stack.append({}),
    "EMPTY_SET": lambda m, _: m.stack.append(set()),
    "EMPTY_TUPLE": lambda m, _: m.stack.append(()),
    "MARK": lambda m, _: m.marks.append(len(m.stack)),
    "POP": lambda m, _: m.pop_top(1),
    "POP_MARK": lambda m, _: m.pop_to_mark(),
    "DUP": lambda m, _: m.stack.append(m.get_last()),
    "LIST": _build_from_mark(list),
    "TUPLE": _build_from_mark(tuple),
    "DICT": _build_from_mark(_build_dict),
    "FROZENSET": _build_from_mark(lambda items: frozenset(_check_key(item) for item in items)),
    "TUPLE1": lambda m, _: m.stack.append(tuple(m.pop_top(1))),
    "TUPLE2": lambda m, _: m.stack.append(tuple(m.pop_top(2))),
    "TUPLE3": lambda m, _: m.stack.append(tuple(m.pop_top(3))),
    "APPEND": _extend_with(_append, 1),
    "APPENDS": _extend_with(_append),
    "SETITEM": _extend_with(_add_pairs, 2),
    "SETITEMS": _extend_with(_add_pairs),
    "ADDITEMS": _extend_with(_add),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda m, number: m.stack.append(m.memo[number])),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), _memoize),
    "GLOBAL": lambda m, text: m.stack.append(_make_name(*text.split(" ", 1))),
    "STACK_GLOBAL": lambda m, _: m.stack.append(_make_name(*m.pop_top(2))),
    "REDUCE": _reduce,
    "NEWOBJ": _reduce,
    "NEWOBJ_EX": _make_named_call,
    "BUILD": _build,
    "BINPERSID": lambda m, _: m.stack.append(UnbuiltCall("persistent", tuple(m.pop_top(1)))),
}
