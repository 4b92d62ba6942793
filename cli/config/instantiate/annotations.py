"""Checks of values against annotations and constructors."""

from __future__ import annotations

import collections.abc
import enum
import inspect
import os
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path as FilePath
from typing import Any, Literal, NotRequired, Required, Union

import torch

from ....common.messages import add_article, format_count, join_words, name_type, nearest
from ....trainer.core import REQUIRED, Argument, DataModule, Signature, TaskModule, signature
from ..values import ConfigError, Path, Value, format_path, hide_secrets, to_plain
from ..yaml_loader import parse_scalar
from . import catalog
from .buildable import CollectionRecipe, MappingRecipe, ObjectRecipe, PlainRecipe, Recipe

LISTS = {
    list: list,
    set: set,
    frozenset: frozenset,
    collections.abc.Sequence: list,
    collections.abc.MutableSequence: list,
    collections.abc.Collection: list,
    collections.abc.Iterable: list,
    collections.abc.Set: set,
}
DICTS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
PLAIN = (type(None), bool, int, float, str)
PATHS = (FilePath, os.PathLike)
_NUMBERS: dict[Any, str] = {int: "an integer", float: "a number"}
WRITTEN = (*PATHS, torch.dtype, torch.device)
"""Types that are written as one word of text."""


def describe_unknown(name: str, key: Any, valid_names: list[str]) -> str:
    """Return the error message for an unknown argument, with the closest valid name if one is close."""
    hint = nearest(key, valid_names)
    if not valid_names:
        return f": {name} has no argument {key!r}. It takes no arguments from the configuration."
    names = "argument is" if len(valid_names) == 1 else "arguments are"
    has = f" Its {names} {', '.join(valid_names)}." if len(valid_names) <= 12 else ""
    return f": {name} has no argument {key!r}.{hint}{has}"


def describe_type(argument: Argument) -> str:
    """Return an argument's annotation in parentheses; an empty string without an annotation."""
    return "" if argument.type is Any else f" ({describe_annotation(argument.type)})"


def simplify(annotation: Any) -> Any:
    """Unwrap ``Annotated`` and ``NewType``, and replace a type variable by its bound or constraints (else ``Any``)."""
    while True:
        if typing.get_origin(annotation) is typing.Annotated:
            annotation = typing.get_args(annotation)[0]
        elif isinstance(annotation, typing.NewType):
            annotation = annotation.__supertype__
        elif isinstance(annotation, typing.TypeVar):
            bound = Union[annotation.__constraints__] if annotation.__constraints__ else Any  # noqa: UP007
            annotation = annotation.__bound__ or bound
        else:
            return annotation


def has_shape(value: Value, member: Any) -> bool:
    """Return whether the kind of a value (list, mapping, text) fits a member of a union."""
    kind = typing.get_origin(member) or member
    if isinstance(value.data, list):
        return kind in LISTS or kind is tuple
    if isinstance(value.data, dict):
        kinds = (*PLAIN, *LISTS, *WRITTEN, tuple, type, collections.abc.Callable)
        return isinstance(kind, type) and kind not in kinds and not issubclass(kind, enum.Enum)
    if isinstance(value.data, str):
        return kind is Literal or (isinstance(kind, type) and catalog.is_shelved(kind))
    return False


def describe_annotation(annotation: Any, article: bool = False) -> str:
    """Return an annotation in words: ``int or null``, ``a list of float``, ``'min' or 'max'``.

    ``article`` adds articles for use in a sentence, as in ``an integer or null``.
    """
    annotation = simplify(annotation)
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in (None, type(None)):
        return "null"
    if annotation in (Any, object, inspect.Parameter.empty):
        return "anything"
    if origin in (Union, types.UnionType):
        members = sorted(inner, key=lambda member: member is type(None))
        return join_words(list(dict.fromkeys(describe_annotation(member, article) for member in members)))
    if origin is Literal:
        return join_words([repr(member) for member in inner])
    kind = origin or annotation
    if kind in LISTS or (kind is tuple and (not inner or inner[-1] is Ellipsis)):
        return f"a list of {describe_annotation(inner[0])}" if inner and inner[0] is not Any else "a list"
    if kind is tuple:
        items = ", ".join(describe_annotation(item) for item in inner)
        return f"a list of {format_count(len(inner), 'value')}: {items}"
    if kind in DICTS:
        return (
            f"a mapping of {describe_annotation(inner[0])} to {describe_annotation(inner[1])}"
            if len(inner) == 2
            else "a mapping"
        )
    if kind is type:
        return (
            f"the name of a class that extends {inner[0].__name__}"
            if inner and isinstance(inner[0], type)
            else "a class"
        )
    if kind is collections.abc.Callable:
        return "the import path of a function"
    if kind in PATHS:
        return "a path"
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return join_words([repr(member.name) for member in kind])
    if isinstance(kind, type):
        if article and kind in _NUMBERS:
            return _NUMBERS[kind]
        words = {"str": "text", "bool": "true or false"}
        return words.get(kind.__name__) or (add_article(kind.__name__) if article else kind.__name__)
    return str(annotation).replace("typing.", "")


def format_value(value: Value, secrets: Mapping[str, str]) -> str:
    """Format a value for an error message: without secrets and in at most 100 characters."""
    data = to_plain(value)
    if data is None or isinstance(data, bool):
        return {None: "null", True: "true", False: "false"}[data]
    return f"{hide_secrets(repr(data), secrets):.100}"


_USUAL = (
    "AdamW",
    "EarlyStopping",
    "CSVLogger",
    "CosineAnnealingLR",
)  # these are named first if any would fit


class Checker:
    """Checker that converts configuration values to recipes and collects problems.

    Attributes:
        secrets: Mapping from each secret to the reference that replaces it in messages.
    """

    def __init__(self, secrets: Mapping[str, str] | None = None) -> None:
        self.problems: list[str] = []
        self.secrets = secrets or {}

    def report(self, value: Value, path: Path, words: str) -> None:
        """Add an error message, which begins with the value's source and path, to ``problems``."""
        self.problems.append(hide_secrets(f"{value.source}: {format_path(path)}{words}", self.secrets))

    def check(self, value: Value, annotation: Any, path: Path, lenient: bool = True) -> Recipe | None:
        """Return a recipe for a value that fits an annotation. Report a problem and return None if it does not fit.

        ``lenient`` accepts an unquoted number or boolean as text.
        """
        annotation = simplify(annotation)
        origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
        if annotation in (Any, object, inspect.Parameter.empty):
            return self._check_anything(value, path)
        if origin in (Union, types.UnionType):
            return self._check_union(value, inner, path)
        if origin is Literal:
            return self._check_literal(value, inner, path)
        if annotation in (None, *PLAIN):
            return self._check_plain(value, annotation, path, lenient)
        kind = origin or annotation
        if kind in LISTS or kind is tuple:
            return self._check_list(value, kind, inner, annotation, path)
        if kind in DICTS:
            return self._check_dict(value, inner, annotation, path)
        if kind is type:
            return self._check_named_class(value, inner[0] if inner else object, path)
        if kind is collections.abc.Callable:
            return self._check_callable(value, inner, annotation, path)
        if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
            return self._check_enum(value, annotation, path)
        if kind in WRITTEN:
            return self._check_text_form(value, kind, path)
        if typing.is_typeddict(kind):
            return self._check_typed_dict(value, kind, path)
        if isinstance(kind, type):
            return self.check_object(value, kind, path)
        return self._check_anything(value, path)

    # -- plain values --------------------------------------------------------------------------------------------

    def _report_wrong_type(self, value: Value, annotation: Any, path: Path, more: str = "") -> Any:
        shown = format_value(value, self.secrets)
        self.report(value, path, f"={shown} must be {describe_annotation(annotation, article=True)}.{more}")
        return None

    def _check_plain(self, value: Value, annotation: Any, path: Path, lenient: bool) -> Recipe | None:
        data, expected_type = value.data, type(None) if annotation is None else annotation
        if type(data) is expected_type:
            return PlainRecipe(value, data)
        if expected_type is float and type(data) is int and abs(data) <= sys.float_info.max:
            return PlainRecipe(value, float(data))
        if expected_type is str and lenient and value.text is not None and data is not None:
            return PlainRecipe(Value(value.text, value.source), value.text)
        return self._report_wrong_type(value, annotation, path, self._suggest_remedy(data, expected_type))

    def _suggest_remedy(self, data: Any, expected_type: Any) -> str:
        if expected_type is str and isinstance(data, bool | int | float):
            return " Quote it."
        if expected_type is int and isinstance(data, float) and data.is_integer():
            return f" Write {int(data)}."
        if (
            expected_type in (int, float)
            and isinstance(data, str)
            and type(_parse_scalar(data)) in (int, expected_type)
        ):
            return " Remove the quotes."
        return ""

    def _check_literal(self, value: Value, allowed: tuple[Any, ...], path: Path) -> Recipe | None:
        for option in allowed:
            if type(option) is type(value.data) and option == value.data:
                return PlainRecipe(value, option)
        for option in allowed:
            if isinstance(option, str) and option == value.text:
                return PlainRecipe(Value(option, value.source), option)
        hint = nearest(value.data, [option for option in allowed if isinstance(option, str)])
        return self._report_wrong_type(value, Literal[allowed], path, hint)

    def _check_enum(self, value: Value, kind: type[enum.Enum], path: Path) -> Recipe | None:
        for member in kind:
            if value.data == member.name or (value.data == member.value and type(value.data) is type(member.value)):
                return PlainRecipe(value, member)
        return self._check_literal(value, tuple(member.name for member in kind), path)

    def _check_text_form(self, value: Value, kind: Any, path: Path) -> Recipe | None:
        """Return a recipe for a path, a device or a dtype, written as text."""
        if isinstance(value.data, str):
            if kind in PATHS:
                return PlainRecipe(value, FilePath(value.data))
            if kind is torch.dtype and isinstance(dtype := getattr(torch, value.data.removeprefix("torch."), 0), kind):
                return PlainRecipe(value, dtype)
            if kind is torch.device:
                try:
                    return PlainRecipe(value, torch.device(value.data))
                except RuntimeError:
                    pass
        return self._report_wrong_type(value, kind, path)

    # -- collections ---------------------------------------------------------------------------------------------

    def _check_anything(self, value: Value, path: Path) -> Recipe | None:
        if isinstance(value.data, list):
            return self._check_items(value, list, [Any] * len(value.data), path)
        if isinstance(value.data, dict):
            return (
                self.check_object(value, object, path)
                if "class" in value.data
                else self._check_dict(value, (), dict, path)
            )
        return PlainRecipe(value, value.data)

    def _check_items(self, value: Value, kind: Callable[[Any], Any], inner: Iterable[Any], path: Path) -> Recipe | None:
        pairs = zip(value.data, inner, strict=True)
        recipes = [self.check(item, annotation, (*path, number)) for number, (item, annotation) in enumerate(pairs)]
        return (
            CollectionRecipe(value, kind, [recipe for recipe in recipes if recipe is not None])
            if None not in recipes
            else None
        )

    def _check_list(
        self, value: Value, kind: Any, inner: tuple[Any, ...], annotation: Any, path: Path
    ) -> Recipe | None:
        if not isinstance(value.data, list):
            return self._report_wrong_type(value, annotation, path)
        if kind is tuple and inner and inner[-1] is not Ellipsis:
            if len(inner) != len(value.data):
                return self._report_wrong_type(value, annotation, path)
            return self._check_items(value, tuple, inner, path)
        return self._check_items(value, LISTS.get(kind, tuple), [inner[0] if inner else Any] * len(value.data), path)

    def _check_dict(self, value: Value, inner: tuple[Any, ...], annotation: Any, path: Path) -> Recipe | None:
        if not isinstance(value.data, dict):
            return self._report_wrong_type(value, annotation, path)
        keys, kind = inner if len(inner) == 2 else (Any, Any)
        recipes: dict[Any, Recipe | None] = {}
        for key, item in value.data.items():
            name = Checker().check(Value(key, item.source, str(key)), keys, path)
            if name is None:
                self.report(item, (*path, key), f": the key {key!r} must be {describe_annotation(keys, article=True)}.")
            else:
                recipes[name.make()] = self.check(item, kind, (*path, key))
        if len(recipes) < len(value.data) or None in recipes.values():
            return None
        return MappingRecipe(value, {key: recipe for key, recipe in recipes.items() if recipe is not None})

    def _check_typed_dict(self, value: Value, kind: Any, path: Path) -> Recipe | None:
        if not isinstance(value.data, dict):
            return self._report_wrong_type(value, kind, path)
        takes: dict[str, Argument] = {}
        for name, hint in typing.get_type_hints(kind, include_extras=True).items():
            qualifier = typing.get_origin(hint)  # __required_keys__ does not reflect it if annotations are strings
            needed = qualifier is Required or (name in kind.__required_keys__ and qualifier is not NotRequired)
            inner = typing.get_args(hint)[0] if qualifier in (Required, NotRequired) else hint
            takes[name] = Argument(name, inner, REQUIRED if needed else None)
        recipes = self.check_arguments(value, value.data, Signature(takes), kind.__name__, path)
        return None if recipes is None else MappingRecipe(value, recipes)

    def _check_union(self, value: Value, members: tuple[Any, ...], path: Path) -> Recipe | None:
        """Return a recipe for the first member of a union that fits the value. The value's own type is tried first."""
        # A number is accepted as text if no member of the union is a number.
        numbers = any(candidate in (int, float, bool) for candidate in members)
        for strict in (True,) if numbers else (True, False):
            for member in sorted(members, key=lambda candidate: candidate is not type(value.data)):
                trial = Checker(self.secrets)
                if (recipe := trial.check(value, member, path, lenient=not strict)) is not None:
                    return recipe
        shaped_alike = [member for member in members if has_shape(value, simplify(member))]
        if len(shaped_alike) == 1:
            return self.check(value, shaped_alike[0], path)
        remedies = (self._suggest_remedy(value.data, member) for member in members)
        return self._report_wrong_type(value, Union[members], path, next(filter(None, remedies), ""))  # noqa: UP007

    # -- classes -------------------------------------------------------------------------------------------------

    def _check_named_class(self, value: Value, base: Any, path: Path) -> Recipe | None:
        target = (
            self._find_target(value, base, path)
            if isinstance(value.data, str)
            else self._report_wrong_type(value, type[base], path)
        )
        if target is None:
            return None
        if not isinstance(target, type) or (isinstance(base, type) and not issubclass(target, base)):
            return self._report_wrong_type(value, type[base], path)
        return PlainRecipe(value, target)

    def _check_callable(self, value: Value, inner: tuple[Any, ...], annotation: Any, path: Path) -> Recipe | None:
        returns = simplify(inner[-1]) if inner else Any
        if isinstance(value.data, str):
            function = self._find_target(value, returns if isinstance(returns, type) else object, path)
            if function is None or callable(function):
                return None if function is None else PlainRecipe(value, function)
        elif isinstance(value.data, dict) and "class" in value.data:
            target = self._find_target(value.data["class"], returns if isinstance(returns, type) else object, path)
            if target is None:
                return None
            later = isinstance(target, type) and isinstance(returns, type) and issubclass(target, returns)
            return self._build_recipe(value, target, str(value.data["class"].data), path, object, later=later)
        return self._report_wrong_type(value, annotation, path)

    def check_object(
        self, value: Value, base: Any, path: Path, supplied: Iterable[str] = (), target: Any = None
    ) -> ObjectRecipe | None:
        """Return a recipe for an object. Report a problem and return None if it cannot be built.

        The value is a mapping, such as ``{class: ..., argument: ...}``, or the class's name. ``supplied`` names
        arguments that are passed only when the object is built.
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
            class_value = data["class"] if isinstance(data, dict) else value
            named_target = (
                self._find_target(class_value, base, path)
                if isinstance(named, str)
                else self._report_wrong_type(class_value, type[base], (*path, "class"))
            )
            if named_target is None or not self._check_target(class_value, named_target, base, path):
                return None
            return self._build_recipe(value, named_target, named, path, base, supplied)
        if isinstance(data, dict) and (target is not None or not catalog.is_shelved(base)):
            return self._build_recipe(value, target or base, "", path, base, supplied)
        needs_user_class = base in (
            TaskModule,
            DataModule,
        )  # the user's classes are listed, not any that happen to be imported
        short = () if needs_user_class else catalog.list_short_names(base)
        example = next((name for name in (*_USUAL, *sorted(short)) if name in short), "my_module.MyClass")
        if isinstance(data, dict):
            self.report(value, path, f" names no class. Add one, such as 'class: {example}'.")
        else:
            self.report(
                value,
                path,
                f"={format_value(value, self.secrets)} must be {describe_annotation(base, article=True)}, such as "
                f"{{class: {example}, ...}}.",
            )
        return None

    def _find_target(self, value: Value, base: Any, path: Path) -> Any:
        try:
            return catalog.find(str(value.data), base)
        except ConfigError as error:
            self.report(value, path, f": {error}")
            return None

    def _check_target(self, value: Value, target: Any, base: Any, path: Path) -> bool:
        if not callable(target):
            self.report(value, path, f": {value.data!r} is {name_type(target)}, not a class.")
            return False
        if isinstance(target, type) and inspect.isabstract(target):
            missing = ", ".join(sorted(getattr(target, "__abstractmethods__", ())))
            self.report(value, path, f": {value.data!r} is abstract. Use a subclass that implements {missing}.")
            return False
        protocol = getattr(base, "_is_protocol", False)
        if isinstance(target, type) and isinstance(base, type) and not protocol and not issubclass(target, base):
            words = f": {value.data!r} must be a subclass of {base.__name__}."
            self.report(value, path, words + catalog.suggest_short_name(target.__name__, base))
            return False
        return True

    def _build_recipe(
        self,
        value: Value,
        target: Any,
        name: str,
        path: Path,
        base: Any,
        supplied: Iterable[str] = (),
        later: bool = False,
    ) -> ObjectRecipe | None:
        takes = signature(target)
        argument_values = (
            {key: item for key, item in value.data.items() if key != "class"} if isinstance(value.data, dict) else {}
        )
        shown = name.rpartition(".")[2] or getattr(target, "__name__", str(target))
        arguments = self.check_arguments(value, argument_values, takes, shown, path, supplied, partly=later)
        if arguments is None:
            return None
        checked = base if not isinstance(target, type) else object
        return ObjectRecipe(value, name, target, path, takes, arguments, checked, later)

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
        """Return recipes by argument name, or report problems and return None.

        ``supplied`` names arguments that are passed only when the object is built. ``partly`` allows required arguments
        to be missing.
        """
        problem_count = len(self.problems)
        supplied = set(supplied)
        recipes: dict[str, Recipe | None] = {}
        for key, item in argument_values.items():
            argument = takes.arguments.get(key)
            if key in supplied and argument is not None:
                self.report(item, (*path, key), f": {name} gets {key!r} from the run. Remove it.")
            elif argument is not None:
                recipes[key] = self._check_argument(item, argument, (*path, key), supplied)
            elif takes.open and isinstance(key, str):
                recipes[key] = self._check_anything(item, (*path, key))
            else:
                self.report(
                    item,
                    (*path, key),
                    describe_unknown(
                        name, key, [argument_name for argument_name in takes.arguments if argument_name not in supplied]
                    ),
                )
        for argument in takes.arguments.values():
            needed = argument.default is REQUIRED and argument.name not in supplied and not partly
            if needed and argument.name not in argument_values:
                self.report(
                    value, path, f": {name} needs {argument.name!r}{describe_type(argument)}, which is missing."
                )
        if len(self.problems) > problem_count:
            return None
        return {key: recipe for key, recipe in recipes.items() if recipe is not None}

    def _check_argument(self, value: Value, argument: Argument, path: Path, supplied: set[str]) -> Recipe | None:
        default = argument.default
        if argument.several:
            return self._check_list(value, list, (argument.type,), tuple, path)
        if default is not REQUIRED and type(default) in (*PLAIN, tuple) and argument.type is not Any:
            comparable = (
                tuple(to_plain(value)) if isinstance(default, tuple) and isinstance(value.data, list) else value.data
            )
            if type(comparable) is type(default) and comparable == default:
                # As in `x: int = None`, where the default does not match the annotation.
                return PlainRecipe(value, default)
        if argument.type is Any and isinstance(default, tuple) and isinstance(value.data, list):
            return self._check_items(value, tuple, [Any] * len(value.data), path)
        if supplied and (nested := self._check_nested(value, argument.type, path, supplied)) is not None:
            return nested
        return self.check(value, argument.type, path)

    def _check_nested(self, value: Value, annotation: Any, path: Path, supplied: set[str]) -> Recipe | None:
        """Return a recipe for a list of objects that also get the ``supplied`` arguments; None for other values.

        For example, the schedulers in a SequentialLR also get the optimizer.
        """
        inner = typing.get_args(annotation)
        if not (isinstance(value.data, list) and inner and isinstance(inner[0], type)):
            return None
        if not all(isinstance(item.data, dict | str) for item in value.data):
            return None
        recipes = [
            self.check_object(item, inner[0], (*path, number), supplied) for number, item in enumerate(value.data)
        ]
        return CollectionRecipe(value, list, [recipe for recipe in recipes if recipe is not None])


def _parse_scalar(text: str) -> Any:
    try:
        return parse_scalar(text)
    except ValueError:  # the number has more digits than Python accepts
        return text
