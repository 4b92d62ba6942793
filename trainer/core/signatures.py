"""Signatures of classes and functions, with the descriptions of arguments in docstrings."""

from __future__ import annotations

import ast
import importlib.resources
import inspect
import re
import sys
import textwrap
import typing
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

REQUIRED = inspect.Parameter.empty
# Modules of base classes that pass *args and **kwargs on to a sibling and use none of them.
_HAND_ON = ("treadle.trainer.core.task", "treadle.trainer.core.datamodule", "torch.nn.modules.module")


@dataclass(frozen=True)
class Argument:
    """Argument of a constructor or a function.

    Attributes:
        name: Name of the argument.
        type: Annotation; ``Any`` if there is none or it cannot be evaluated.
        default: Default value; `REQUIRED` if there is none.
        several: Whether the argument is ``*args``, whose values are given as a list.
    """

    name: str
    type: Any = Any
    default: Any = REQUIRED
    several: bool = False


@dataclass(frozen=True)
class Signature:
    """Arguments that a callable accepts.

    Attributes:
        arguments: Arguments by name.
        open: Whether the callable also accepts keyword arguments that are not listed.
        positional: Names of arguments that may be passed by position. They must be if values for ``*args`` are passed.
        by_place_only: Number of arguments that must be passed by position.
    """

    arguments: dict[str, Argument]
    open: bool = False
    positional: tuple[str, ...] = ()
    by_place_only: int = 0


def signature(target: Callable[..., Any]) -> Signature:
    """Return the arguments of a class or function.

    The arguments of a class that forwards ``**kwargs`` include those of its base classes.
    """
    if not isinstance(target, type):
        return _read_signature(target, bound=False)
    chain = [cls for cls in target.__mro__ if "__init__" in vars(cls)]
    if not chain or chain == [object]:
        constructor = vars(target).get("__new__")
        return (
            Signature({})
            if constructor is None
            else _read_signature(getattr(constructor, "__func__", constructor), bound=True)
        )
    return _read_constructor([cls for cls in chain if cls is not object and cls.__module__ not in _HAND_ON])


def _read_constructor(chain: list[type]) -> Signature:
    """Return the arguments of the first class's ``__init__``, and those that it forwards to the following classes'."""
    if not chain:
        return Signature({})
    own = _read_signature(vars(chain[0])["__init__"], bound=True)
    forwarded = _find_forwarded(vars(chain[0])["__init__"]) if own.open else None
    if forwarded is None:
        return own
    inherited = _read_constructor(chain[1:])
    arguments = {name: one for name, one in own.arguments.items() if not (forwarded.variadic and one.several)}
    passed = {*arguments, *forwarded.keywords, *inherited.positional[: forwarded.by_place]}
    arguments |= {name: one for name, one in inherited.arguments.items() if name not in passed}
    return replace(own, arguments=arguments, open=inherited.open)


def read_flags() -> dict[str, str]:
    """Return the Trainer's flags and their annotations, from its source, because an import would wait for torch."""
    source = importlib.resources.files("treadle.trainer").joinpath("trainer.py").read_text(encoding="utf-8")
    functions = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef))
    constructor = next(function for function in functions if function.name == "__init__")
    return {flag.arg: ast.unparse(flag.annotation or flag) for flag in constructor.args.kwonlyargs}


def _read_signature(function: Any, bound: bool) -> Signature:
    """Return a function's own arguments; a function that cannot be inspected accepts any arguments."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (ValueError, TypeError):
        return Signature({}, open=True)
    parameters = parameters[1:] if bound else parameters
    hints = _make_annotation_finder(function)
    arguments: dict[str, Argument] = {}
    for parameter in parameters:
        if parameter.kind is not parameter.VAR_KEYWORD:
            several = parameter.kind is parameter.VAR_POSITIONAL
            arguments[parameter.name] = Argument(
                parameter.name, hints(parameter.name), () if several else parameter.default, several
            )
    positional_only_count = sum(parameter.kind is parameter.POSITIONAL_ONLY for parameter in parameters)
    positional = [
        parameter.name
        for parameter in parameters
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    return Signature(
        arguments,
        any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters),
        tuple(positional),
        positional_only_count,
    )


def _make_annotation_finder(function: Any) -> Callable[[str], Any]:
    """Return a function that returns an argument's annotation by name, or ``Any`` if it cannot be evaluated."""
    function = inspect.unwrap(function)
    raw = getattr(function, "__annotations__", {})
    names = getattr(function, "__globals__", {})
    local = vars(sys.modules.get(getattr(function, "__module__", ""), typing))

    def find(name: str) -> Any:
        annotation = raw.get(name, Any)
        try:
            holder = typing.cast(Any, type("_", (), {"__annotations__": {name: annotation}}))
            return typing.get_type_hints(holder, {**local, **names}, include_extras=True)[name]
        except Exception:  # for example a name imported for type checkers only
            return Any

    return find


@dataclass(frozen=True)
class _ForwardedArguments:
    """Arguments that a constructor passes to ``super().__init__`` in addition to its ``**kwargs``."""

    keywords: set[str]
    by_place: int
    variadic: bool = False


def _find_forwarded(init: Any) -> _ForwardedArguments | None:
    """Return the arguments passed with ``**kwargs`` to ``super().__init__``; None if they cannot be determined."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(init)))
    except (OSError, TypeError, SyntaxError):
        return None
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef) or function.args.kwarg is None:
        return None
    name, variadic = function.args.kwarg.arg, function.args.vararg
    uses = sum(isinstance(node, ast.Name) and node.id == name for node in ast.walk(function))
    calls = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "super().__init__"
        for keyword in node.keywords
        if keyword.arg is None and isinstance(keyword.value, ast.Name) and keyword.value.id == name
    ]
    if not calls or len(calls) != uses:
        return None
    starred = [argument.value for argument in calls[0].args if isinstance(argument, ast.Starred)]
    if any(variadic is None or ast.unparse(argument) != variadic.arg for argument in starred):
        return None
    return _ForwardedArguments(
        {keyword.arg for keyword in calls[0].keywords if keyword.arg is not None},
        len(calls[0].args) - len(starred),
        bool(starred),
    )


def described(target: Any) -> dict[str, str]:
    """Return the descriptions of a callable's arguments by name, from docstrings in Google or Sphinx style.

    For a class, the docstrings of ``__init__`` and of the base classes are also searched.
    """
    texts = [inspect.getdoc(target) or ""]
    if isinstance(target, type):
        texts.append(inspect.getdoc(vars(target).get("__init__")) or "")
        texts += [inspect.getdoc(base) or "" for base in target.__mro__[1:] if base is not object]
    descriptions: dict[str, str] = {}
    for text in texts:
        for name, words in _parse_arguments(text):
            descriptions.setdefault(name, words)
    return descriptions


_HEAD = r"^(Args|Arguments|Parameters|Attributes|Keyword Args):?\s*$"
_GOOGLE = r"^(\s+)([*\w, ]+?)\s*(?:\([^)]*\))?:\s+(.*)$"
_SPHINX = r"^\s*:param\s+(?:[\w.\[\]]+\s+)?(\w+):\s*(.*)$"


def _parse_arguments(text: str) -> list[tuple[str, str]]:
    entries: list[tuple[list[str], list[str]]] = []
    inside, indent = False, 0
    for line in text.splitlines():
        if sphinx := re.match(_SPHINX, line):
            entries.append(([sphinx[1]], [sphinx[2]]))
            continue
        if re.match(_HEAD, line):
            inside, indent = True, 0
            continue
        if not inside or not line.strip() or set(line.strip()) == {"-"}:
            continue
        depth = len(line) - len(line.lstrip())
        if depth == 0:
            inside = False
            continue
        google = re.match(_GOOGLE, line)
        if google and (not indent or depth == indent):
            indent = depth
            entries.append(([name.strip(" *") for name in google[2].split(",")], [google[3]]))
        elif entries and depth > indent:
            entries[-1][1].append(line.strip())
    return [(name, " ".join(words)) for names, words in entries for name in names]
