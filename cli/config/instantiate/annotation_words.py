"""Functions that simplify and describe annotations and values."""

from __future__ import annotations

import collections.abc
import enum
import inspect
import os
import types
import typing
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any, Literal, Union

import torch

from ....common.messages import add_article, format_count, join_words, nearest
from ....trainer.core import Argument
from ..values import Value, hide_secrets, to_plain
from . import catalog

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
        others = (*PLAIN, *LISTS, *WRITTEN, tuple, type, collections.abc.Callable)
        return isinstance(kind, type) and kind not in others and not issubclass(kind, enum.Enum)
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
