"""Checks of settings by LightningCLI's rules, and conversion of the checked values to namespaces."""

from __future__ import annotations

import collections.abc
import dataclasses
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal, Union

from ...trainer.core import REQUIRED, Argument, Signature
from ..config import ConfigError, Value, expand_class_name
from ..config.instantiate import (
    PLAIN,
    Checker,
    CollectionRecipe,
    MappingRecipe,
    ObjectRecipe,
    PlainRecipe,
    Recipe,
    catalog,
    simplify,
)
from .namespace import Namespace
from .settings import (
    ClassPath,
    Path,
    describe_import_path,
    find_class,
    is_lazy,
    make_default,
    merge,
    read_named_file,
    restore_class_path,
    translate_class_path,
)

_DICTS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_YES_AND_NO = {"yes": True, "no": False}


class SettingsChecker(Checker):
    """Checker that accepts objects, merges settings into defaults and handles arguments that links supply.

    Attributes:
        awaited: Paths whose values come from links that are applied when the objects are built.
        partial: Whether required arguments may be missing, as in a configuration that is only printed.
    """

    awaited: frozenset[Path] = frozenset()
    partial = False

    def make_trial(self) -> SettingsChecker:
        """Return a new checker with the same attributes and no problems."""
        trial = SettingsChecker(self.secrets)
        trial.awaited, trial.partial = self.awaited, self.partial
        return trial

    def check(self, value: Value, annotation: Any, path: Path, lenient: bool = True) -> Recipe | None:
        """Return a recipe for a value that fits an annotation. Report a problem and return None if it does not fit.

        In addition to the values that `Checker.check` accepts, ``yes`` and ``no`` are booleans, an object is accepted
        if `fits` returns True, and the path of a settings file may replace a list, a dict or the settings of an object.
        """
        annotation = simplify(annotation)
        kind = typing.get_origin(annotation) or annotation
        if not isinstance(value.data, (*PLAIN, list, dict)):
            if fits(value.data, annotation):
                return PlainRecipe(value, value.data)
            return self._report_wrong_type(value, annotation, path)
        if annotation is bool and isinstance(value.data, str) and value.data.lower() in _YES_AND_NO:
            return PlainRecipe(value, _YES_AND_NO[value.data.lower()])
        if isinstance(value.data, dict):
            written = next((key for key in value.data if key == "class"), None)
            if kind in _DICTS and isinstance(written, ClassPath):
                return super().check(restore_class_path(value), annotation, path, lenient)
        elif (isinstance(value.data, str) and kind in (list, dict)) or dataclasses.is_dataclass(kind):
            value = read_named_file(value)
        return super().check(value, annotation, path, lenient)

    def _check_union(self, value: Value, members: tuple[Any, ...], path: Path) -> Recipe | None:
        """Return a recipe for a member of a union. A class's short name takes precedence over text."""
        for member in map(simplify, members) if isinstance(value.data, str) else ():
            if (
                isinstance(member, type)
                and catalog.is_shelved(member)
                and value.data in catalog.list_short_names(member)
            ):
                return self.check_object(value, member, path)
        return super()._check_union(value, members, path)

    def check_object(
        self, value: Value, base: Any, path: Path, supplied: Iterable[str] = (), target: Any = None
    ) -> ObjectRecipe | None:
        """Return a recipe for an object, whose settings may be in a separate file.

        Report a problem and return None if the object cannot be built.
        """
        return super().check_object(read_named_file(value), base, path, supplied, target)

    def check_arguments(
        self,
        value: Value,
        argument_values: Mapping[Any, Value],
        takes: Signature,
        name: str,
        path: Path,
        supplied: Iterable[str] = (),
        partly: bool = False,
    ) -> dict[str, Recipe] | None:
        """Return recipes for the arguments of a call, or report problems and return None.

        Arguments that links supply later may be missing.
        """
        awaited = {place[-1] for place in self.awaited if place[:-1] == path}
        takes = replace(
            takes, arguments={key: argument for key, argument in takes.arguments.items() if key not in awaited}
        )
        return super().check_arguments(value, argument_values, takes, name, path, supplied, partly or self.partial)

    def _find_target(self, value: Value, base: Any, path: Path) -> Any:
        """Return the class or function that a value names, also by a path in Lightning's packages."""
        if isinstance(base, type) and value.data == base.__name__ and not catalog.is_shelved(base):
            return base
        return super()._find_target(replace(value, data=translate_class_path(str(value.data))), base, path)

    def _check_callable(self, value: Value, inner: tuple[Any, ...], annotation: Any, path: Path) -> Recipe | None:
        """Return a recipe for a callable, which may be a class that extends the annotated return type."""
        expanded = expand_class_name(value)
        returns = simplify(inner[-1]) if inner else Any
        kinds = tuple(kind for kind in typing.get_args(returns) or (returns,) if isinstance(kind, type))
        named = expanded.data.get("class") if isinstance(expanded.data, dict) else None
        target = None if named is None else find_class(named.data)
        if named is not None and isinstance(target, type) and kinds and issubclass(target, kinds):
            name = str(named.data)
            return self._build_recipe(expanded, target, name, path, object, later=True)
        return super()._check_callable(value, inner, annotation, path)

    def _check_argument(self, value: Value, argument: Argument, path: Path, supplied: set[str]) -> Recipe | None:
        default = make_default(argument) if dataclasses.is_dataclass(argument.default) else None
        if default is not None and isinstance(value.data, dict) and "class" not in value.data:
            value = merge(default, value)
        return super()._check_argument(value, argument, path, supplied)


def fits(item: Any, annotation: Any) -> bool:
    """Return whether an object matches an annotation.

    The arguments of generic types, as in ``list[int]``, are ignored.
    """
    annotation = simplify(annotation)
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any or annotation is object:
        return True
    if origin in (Union, types.UnionType):
        return any(fits(item, member) for member in inner)
    if origin is Literal:
        return item in inner
    kind = origin or annotation
    if kind is collections.abc.Callable:
        return callable(item)
    return not isinstance(kind, type) or isinstance(item, kind)


def make_config(recipe: Recipe) -> Any:
    """Convert a checked value to a configuration, in which the settings of objects are namespaces."""
    if isinstance(recipe, CollectionRecipe):
        return recipe.kind([make_config(item) for item in recipe.items])
    if isinstance(recipe, MappingRecipe):
        return {key: make_config(item) for key, item in recipe.items.items()}
    if not isinstance(recipe, ObjectRecipe):
        return recipe.built_value if isinstance(recipe, PlainRecipe) else recipe.make()
    arguments = Namespace()
    for name, argument in recipe.signature.arguments.items():
        if name in recipe.arguments:
            vars(arguments)[name] = make_config(recipe.arguments[name])
        elif argument.default is not REQUIRED and not argument.several:
            vars(arguments)[name] = make_default_config(argument.default)
    for name, inner in recipe.arguments.items():
        if name not in recipe.signature.arguments:
            vars(arguments)[name] = make_config(inner)
    return Namespace(class_path=describe_import_path(recipe.target), init_args=arguments) if recipe.name else arguments


def make_default_config(default: Any) -> Any:
    """Return a default for a configuration: a dataclass or lazy instance as a namespace, a list or dict as a copy."""
    if dataclasses.is_dataclass(default) and not isinstance(default, type):
        fields = {field.name: getattr(default, field.name) for field in dataclasses.fields(default) if field.init}
        return Namespace({name: make_default_config(item) for name, item in fields.items()})
    if is_lazy(default):
        return Namespace(default.lazy_get_init_data().as_dict())
    if type(default) in (list, dict):
        return default.copy()
    return default


def supply(recipe: Recipe, path: Path, value: Any) -> Recipe:
    """Return a recipe in which an argument, possibly of a nested object, has a new value.

    With an empty path, the value replaces the object.
    """
    if not path:
        return PlainRecipe(Value(value, "linked"), value)
    if not isinstance(recipe, ObjectRecipe):
        return recipe
    name = str(path[0])
    if len(path) == 1 and name not in recipe.signature.arguments and not recipe.signature.open:
        return recipe  # the class does not accept the argument
    inner = recipe.arguments.get(name, recipe) if len(path) > 1 else recipe
    return replace(recipe, arguments={**recipe.arguments, name: supply(inner, path[1:], value)})


def make_arguments(recipe: ObjectRecipe) -> Namespace:
    """Return the configuration of an object that is built later, with the objects in its arguments already built."""
    config = make_config(recipe)
    arguments = config.init_args if recipe.name else config
    for name, argument in recipe.arguments.items():
        vars(arguments)[name] = argument.make()
    return config


def look_up(configs: Namespace, key: str) -> Any:
    """Return the value of a link's source, such as an option, an argument of a class, or an attribute of an object."""
    value: Any = configs
    for part in key.split("."):
        entries = vars(value) if isinstance(value, Namespace) else value
        if isinstance(entries, dict) and part not in entries and isinstance(entries.get("init_args"), Namespace):
            entries = vars(entries["init_args"])
        if isinstance(entries, dict) and part in entries:
            value = entries[part]
        elif not isinstance(value, Namespace | dict) and hasattr(value, part):
            value = getattr(value, part)
        else:
            holder = "the configuration" if isinstance(value, Namespace | dict) else type(value).__name__
            raise ConfigError(
                f"the link from --{key} can't be applied, because {holder} has no {part!r}. Correct the source in "
                "link_arguments."
            )
    return value
