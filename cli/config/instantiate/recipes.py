"""What was checked and can be built: plain values, collections, objects."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ....trainer.core import REQUIRED, Signature
from ..values import DEFAULT, ConfigError, Path, Value, dotted, value_of

NOTHING: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Recipe:
    """Something that can be built, over and over.

    Attributes:
        value: what the configuration says.
    """

    value: Value

    def make(self, supplied: Mapping[str, Any] = NOTHING) -> Any:
        """Build it.

        Args:
            supplied: arguments that are in no configuration (a model's parameters), for all objects that take them.
        """
        raise NotImplementedError

    def resolved(self) -> Value:
        """The value with all defaults written out."""
        return self.value


@dataclass(frozen=True)
class Plain(Recipe):
    """A value that is there already.

    Attributes:
        made: what it becomes.
    """

    made: Any

    def make(self, supplied: Mapping[str, Any] = NOTHING) -> Any:
        return self.made


@dataclass(frozen=True)
class Several(Recipe):
    """A list, tuple or set.

    Attributes:
        kind: which.
        items: what is in it.
    """

    kind: Callable[[Any], Any]
    items: list[Recipe]

    def make(self, supplied: Mapping[str, Any] = NOTHING) -> Any:
        return self.kind([item.make(supplied) for item in self.items])

    def resolved(self) -> Value:
        return Value([item.resolved() for item in self.items], self.value.source)


@dataclass(frozen=True)
class Named(Recipe):
    """A dict.

    Attributes:
        items: what is in it.
    """

    items: dict[Any, Recipe]

    def make(self, supplied: Mapping[str, Any] = NOTHING) -> Any:
        return {key: item.make(supplied) for key, item in self.items.items()}

    def resolved(self) -> Value:
        items = zip(self.value.data, self.items.values(), strict=True)  # keys as written: made ones may be paths
        return Value({key: item.resolved() for key, item in items}, self.value.source)


@dataclass(frozen=True)
class Object(Recipe):
    """An object of a class, or what a function returns.

    Attributes:
        name: how the configuration names the class; empty where it doesn't need to.
        target: the class or function.
        path: where it stands.
        signature: what it takes.
        arguments: what it is given.
        base: what a function must return.
        later: whether to build a function that calls the target, rather than to call it.
    """

    name: str
    target: Callable[..., Any]
    path: Path
    signature: Signature
    arguments: dict[str, Recipe] = field(default_factory=dict)
    base: Any = object
    later: bool = False

    def make(self, supplied: Mapping[str, Any] = NOTHING) -> Any:
        given = {name: recipe.make(supplied) for name, recipe in self.arguments.items()}
        for name, value in supplied.items():
            if name in self.signature.arguments:
                given.setdefault(name, value)
        by_place = self._by_place(given)
        if self.later:
            return partial(self.target, *by_place, **given)
        try:
            made = self.target(*by_place, **given)
        except Exception as error:
            raise self._explained(error) from error
        if isinstance(self.base, type) and not isinstance(made, self.base):
            raise ConfigError(
                f"{self.value.source}: {dotted(self.path)}: {self.name} returned a {type(made).__name__}, which is no "
                f"{self.base.__name__}."
            )
        return made

    def _by_place(self, given: dict[str, Any]) -> list[Any]:
        """What has to be passed by position, taken out of ``given``: also what stands before ``*args``, if given."""
        several = next((one.name for one in self.signature.arguments.values() if one.several), None)
        takes = self.signature
        found: list[Any] = []
        for name in takes.positional if several in given else takes.positional[: takes.by_place_only]:
            if name not in given and takes.arguments[name].default is REQUIRED:
                break
            found.append(given.pop(name, takes.arguments[name].default))
        return found + (given.pop(several) if several in given else [])

    def _explained(self, error: Exception) -> Exception:
        """What went wrong, with the place: an error of ours as one of the configuration, any other as it is."""
        name = self.name or getattr(self.target, "__name__", str(self.target))
        home = getattr(self.target, "__module__", "") or ""
        if isinstance(error, ConfigError):
            return error
        if home.startswith(("treadle.", "torch.")) and isinstance(error, ValueError | TypeError):
            return ConfigError(f"{self.value.source}: {dotted(self.path)}: {name}: {error}")
        error.add_note(f"while {dotted(self.path)} was built: {name}, {self.value.source}")
        return error

    def resolved(self) -> Value:
        """Arguments of the class with its defaults; those that are no plain data are left to it."""
        inside = {"class": Value(self.name, _source_of_class(self.value))} if self.name else {}
        for name, argument in self.signature.arguments.items():
            if name in self.arguments:
                inside[name] = self.arguments[name].resolved()
            elif argument.default is not REQUIRED and not argument.several:
                inside[name] = default_value(argument.default)
        inside |= {name: recipe.resolved() for name, recipe in self.arguments.items() if name not in inside}
        return Value(inside, self.value.source)


@dataclass(frozen=True)
class Opaque:
    """A default that can't be written as plain data.

    Attributes:
        words: what it looks like in Python.
    """

    words: str


def default_value(default: Any) -> Value:
    """A default as a value; `Opaque` where it is no plain data."""
    try:
        return value_of(_as_data(default), DEFAULT)
    except TypeError:
        return Value(Opaque(_named(default)), DEFAULT)


def _named(default: Any) -> str:
    """A default in words, as it is written in Python."""
    name = getattr(default, "__qualname__", None)
    if name is not None:
        home = getattr(default, "__module__", None)
        return f"{home}.{name}" if home not in (None, "builtins") else str(name)
    return " ".join((default.name if isinstance(default, enum.Enum) else repr(default)).split())[:80]


def _as_data(default: Any) -> Any:
    if default is None or type(default) in (bool, int, float, str):
        return default
    if type(default) in (list, tuple):
        return [_as_data(item) for item in default]
    if type(default) is dict and all(type(key) in (str, int) for key in default):
        return {key: _as_data(item) for key, item in default.items()}
    raise TypeError(type(default))


def _source_of_class(value: Value) -> str:
    if isinstance(value.data, dict) and "class" in value.data:
        return str(value.data["class"].source)
    return value.source
