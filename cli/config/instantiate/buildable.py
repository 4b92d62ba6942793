"""Recipes that build checked values: plain values, collections and objects."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ....common.messages import name_type
from ....trainer.core import REQUIRED, Signature
from ..values import DEFAULT, ConfigError, Path, Value, format_path, make_value

NOTHING: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Recipe:
    """Checked value that can be built repeatedly."""

    value: Value

    def make(self, supplied: Mapping[str, Any] = NOTHING) -> Any:
        """Build the value.

        Each object receives the ``supplied`` arguments that its signature accepts and the configuration does not set.
        """
        raise NotImplementedError

    def resolve_defaults(self) -> Value:
        """Return the configuration's value, with the defaults of the arguments that it omits."""
        return self.value


@dataclass(frozen=True)
class PlainRecipe(Recipe):
    """Recipe of a value that needs no construction."""

    built_value: Any

    def make(self, supplied: Mapping[str, Any] = NOTHING) -> Any:
        """Return ``built_value``."""
        return self.built_value


@dataclass(frozen=True)
class CollectionRecipe(Recipe):
    """Recipe of a list, tuple, set or frozenset."""

    kind: Callable[[Any], Any]
    items: list[Recipe]

    def make(self, supplied: Mapping[str, Any] = NOTHING) -> Any:
        """Build the items and return the collection."""
        return self.kind([item.make(supplied) for item in self.items])

    def resolve_defaults(self) -> Value:
        """Return the items as a list, with the defaults of the arguments that they omit."""
        return Value([item.resolve_defaults() for item in self.items], self.value.source)


@dataclass(frozen=True)
class MappingRecipe(Recipe):
    """Recipe of a dict."""

    items: dict[Any, Recipe]

    def make(self, supplied: Mapping[str, Any] = NOTHING) -> Any:
        """Build the values and return the dict."""
        return {key: item.make(supplied) for key, item in self.items.items()}

    def resolve_defaults(self) -> Value:
        """Return the entries, with the defaults of the arguments that they omit."""
        # Keys as written, because built ones may be paths.
        items = zip(self.value.data, self.items.values(), strict=True)
        return Value({key: item.resolve_defaults() for key, item in items}, self.value.source)


@dataclass(frozen=True)
class ObjectRecipe(Recipe):
    """Recipe of an object, or of a function's return value.

    Attributes:
        name: The name of the class or function in the configuration; empty if the configuration does not name one.
        base: Required class of a function's return value.
        later: Whether to build a ``functools.partial`` of the target instead of calling it.
    """

    name: str
    target: Callable[..., Any]
    path: Path
    signature: Signature
    arguments: dict[str, Recipe] = field(default_factory=dict)
    base: Any = object
    later: bool = False

    def make(self, supplied: Mapping[str, Any] = NOTHING) -> Any:
        """Call ``target`` and return the result; return a ``functools.partial`` if ``later`` is set."""
        arguments = {name: recipe.make(supplied) for name, recipe in self.arguments.items()}
        for name, value in supplied.items():
            if name in self.signature.arguments:
                arguments.setdefault(name, value)
        positional = self._take_positional(arguments)
        if self.later:
            return partial(self.target, *positional, **arguments)
        try:
            built_object = self.target(*positional, **arguments)
        except Exception as error:
            raise self._explain_error(error) from error
        if isinstance(self.base, type) and not isinstance(built_object, self.base):
            raise ConfigError(
                f"{self.value.source}: {format_path(self.path)}: {self.name} returned {name_type(built_object)}, "
                f"which is not an instance of {self.base.__name__}."
            )
        return built_object

    def _take_positional(self, arguments: dict[str, Any]) -> list[Any]:
        """Remove the positional arguments from ``arguments`` and return them."""
        variadic_name = next(
            (argument.name for argument in self.signature.arguments.values() if argument.several), None
        )
        takes = self.signature
        positional: list[Any] = []
        for name in takes.positional if variadic_name in arguments else takes.positional[: takes.by_place_only]:
            if name not in arguments and takes.arguments[name].default is REQUIRED:
                break
            positional.append(arguments.pop(name, takes.arguments[name].default))
        return positional + (arguments.pop(variadic_name) if variadic_name in arguments else [])

    def _explain_error(self, error: Exception) -> Exception:
        """Convert a ValueError or TypeError of a Treadle or torch class to a ConfigError that names the key.

        A ConfigError is returned unchanged, and any other error with a note.
        """
        name = self.name or getattr(self.target, "__name__", str(self.target))
        home = getattr(self.target, "__module__", "") or ""
        if isinstance(error, ConfigError):
            return error
        if home.startswith(("treadle.", "torch.")) and isinstance(error, ValueError | TypeError):
            return ConfigError(f"{self.value.source}: {format_path(self.path)}: {name}: {error}")
        error.add_note(f"while building {format_path(self.path)}: {name}, {self.value.source}")
        return error

    def resolve_defaults(self) -> Value:
        """Return the class and its arguments with defaults; defaults that are not plain data are `Opaque`."""
        entries = {"class": Value(self.name, _find_class_source(self.value))} if self.name else {}
        for name, argument in self.signature.arguments.items():
            if name in self.arguments:
                entries[name] = self.arguments[name].resolve_defaults()
            elif argument.default is not REQUIRED and not argument.several:
                entries[name] = make_default_value(argument.default)
        entries |= {name: recipe.resolve_defaults() for name, recipe in self.arguments.items() if name not in entries}
        return Value(entries, self.value.source)


@dataclass(frozen=True)
class Opaque:
    """Default that cannot be written as plain data, described by its name or its ``repr``."""

    words: str


def make_default_value(default: Any) -> Value:
    """Convert a default to a value, which is `Opaque` if the default is not plain data."""
    try:
        return make_value(_convert_to_data(default), DEFAULT)
    except TypeError:
        return Value(Opaque(_describe_default(default)), DEFAULT)


def _describe_default(default: Any) -> str:
    name = getattr(default, "__qualname__", None)
    if name is not None:
        home = getattr(default, "__module__", None)
        return f"{home}.{name}" if home not in (None, "builtins") else str(name)
    return " ".join((default.name if isinstance(default, enum.Enum) else repr(default)).split())[:80]


def _convert_to_data(default: Any) -> Any:
    if default is None or type(default) in (bool, int, float, str):
        return default
    if type(default) in (list, tuple):
        return [_convert_to_data(item) for item in default]
    if type(default) is dict and all(type(key) in (str, int) for key in default):
        return {key: _convert_to_data(item) for key, item in default.items()}
    raise TypeError(type(default))


def _find_class_source(value: Value) -> str:
    if isinstance(value.data, dict) and "class" in value.data:
        return str(value.data["class"].source)
    return value.source
