"""Declarations of a parser: single options, the arguments of classes, and links between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, get_args, get_type_hints

from ...common.messages import add_article
from ...trainer import arguments
from ...trainer.core import REQUIRED, Argument, Signature, signature
from ..config import COMMAND_LINE, Value
from ..config.instantiate import CollectionRecipe, ObjectRecipe, PlainRecipe, Recipe, format_value
from .checker import SettingsChecker
from .settings import Path, find_class, find_shape, is_word, make_default, make_settings


@dataclass
class Option:
    """Single option of a parser.

    Attributes:
        convert: Function that converts the text of a value; None for no conversion.
        choices: The allowed values; None allows any.
        of_items: Whether ``convert`` and ``choices`` apply to each item of a list.
        instantiate: Whether `instantiate_classes` builds the object that the value describes.
        untyped: Whether a number or boolean from the command line or environment remains text, as in argparse.
    """

    key: str
    argument: Argument
    required: bool = False
    help: str = ""
    convert: Callable[[str], Any] | None = None
    choices: tuple[Any, ...] | None = None
    of_items: bool = False
    instantiate: bool = True
    untyped: bool = False

    def get_default(self) -> Value | None:
        """Return the default as settings; None if the option does not have a default."""
        return None if self.argument.default is REQUIRED else make_settings(self.argument.default, "default")

    def find_argument(self, path: Path, value: Value | None) -> Argument | None:
        """Return the argument that a path below this option leads to; None if there is none."""
        return _follow(self.argument, path, value)

    def check(self, checker: SettingsChecker, value: Value | None) -> Recipe | None:
        """Return a recipe for the option's value. Report a problem if the value is invalid or missing."""
        path: Path = (self.key,)
        value = self.get_default() if value is None else value
        if value is None or (value.data is None and value.source == "default"):
            if self.required and not checker.partial:
                checker.problems.append(f"--{self.key} is required. Pass a value.")
            return PlainRecipe(Value(None, "default"), None)
        if value.data is None and self.argument.default is None:  # not among the choices
            return PlainRecipe(value, None)
        if not self.of_items or not isinstance(value.data, list):
            return self._check_one(checker, value, path, self.argument.type, self.argument.default)
        item_type = next(iter(get_args(self.argument.type)), Any)
        items = [self._check_one(checker, item, (*path, index), item_type) for index, item in enumerate(value.data)]
        return CollectionRecipe(value, list, [item for item in items if item is not None])

    def _check_one(
        self, checker: SettingsChecker, value: Value, path: Path, kind: Any, default: Any = REQUIRED
    ) -> Recipe | None:
        if self.untyped and value.text is not None and value.data is not None and is_word(value):
            return PlainRecipe(Value(value.text, value.source), value.text)
        if self.choices is not None and value.data not in self.choices:
            if value.text not in self.choices:
                choices = ", ".join(map(str, self.choices))
                one_of = "is not one of" if len(self.choices) > 1 else "must be"
                checker.report(value, path, f"={format_value(value, checker.secrets)} {one_of} {choices}.")
                return None
            value = Value(value.text, value.source)
        is_new = value.source not in ("default", "configuration")  # the values of a configuration are converted
        if self.convert is not None and isinstance(value.data, str | int | float) and is_new:
            try:
                return PlainRecipe(value, self.convert(value.text or str(value.data)))
            except (ValueError, TypeError) as error:
                checker.report(value, path, f"={value.data!r} was rejected by {self.convert.__name__}(): {error}")
                return None
        if not isinstance(value.data, dict | list) and type(value.data) is type(default) and value.data == default:
            # As in `x: int = None`, where the default does not have the annotated type.
            return PlainRecipe(value, value.data)
        return checker.check(value, kind, path)


@dataclass
class ClassGroup:
    """Arguments of a class or function under a dotted key.

    Attributes:
        bases: The class or function; in subclass mode, one or more base classes.
        subclass_mode: Whether the settings may name the class.
        required: Whether the settings must contain the object in subclass mode.
        skip: Names of arguments that are not part of the settings.
        instantiate: Whether `instantiate_classes` builds the object.
        open: Whether arguments outside the signature are accepted if the class has ``**kwargs``.
        ignored_nulls: Names of Lightning's arguments for which null is accepted and ignored.
    """

    key: str
    bases: tuple[Any, ...]
    subclass_mode: bool = False
    required: bool = False
    skip: frozenset[str] = frozenset()
    instantiate: bool = True
    open: bool = True
    help: str = ""
    ignored_nulls: frozenset[str] = frozenset()

    def get_signature(self) -> Signature:
        """Return the signature of the class without the skipped arguments."""
        takes = signature(self.bases[0])
        arguments = {name: argument for name, argument in takes.arguments.items() if name not in self.skip}
        return replace(takes, arguments=arguments, open=takes.open and self.open)

    def find_argument(self, path: Path, value: Value | None) -> Argument | None:
        """Return the argument that a path below this group leads to; None if there is none."""
        target = self.bases[0]
        if self.subclass_mode:
            named = value.data.get("class") if value is not None and isinstance(value.data, dict) else None
            target = None if named is None else find_class(named.data)
        if not path or target is None:
            return None
        argument = signature(target).arguments.get(str(path[0]))
        inner = value.data.get(path[0]) if value is not None and isinstance(value.data, dict) else None
        return None if argument is None else _follow(argument, path[1:], inner)

    def check(self, checker: SettingsChecker, value: Value | None) -> Recipe | None:
        """Return a recipe for the group's object. Report a problem if its settings are invalid or missing."""
        path: Path = tuple(self.key.split("."))
        if self.subclass_mode:
            return self._check_subclass(checker, value, path)
        value = Value({}, COMMAND_LINE) if value is None or value.data is None else value
        if not isinstance(value.data, dict):
            shown = format_value(value, checker.secrets)
            checker.report(value, path, f"={shown} must be a mapping with the arguments of {self.bases[0].__name__}.")
            return None
        named = value.data.get("class")
        entries = {
            key: item
            for key, item in value.data.items()
            if key != "class" and not (key in self.ignored_nulls and item.data is None)
        }
        if named is not None and find_class(named.data) is not self.bases[0]:
            words = f" is always {add_article(self.bases[0].__name__)}. Remove class_path={named.data!r}."
            checker.report(named, path, words)
            return None
        takes, target = self.get_signature(), self.bases[0]
        before = len(checker.problems)
        if not self.open:
            entries = self._report_absent_flags(checker, entries, takes, path)
        recipes = checker.check_arguments(value, entries, takes, target.__name__, path)
        if recipes is None or len(checker.problems) > before:
            return None
        return ObjectRecipe(replace(value, data=entries), "", target, path, takes, recipes)

    def _report_absent_flags(
        self, checker: SettingsChecker, entries: dict[Any, Value], takes: Signature, path: Path
    ) -> dict[Any, Value]:
        """Report flags that the Trainer does not have, and return the remaining flags."""
        for name, item in entries.items():
            if name not in takes.arguments:
                try:
                    arguments.refuse_unknown({name: item}, takes.arguments)
                except TypeError as error:
                    checker.report(item, (*path, name), f": {error}")
        return {name: item for name, item in entries.items() if name in takes.arguments}

    def _check_subclass(self, checker: SettingsChecker, value: Value | None, path: Path) -> Recipe | None:
        if value is None or value.data is None:
            if self.required and not checker.partial:
                checker.problems.append(
                    f"--{self.key} is required. Pass a class, as in --{self.key}=my_module.MyClass."
                )
            return PlainRecipe(Value(None, "default"), None)
        if not isinstance(value.data, str | dict | list):
            return checker.check(value, self.bases[0] if len(self.bases) == 1 else object, path)
        named = value.data.get("class") if isinstance(value.data, dict) else value
        # The name of a base class denotes that class only, because PyTorch's ReduceLROnPlateau has no argument
        # `monitor`.
        bases = [base for base in self.bases if named is not None and base.__name__ == named.data] or self.bases
        trial = checker
        for base in bases:
            trial = checker.make_trial()
            recipe = trial.check_object(value, base, path, self.skip)
            if recipe is not None:
                return recipe
        checker.problems += trial.problems
        return None


Declared = Option | ClassGroup


@dataclass(frozen=True)
class Link:
    """Rule that derives the value of one key from the values of others; see `link_arguments`.

    Attributes:
        compute: Function that computes the value from the sources' values. None uses the value of a single source.
        at_instantiation: Whether the sources are built objects or their attributes.
    """

    sources: tuple[str, ...]
    target: str
    compute: Callable[..., Any] | None
    at_instantiation: bool

    def apply(self, find_source: Callable[[str], Any]) -> Any:
        """Return the value for the target, computed from the values of the sources."""
        values = [find_source(source) for source in self.sources]
        return values[0] if self.compute is None else self.compute(*values)

    @property
    def path(self) -> Path:
        """Path of the target in the settings."""
        return tuple(part for part in self.target.split(".") if part != "init_args")


def order_by_links(declared: Mapping[str, Declared], links: list[Link]) -> list[str]:
    """Return the declared keys in an order in which the sources of links come before their targets.

    Raises:
        ValueError: If the links are invalid or form a cycle.
    """
    needs: dict[str, set[str]] = {key: set() for key in declared}
    for link in links:
        target = find_owner(declared, link.target)
        sources = {find_owner(declared, source) for source in link.sources}
        if target in sources and link.at_instantiation:
            raise ValueError(
                f"link_arguments({link.sources}, {link.target!r}, apply_on='instantiate'): {target!r} would have to be "
                "built before itself. Link from another group, or compute the value in the constructor."
            )
        needs[target] |= sources - {target}
    ordered: list[str] = []
    while len(ordered) < len(declared):
        ready = next((key for key in declared if key not in ordered and needs[key] <= {*ordered}), None)
        if ready is None:
            waiting = ", ".join(key for key in declared if key not in ordered and needs[key])
            raise ValueError(f"links between {waiting} are circular: each needs another's value. Remove one link.")
        ordered.append(ready)
    return ordered


def find_owner(declared: Mapping[str, Declared], key: str) -> str:
    """Return the declared key that a dotted key belongs to.

    Raises:
        ValueError: If the key does not belong to an option or group.
    """
    owner = max((name for name in declared if key == name or key.startswith(f"{name}.")), key=len, default=None)
    if owner is None:
        from ...common.messages import nearest

        raise ValueError(f"unknown argument {key!r}.{nearest(key.partition('.')[0], declared)}")
    return owner


def _follow(argument: Argument, path: Path, value: Value | None) -> Argument | None:
    """Return the argument at a path, which may lead through classes and dataclasses; None if there is none."""
    while path:
        settings = value if value is not None and value.data is not None else make_default(argument)
        entries = settings.data if settings is not None and isinstance(settings.data, dict) else {}
        target = find_class(entries["class"].data) if "class" in entries else find_shape(argument.type)
        found = None if target is None else signature(target).arguments.get(str(path[0]))
        if found is None:
            return None
        argument, value, path = found, entries.get(path[0]), path[1:]
    return argument


def read_return_annotation(function: Callable[..., Any]) -> Any:
    """Return the annotation of a function's return value; None if it is missing or contains an undefined name."""
    try:
        return get_type_hints(function).get("return")
    except NameError:  # imported for type checkers only
        return None


def resolve_skipped(skip: Iterable[str | int] | None, arguments: Iterable[str]) -> frozenset[str]:
    """Return the names of the arguments to skip. A number skips that many leading arguments."""
    named = frozenset(name for name in skip or () if isinstance(name, str))
    leading = sum(number for number in skip or () if isinstance(number, int))
    return named | frozenset(islice(arguments, leading))
