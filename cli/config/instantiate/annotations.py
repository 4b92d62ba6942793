"""Values checked against annotations and constructors, before anything is built."""

from __future__ import annotations

import collections.abc
import enum
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path as FilePath
from typing import Any, Literal, NotRequired, Required, Union

import torch

from ....common.messages import nearest
from ....trainer.core import REQUIRED, Argument, DataModule, Signature, TaskModule, signature
from ..values import ConfigError, Path, Value, dotted, hidden, plain
from ..yaml_loader import scalar
from . import catalog
from .annotation_words import (
    DICTS,
    LISTS,
    PATHS,
    PLAIN,
    WRITTEN,
    has_shape,
    shown_value,
    simplified,
    typed,
    unknown,
    words_for,
)
from .recipes import Named, Object, Plain, Recipe, Several

_USUAL = (
    "AdamW",
    "EarlyStopping",
    "CSVLogger",
    "CosineAnnealingLR",
)  # named first where any would do


class Checker:
    """Turns values into recipes, and collects what is wrong with them.

    Attributes:
        problems: what is wrong, one sentence or two each, in the order of the configuration.
        secrets: what is not to be written there, and what stands for it.
    """

    def __init__(self, secrets: Mapping[str, str] | None = None) -> None:
        self.problems: list[str] = []
        self.secrets = secrets or {}

    def report(self, value: Value, path: Path, words: str) -> None:
        """Note that something is wrong."""
        self.problems.append(hidden(f"{value.source}: {dotted(path)}{words}", self.secrets))

    def check(self, value: Value, annotation: Any, path: Path, lenient: bool = True) -> Recipe | None:
        """A recipe for ``value`` as ``annotation`` wants it; None if that can't be, which is reported.

        Args:
            value, annotation: see above.
            path: where the value stands.
            lenient: whether a number may be taken as text.
        """
        annotation = simplified(annotation)
        origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
        if annotation in (Any, object, inspect.Parameter.empty):
            return self._anything(value, path)
        if origin in (Union, types.UnionType):
            return self._union(value, inner, path)
        if origin is Literal:
            return self._literal(value, inner, path)
        if annotation in (None, *PLAIN):
            return self._plain(value, annotation, path, lenient)
        kind = origin or annotation
        if kind in LISTS or kind is tuple:
            return self._list(value, kind, inner, annotation, path)
        if kind in DICTS:
            return self._dict(value, inner, annotation, path)
        if kind is type:
            return self._named_class(value, inner[0] if inner else object, path)
        if kind is collections.abc.Callable:
            return self._callable(value, inner, annotation, path)
        if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
            return self._enum(value, annotation, path)
        if kind in WRITTEN:
            return self._written(value, kind, path)
        if typing.is_typeddict(kind):
            return self._typed_dict(value, kind, path)
        if isinstance(kind, type):
            return self.object(value, kind, path)
        return self._anything(value, path)

    # -- plain values --------------------------------------------------------------------------------------------

    def _wrong(self, value: Value, annotation: Any, path: Path, more: str = "") -> Any:
        """Report a value of another type; returns None, as there is no recipe then."""
        shown = shown_value(value, self.secrets)
        end = "" if more.endswith("?") else "."
        self.report(value, path, f"={shown} must be {words_for(annotation)}{'.' if not end else ''}{more}{end}")
        return None

    def _plain(self, value: Value, annotation: Any, path: Path, lenient: bool) -> Recipe | None:
        data, wanted = value.data, type(None) if annotation is None else annotation
        if type(data) is wanted:
            return Plain(value, data)
        if wanted is float and type(data) is int and abs(data) <= sys.float_info.max:
            return Plain(value, float(data))
        if wanted is str and lenient and value.text is not None and data is not None:
            return Plain(Value(value.text, value.source), value.text)
        return self._wrong(value, annotation, path, self._remedy(data, wanted))

    def _remedy(self, data: Any, wanted: Any) -> str:
        if wanted is str and isinstance(data, bool | int | float):
            return ": put it into quotes"
        if wanted is int and isinstance(data, float) and data.is_integer():
            return f": write {int(data)}"
        if wanted in (int, float) and isinstance(data, str) and type(_scalar(data)) in (int, wanted):
            return ": take it out of its quotes"
        return ""

    def _literal(self, value: Value, allowed: tuple[Any, ...], path: Path) -> Recipe | None:
        for one in allowed:
            if type(one) is type(value.data) and one == value.data:
                return Plain(value, one)
        for one in allowed:
            if isinstance(one, str) and one == value.text:
                return Plain(Value(one, value.source), one)
        hint = nearest(value.data, [one for one in allowed if isinstance(one, str)])
        return self._wrong(value, Literal[allowed], path, hint)

    def _enum(self, value: Value, kind: type[enum.Enum], path: Path) -> Recipe | None:
        for one in kind:
            if value.data == one.name or (value.data == one.value and type(value.data) is type(one.value)):
                return Plain(value, one)
        return self._literal(value, tuple(one.name for one in kind), path)

    def _written(self, value: Value, kind: Any, path: Path) -> Recipe | None:
        """What is made of text: paths, devices, number formats."""
        if isinstance(value.data, str):
            if kind in PATHS:
                return Plain(value, FilePath(value.data))
            if kind is torch.dtype and isinstance(found := getattr(torch, value.data.removeprefix("torch."), 0), kind):
                return Plain(value, found)
            if kind is torch.device:
                try:
                    return Plain(value, torch.device(value.data))
                except RuntimeError:
                    pass
        return self._wrong(value, kind, path)

    # -- collections ---------------------------------------------------------------------------------------------

    def _anything(self, value: Value, path: Path) -> Recipe | None:
        if isinstance(value.data, list):
            return self._items(value, list, [Any] * len(value.data), path)
        if isinstance(value.data, dict):
            return self.object(value, object, path) if "class" in value.data else self._dict(value, (), dict, path)
        return Plain(value, value.data)

    def _items(self, value: Value, kind: Callable[[Any], Any], inner: Iterable[Any], path: Path) -> Recipe | None:
        pairs = zip(value.data, inner, strict=True)
        found = [self.check(item, one, (*path, number)) for number, (item, one) in enumerate(pairs)]
        return Several(value, kind, [one for one in found if one is not None]) if None not in found else None

    def _list(self, value: Value, kind: Any, inner: tuple[Any, ...], annotation: Any, path: Path) -> Recipe | None:
        if not isinstance(value.data, list):
            return self._wrong(value, annotation, path)
        if kind is tuple and inner and inner[-1] is not Ellipsis:
            if len(inner) != len(value.data):
                return self._wrong(value, annotation, path)
            return self._items(value, tuple, inner, path)
        return self._items(value, LISTS.get(kind, tuple), [inner[0] if inner else Any] * len(value.data), path)

    def _dict(self, value: Value, inner: tuple[Any, ...], annotation: Any, path: Path) -> Recipe | None:
        if not isinstance(value.data, dict):
            return self._wrong(value, annotation, path)
        keys, kind = inner if len(inner) == 2 else (Any, Any)
        found: dict[Any, Recipe | None] = {}
        for key, item in value.data.items():
            name = Checker().check(Value(key, item.source, str(key)), keys, path)
            if name is None:
                self.report(item, (*path, key), f": the key {key!r} must be {words_for(keys)}.")
            else:
                found[name.make()] = self.check(item, kind, (*path, key))
        if len(found) < len(value.data) or None in found.values():
            return None
        return Named(value, {key: one for key, one in found.items() if one is not None})

    def _typed_dict(self, value: Value, kind: Any, path: Path) -> Recipe | None:
        if not isinstance(value.data, dict):
            return self._wrong(value, kind, path)
        takes: dict[str, Argument] = {}
        for name, hint in typing.get_type_hints(kind, include_extras=True).items():
            said = typing.get_origin(hint)  # __required_keys__ misses it where annotations are strings
            needed = said is Required or (name in kind.__required_keys__ and said is not NotRequired)
            inner = typing.get_args(hint)[0] if said in (Required, NotRequired) else hint
            takes[name] = Argument(name, inner, REQUIRED if needed else None)
        found = self.arguments(value, value.data, Signature(takes), kind.__name__, path)
        return None if found is None else Named(value, found)

    def _union(self, value: Value, members: tuple[Any, ...], path: Path) -> Recipe | None:
        """The member that the value is of; else that which it has the shape of, whose problems are then told."""
        # A number is taken as text where nothing in the union is a number.
        numbers = any(one in (int, float, bool) for one in members)
        for strict in (True,) if numbers else (True, False):
            for member in sorted(members, key=lambda one: one is not type(value.data)):
                trial = Checker(self.secrets)
                if (found := trial.check(value, member, path, lenient=not strict)) is not None:
                    return found
        like = [member for member in members if has_shape(value, simplified(member))]
        if len(like) == 1:
            return self.check(value, like[0], path)
        remedies = (self._remedy(value.data, member) for member in members)
        return self._wrong(value, Union[members], path, next(filter(None, remedies), ""))  # noqa: UP007

    # -- classes -------------------------------------------------------------------------------------------------

    def _named_class(self, value: Value, base: Any, path: Path) -> Recipe | None:
        found = self._find(value, base, path) if isinstance(value.data, str) else self._wrong(value, type[base], path)
        if found is None:
            return None
        if not isinstance(found, type) or (isinstance(base, type) and not issubclass(found, base)):
            return self._wrong(value, type[base], path)
        return Plain(value, found)

    def _callable(self, value: Value, inner: tuple[Any, ...], annotation: Any, path: Path) -> Recipe | None:
        returns = simplified(inner[-1]) if inner else Any
        if isinstance(value.data, str):
            found = self._find(value, returns if isinstance(returns, type) else object, path)
            if found is None or callable(found):
                return None if found is None else Plain(value, found)
        elif isinstance(value.data, dict) and "class" in value.data:
            target = self._find(value.data["class"], returns if isinstance(returns, type) else object, path)
            if target is None:
                return None
            later = isinstance(target, type) and isinstance(returns, type) and issubclass(target, returns)
            return self._built(value, target, str(value.data["class"].data), path, object, later=later)
        return self._wrong(value, annotation, path)

    def object(
        self, value: Value, base: Any, path: Path, supplied: Iterable[str] = (), target: Any = None
    ) -> Object | None:
        """A recipe for an object.

        Args:
            value: ``{class: ..., argument: ...}``, or the class's name; the class may be left out where it is known.
            base: what the class must extend.
            path: where the value stands.
            supplied: arguments that are passed when it is built.
            target: the class where none is named.
        """
        data = value.data
        named = (
            data
            if isinstance(data, str)
            else data["class"].data
            if isinstance(data, dict) and "class" in data
            else None
        )
        if named is not None:
            at = data["class"] if isinstance(data, dict) else value
            found = (
                self._find(at, base, path) if isinstance(named, str) else self._wrong(at, type[base], (*path, "class"))
            )
            if found is None or not self._fits(at, found, base, path):
                return None
            return self._built(value, found, named, path, base, supplied)
        if isinstance(data, dict) and (target is not None or not catalog.is_shelved(base)):
            return self._built(value, target or base, "", path, base, supplied)
        own = base in (TaskModule, DataModule)  # of which the user's are wanted, not whichever happens to be loaded
        short = () if own else catalog.short_names(base)
        example = next((name for name in (*_USUAL, *sorted(short)) if name in short), "my_module.MyClass")
        if isinstance(data, dict):
            self.report(value, path, f" names no class: add 'class: {example}', say, to its keys.")
        else:
            self.report(
                value,
                path,
                f"={shown_value(value, self.secrets)} must be {words_for(base)}, as {{class: {example}, ...}}.",
            )
        return None

    def _find(self, value: Value, base: Any, path: Path) -> Any:
        try:
            return catalog.find(str(value.data), base)
        except ConfigError as error:
            self.report(value, path, f": {error}")
            return None

    def _fits(self, value: Value, found: Any, base: Any, path: Path) -> bool:
        if not callable(found):
            self.report(value, path, f": {value.data!r} is a {type(found).__name__}, not a class.")
            return False
        if isinstance(found, type) and inspect.isabstract(found):
            missing = ", ".join(sorted(getattr(found, "__abstractmethods__", ())))
            self.report(value, path, f": {value.data!r} is abstract; extend it and write {missing}.")
            return False
        protocol = getattr(base, "_is_protocol", False)
        if isinstance(found, type) and isinstance(base, type) and not protocol and not issubclass(found, base):
            words = f": {value.data!r} must be a {base.__name__}, which {found.__name__} does not extend."
            self.report(value, path, words + catalog.own(found.__name__, base))
            return False
        return True

    def _built(
        self,
        value: Value,
        target: Any,
        name: str,
        path: Path,
        base: Any,
        supplied: Iterable[str] = (),
        later: bool = False,
    ) -> Object | None:
        """A recipe that calls ``target`` with the keys of the value."""
        takes = signature(target)
        given = (
            {key: item for key, item in value.data.items() if key != "class"} if isinstance(value.data, dict) else {}
        )
        shown = name.rpartition(".")[2] or getattr(target, "__name__", str(target))
        arguments = self.arguments(value, given, takes, shown, path, supplied, partly=later)
        if arguments is None:
            return None
        checked = base if not isinstance(target, type) else object
        return Object(value, name, target, path, takes, arguments, checked, later)

    def arguments(
        self,
        value: Value,
        given: Mapping[Any, Value],
        takes: Signature,
        name: str,
        path: Path,
        supplied: Iterable[str] = (),
        partly: bool = False,
    ) -> dict[str, Recipe] | None:
        """Recipes for the arguments of one call; None if one is wrong, unknown or missing, which is reported."""
        before = len(self.problems)
        supplied = set(supplied)
        found: dict[str, Recipe | None] = {}
        for key, item in given.items():
            argument = takes.arguments.get(key)
            if key in supplied and argument is not None:
                self.report(item, (*path, key), f": {name} gets its {key!r} from the run; take it out.")
            elif argument is not None:
                found[key] = self._argument(item, argument, (*path, key), supplied)
            elif takes.open and isinstance(key, str):
                found[key] = self._anything(item, (*path, key))
            else:
                self.report(
                    item, (*path, key), unknown(name, key, [one for one in takes.arguments if one not in supplied])
                )
        for argument in takes.arguments.values():
            needed = argument.default is REQUIRED and argument.name not in supplied and not partly
            if needed and argument.name not in given:
                self.report(value, path, f": {name} needs {argument.name!r}{typed(argument)}, which is not given.")
        if len(self.problems) > before:
            return None
        return {key: one for key, one in found.items() if one is not None}

    def _argument(self, value: Value, argument: Argument, path: Path, supplied: set[str]) -> Recipe | None:
        default = argument.default
        if argument.several:
            return self._list(value, list, (argument.type,), tuple, path)
        if default is not REQUIRED and type(default) in (*PLAIN, tuple) and argument.type is not Any:
            same = tuple(plain(value)) if isinstance(default, tuple) and isinstance(value.data, list) else value.data
            if type(same) is type(default) and same == default:
                return Plain(value, default)  # as of `x: int = None`, whose default is not what it is said to be
        if argument.type is Any and isinstance(default, tuple) and isinstance(value.data, list):
            return self._items(value, tuple, [Any] * len(value.data), path)
        if supplied and (nested := self._nested(value, argument.type, path, supplied)) is not None:
            return nested
        return self.check(value, argument.type, path)

    def _nested(self, value: Value, annotation: Any, path: Path, supplied: set[str]) -> Recipe | None:
        """Schedulers within a scheduler: they get the optimizer too."""
        inner = typing.get_args(annotation)
        if not (isinstance(value.data, list) and inner and isinstance(inner[0], type)):
            return None
        if not all(isinstance(item.data, dict | str) for item in value.data):
            return None
        found = [self.object(item, inner[0], (*path, number), supplied) for number, item in enumerate(value.data)]
        return Several(value, list, [one for one in found if one is not None])


def _scalar(text: str) -> Any:
    try:
        return scalar(text)
    except ValueError:  # a number of more digits than Python reads
        return text
