"""Settings in LightningCLI's form, with ``class_path`` and ``init_args``, and functions that convert and merge them."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path as FilePath
from typing import Any

from ...common.messages import announce
from ...trainer.core import REQUIRED, Argument, signature
from ..config import COMMAND_LINE, ConfigError, Value, expand_class_name, parse, parse_override_value, read
from ..config.instantiate import catalog

Path = tuple[str | int, ...]
VARIABLE = "environment variable"
"""Prefix of the source of an environment variable's value."""
PLAIN = (type(None), bool, int, float, str)
_PEER_PACKAGES = ("lightning.pytorch.", "pytorch_lightning.", "lightning.")
_CONFIG_FILES = (".yaml", ".yml", ".json")


class ClassPath(str):
    """Key ``class`` of a mapping that was written with ``class_path``; see `restore_class_path`."""

    __slots__ = ()


_CLASS = ClassPath("class")


def make_settings(data: Any, source: str) -> Value:
    """Return data as settings with ``source`` in each value. Namespaces and lazy instances become mappings."""
    if is_lazy(data):
        data = data.lazy_get_init_data()
    if isinstance(data, argparse.Namespace):
        data = vars(data)
    if type(data) is dict:
        return normalize(Value({key: make_settings(item, source) for key, item in data.items()}, source))
    if type(data) is list:
        return Value([make_settings(item, source) for item in data], source)
    return Value(data, source)


def is_lazy(value: Any) -> bool:
    """Return whether a value is a ``lazy_instance`` of jsonargparse."""
    return hasattr(type(value), "lazy_get_init_data")


def normalize(value: Value) -> Value:
    """Return settings with the ``class_path``, ``init_args`` and ``dict_kwargs`` of each object in one mapping."""
    if isinstance(value.data, list):
        return replace(value, data=[normalize(item) for item in value.data])
    if not isinstance(value.data, dict):
        return value
    entries = {key: normalize(item) for key, item in value.data.items()}
    if "class_path" not in entries and not (entries and entries.keys() <= {"init_args", "dict_kwargs"}):
        return replace(value, data=entries)
    arguments: dict[Any, Value] = {}
    for key, item in entries.items():
        if key == "class_path":
            arguments[_CLASS] = item
        elif key in ("init_args", "dict_kwargs") and isinstance(item.data, dict | None):
            arguments |= item.data or {}
        else:
            arguments[key] = item
    return replace(value, data=arguments)


@functools.cache
def translate_class_path(name: str) -> str:
    """Translate an import path in Lightning's packages to Treadle's; return other paths unchanged."""
    prefix = next((prefix for prefix in _PEER_PACKAGES if name.startswith(prefix)), None)
    if prefix is None:
        return name
    translated = f"treadle.compat.{name.removeprefix(prefix)}"
    announce(f"class_path {name} is replaced by {translated}.")
    return translated


def restore_class_path(value: Value) -> Value:
    """Return settings with ``class_path`` and ``init_args`` restored in the mappings written with ``class_path``."""
    if isinstance(value.data, list):
        return replace(value, data=[restore_class_path(item) for item in value.data])
    if not isinstance(value.data, dict):
        return value
    entries = {key: restore_class_path(item) for key, item in value.data.items()}
    named = next((key for key in entries if isinstance(key, ClassPath)), None)
    if named is None:
        return replace(value, data=entries)
    class_path = entries.pop(named)
    return Value({"class_path": class_path, "init_args": replace(value, data=entries)}, value.source)


def merge(
    before: Value, later: Value, is_replaced: Callable[[Path], bool] = lambda path: False, path: Path = ()
) -> Value:
    """Merge two values. Mappings are merged key by key; otherwise, the later value replaces the earlier one.

    If ``later`` names another class, the earlier arguments that this class accepts are kept, as in LightningCLI.
    ``is_replaced`` returns whether the mapping at a path is replaced as a whole, as for an argument of type ``dict``.
    """
    old = expand_class_name(before) if isinstance(before.data, str) else before
    if not isinstance(old.data, dict):
        return later
    new = expand_class_name(later) if "class" in old.data else later
    if not isinstance(new.data, dict):
        return later
    entries = dict(old.data)
    if "class" in new.data:
        entries = _keep_accepted(entries, new.data["class"])
    elif "class" not in entries and is_replaced(path):
        return later
    for key, item in new.data.items():
        if key != "class":
            entries[key] = merge(entries[key], item, is_replaced, (*path, key)) if key in entries else item
    return replace(new, data=entries)


def _keep_accepted(entries: dict[Any, Value], named: Value) -> dict[Any, Value]:
    """Return settings for the class ``named``, with the arguments in ``entries`` that this class accepts."""
    if "class" not in entries:
        return {_CLASS: named}
    if entries["class"].data == named.data:
        return entries
    target = find_class(named.data)
    if target is None:
        return {**entries, "class": named}  # the error is reported when the argument is checked
    accepted = signature(target).arguments
    dropped = [str(key) for key in entries if key != "class" and key not in accepted]
    if dropped:
        announce(f"removed from the settings: {', '.join(dropped)}, which {named.data} does not accept.")
    return {_CLASS: named} | {key: item for key, item in entries.items() if key in accepted}


def find_class(name: Any) -> Any:
    """Return the class or function that a name refers to; None if the name is unknown or ambiguous."""
    try:
        return catalog.find(translate_class_path(str(name)), object) if name else None
    except ConfigError:
        return None


def read_settings(file: str | FilePath) -> Value:
    """Return the normalized values of a YAML or JSON file."""
    return normalize(read(file))


def read_text(text: str) -> Value:
    """Return the normalized values of a YAML text, which may be empty."""
    return normalize(parse(text, "text") or Value({}, "text"))


def read_named_file(value: Value) -> Value:
    """Return the settings in a configuration file if the value is its path; otherwise, return the value.

    A relative path is looked up next to the file that contains the value, then in the working directory.
    """
    if not isinstance(value.data, str) or not value.data.endswith(_CONFIG_FILES):
        return value
    named_in = FilePath(value.source.rpartition(":")[0] or ".")
    places = [named_in.parent / value.data, FilePath(value.data)] if named_in.is_file() else [FilePath(value.data)]
    file = next((place for place in places if place.is_file()), None)
    return value if file is None else read_settings(file)


def parse_value(text: str, source: str) -> Value:
    """Parse a YAML value from the command line or an environment variable."""
    return normalize(parse_override_value(text, source)) if text else Value("", source)


def is_word(value: Value) -> bool:
    """Return whether a value comes from the command line or an environment variable."""
    return value.source == COMMAND_LINE or value.source.startswith(VARIABLE)


def append(value: Value | None, new: Value) -> Value:
    """Return ``value`` as a list with ``new`` appended, or with the items of ``new`` appended if it is a list."""
    before = [] if value is None or value.data is None else value.data if isinstance(value.data, list) else [value]
    return Value([*before, *(new.data if isinstance(new.data, list) else [new])], new.source)


def place(
    value: Value | None,
    path: Path,
    new: Value,
    find_default: Callable[[Path], Value | None],
    add: bool = False,
    done: int = 0,
) -> Value:
    """Return the settings with a new value at ``path``.

    Args:
        value: The merged settings.
        path: The keys and indices that lead to the value. If a name follows a list, it is looked up in the list's
            last item.
        new: The value to set or append.
        find_default: Function that returns the default at a path. If the settings have no mapping or list there, the
            new value is added to the default.
        add: Whether to append to the list at the path. Default: False.
        done: Number of leading entries of ``path`` that lead to ``value``. Default: 0.
    """
    if value is None or value.data is None:
        value = find_default(path[:done]) if done < len(path) or add else value
    if done == len(path):
        return append(value, new) if add else new if value is None else _replace_value(value, new)
    value = expand_class_name(read_named_file(value)) if value is not None else Value({}, new.source)
    key = path[done]
    if isinstance(value.data, list):
        number = int(key) if str(key).isdecimal() else len(value.data) - 1
        if not 0 <= number < len(value.data):
            name, size = ".".join(map(str, path[:done])), len(value.data)
            contents = f"has length {size}, and its indices start at 0" if size else "is empty"
            raise ConfigError(f"{name}.{key}: the list {contents}. Use '{name}+=...' to append an item.")
        rest = done + 1 if str(key).isdecimal() else done
        item = place(value.data[number], path, new, lambda _: None, add, rest)
        return replace(value, data=[*value.data[:number], item, *value.data[number + 1 :]])
    if value.data is None:
        value = Value({}, new.source)
    if not isinstance(value.data, dict):
        raise ConfigError(
            f"{'.'.join(map(str, path))} can't be set, because {'.'.join(map(str, path[:done]))} is {value.data!r}, "
            f"which has no keys. Set {'.'.join(map(str, path[:done]))} to a class or a mapping first."
        )
    item = place(value.data.get(key), path, new, find_default, add, done + 1)
    return replace(value, data={**value.data, key: item})


def _replace_value(value: Value, new: Value) -> Value:
    """Return the new value. If it names a class, keep the earlier arguments that the class accepts."""
    named = expand_class_name(new)
    return merge(value, named) if isinstance(named.data, dict) and "class" in named.data else new


def make_default(argument: Argument) -> Value | None:
    """Return an argument's default as settings into which others can be merged; None if it does not support merging."""
    default = argument.default
    if default is REQUIRED or argument.several:
        return None
    if is_lazy(default):
        return make_settings(default, "default")
    if dataclasses.is_dataclass(default) and not isinstance(default, type):
        fields = {field.name: getattr(default, field.name) for field in dataclasses.fields(default) if field.init}
        return make_settings(fields, "default")
    if isinstance(default, type):
        return Value({_CLASS: Value(describe_import_path(default), "default")}, "default")
    if isinstance(default, Mapping) or type(default) is list:
        return make_settings(dict(default) if isinstance(default, Mapping) else default, "default")
    return None


def find_shape(annotation: Any) -> Any:
    """Return the first dataclass in an annotation, such as ``Config | None``; None if there is none."""
    inner = typing.get_args(annotation) or (annotation,)
    return next((kind for kind in inner if isinstance(kind, type) and dataclasses.is_dataclass(kind)), None)


def describe_import_path(target: Any) -> str:
    """Return the shortest import path of a class or function; an empty string if its module is unknown."""
    full_name, module = getattr(target, "__qualname__", ""), getattr(target, "__module__", None) or ""
    name = full_name.rpartition(".")[2]  # as for `torch.tanh`, whose full name contains a private class
    parts = module.split(".")
    for home in (".".join(parts[:end]) for end in range(1, len(parts) + 1)):
        if name and getattr(sys.modules.get(home), name, None) is target:
            return f"{home}.{name}"
    return f"{module}.{full_name}" if module else ""


def find_value(value: Value | None, path: Path) -> Value | None:
    """Return the value at a path, such as ``("model", "lr")``; None if there is no value."""
    for part in path:
        value = value.data.get(part) if value is not None and isinstance(value.data, dict) else None
    return value


def as_mapping(value: Value | None) -> Value:
    """Return settings with a class name converted to a mapping; an empty mapping for None."""
    return Value({}, "default") if value is None or value.data is None else expand_class_name(value)


def remove_value(value: Value | None, path: Path) -> Value | None:
    """Return the settings without the value at a path; None if the path is empty."""
    if value is None or not path or not isinstance(value.data, dict) or path[0] not in value.data:
        return value if path else None
    inner = remove_value(value.data[path[0]], path[1:])
    entries = {key: item for key, item in value.data.items() if key != path[0]}
    return replace(value, data=entries if inner is None else {**entries, path[0]: inner})
