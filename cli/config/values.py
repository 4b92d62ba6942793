"""Values of a configuration, each with its source."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...common.messages import nearest

Key = str | int
Path = tuple[Key, ...]
DEFAULT = "default"
"""Source of a default value."""


class ConfigError(ValueError):
    """Error in a configuration, with a message for its author.

    Attributes:
        problems: One message per problem.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class Value:
    """Value in a configuration, with its source.

    Attributes:
        data: A dict or list of values, or a scalar.
        source: Place where the value was written, such as ``"run.yaml:3"``, ``"command line"`` or ``"default"``.
        text: Original text of a parsed value, such as ``"1.10"`` for the number 1.1.
    """

    data: Any
    source: str
    text: str | None = None


def split_at_secrets(text: str, secrets: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Split a text at secrets. Yield each part with the reference that replaces the next secret, or "" at the end."""
    longest_first = sorted(secrets, key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", text) if secrets else [text]
    return zip(parts[::2], [*(secrets[part] for part in parts[1::2]), ""], strict=True)


def hide_secrets(text: str, secrets: Mapping[str, str]) -> str:
    """Replace each secret in a message by its reference, including secrets in their ``repr`` form."""
    forms = {form: name for secret, name in secrets.items() for form in (secret, repr(secret)[1:-1])}
    return "".join(plain + reference for plain, reference in split_at_secrets(text, forms))


def make_value(data: Any, source: str) -> Value:
    """Convert plain data to values that all have the same source. Tuples become lists."""
    if isinstance(data, dict):
        return Value({key: make_value(item, source) for key, item in data.items()}, source)
    if isinstance(data, list | tuple):
        return Value([make_value(item, source) for item in data], source)
    return Value(data, source)


def to_plain(value: Value) -> Any:
    """Convert a value to nested dicts, lists and scalars."""
    if isinstance(value.data, dict):
        return {key: to_plain(item) for key, item in value.data.items()}
    if isinstance(value.data, list):
        return [to_plain(item) for item in value.data]
    return value.data


def iterate_values(value: Value, path: Path = ()) -> Iterator[tuple[Path, Value]]:
    """Iterate over a value and all values below it, each with its path."""
    yield path, value
    entries: Iterable[tuple[Key, Value]] = ()
    if isinstance(value.data, dict):
        entries = value.data.items()
    elif isinstance(value.data, list):
        entries = enumerate(value.data)
    for key, item in entries:
        yield from iterate_values(item, (*path, key))


def format_path(path: Path) -> str:
    """Return a path as a dotted key, such as ``model.lr``."""
    return ".".join(map(str, path))


def normalize(value: Value) -> Value:
    """Return the values with LightningCLI's ``class_path`` and ``init_args`` rewritten to ``class`` and arguments."""
    if isinstance(value.data, list):
        return replace(value, data=[normalize(item) for item in value.data])
    if not isinstance(value.data, dict):
        return value
    entries = {key: normalize(item) for key, item in value.data.items()}
    if "class_path" in entries:
        if "class" in entries:
            raise ConfigError(
                f"{entries['class_path'].source}: 'class' and 'class_path' both name a class. Keep one of them."
            )
        entries = {("class" if key == "class_path" else key): item for key, item in entries.items()}
    arguments = entries.get("init_args")
    if arguments is not None and isinstance(arguments.data, dict | None):
        del entries["init_args"]
        for key, item in (arguments.data or {}).items():
            if key in entries:
                raise ConfigError(
                    f"{item.source}: {key!r} is set both inside and outside 'init_args'. Keep one of them."
                )
            entries[key] = item
    return replace(value, data=entries)


def merge(earlier: Value, later: Value) -> Value:
    """Merge two values. Mappings are merged key by key; otherwise, the later value replaces the earlier one.

    A mapping that names a class replaces an earlier mapping that names another class or none.
    """
    earlier = expand_class_name(earlier) if isinstance(later.data, dict) else earlier
    if not (isinstance(earlier.data, dict) and isinstance(later.data, dict)):
        return later
    old_class, new_class = earlier.data.get("class"), later.data.get("class")
    if new_class is not None and (old_class is None or old_class.data != new_class.data):
        return later
    entries = dict(earlier.data)
    for key, item in later.data.items():
        entries[key] = merge(entries[key], item) if key in entries else item
    return replace(later, data=entries)


def expand_class_name(value: Value) -> Value:
    """Convert a bare class name to a mapping with the key ``class``; return any other value unchanged."""
    parts = value.data.split(".") if isinstance(value.data, str) else [""]
    if all(part.isidentifier() for part in parts) and parts[-1][0].isupper():
        return Value({"class": value}, value.source)
    return value


def place_value(root: Value, path: Path, new: Value | None, add: bool = False) -> Value:
    """Return the values with ``new`` at ``path``; if ``new`` is None, without the value at ``path``.

    ``add`` appends ``new`` to the list at the path.
    """

    def place(value: Value | None, done: int) -> Value | None:
        if done == len(path):
            return _append_value(value, path, new) if add and new is not None else new
        key, parent = path[done], format_path(path[:done])
        if value is None or value.data is None:
            if new is None:
                raise ConfigError(f"{format_path(path)!r} can't be removed, because {parent!r} is empty.")
            value = Value({}, new.source)
        value = expand_class_name(value)
        if isinstance(value.data, list):
            number = _parse_index(value, key, parent)
            item = place(value.data[number], done + 1)
            return replace(
                value, data=[*value.data[:number], *([] if item is None else [item]), *value.data[number + 1 :]]
            )
        if not isinstance(value.data, dict):
            raise ConfigError(
                f"{format_path(path)!r} can't be set, because {parent!r} is {value.data!r} ({value.source}), which "
                f"has no keys. Set {parent!r} to a class or a mapping first."
            )
        # A key may also be a number, as in {0: 8, 4: 4}.
        key = int(key) if key not in value.data and str(key).isdecimal() and int(key) in value.data else key
        if new is None and key not in value.data:
            valid_keys = [str(valid_key) for valid_key in value.data]
            raise ConfigError(
                f"{format_path(path[: done + 1])!r} can't be removed, because it "
                f"is not set.{nearest(str(key), valid_keys)}"
            )
        entries = dict(value.data)
        item = place(entries.get(key), done + 1)
        if item is None:
            del entries[key]
        else:
            entries[key] = item
        return replace(value, data=entries)

    return place(root, 0) or Value({}, root.source)


def _append_value(value: Value | None, path: Path, new: Value) -> Value:
    if value is None or value.data is None:
        return Value([new], new.source)
    if not isinstance(value.data, list):
        name, current = format_path(path), "a mapping" if isinstance(value.data, dict) else repr(value.data)
        raise ConfigError(
            f"'{name}+=' appends to a list, but {name} is {current} ({value.source}). Use '{name}=' to replace it."
        )
    return replace(value, data=[*value.data, new])


def _parse_index(value: Value, key: Key, parent: str) -> int:
    size = len(value.data)
    if not str(key).isdecimal():
        raise ConfigError(f"{parent!r} is a list ({value.source}): {key!r} must be an index, as in {parent}.0.")
    if int(key) >= size:
        contents = f"has length {size}, and its indices start at 0" if size else "is empty"
        raise ConfigError(
            f"{parent}.{key}: the list ({value.source}) {contents}. Use '{parent}+=...' to append an item."
        )
    return int(key)
