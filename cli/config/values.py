"""The values of a configuration. Each knows where it came from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...common.messages import nearest

Key = str | int
Path = tuple[Key, ...]
DEFAULT = "default"
"""The source of a value that nobody has set."""


class ConfigError(ValueError):
    """Something is wrong with a configuration; the message is for the person who wrote it.

    Attributes:
        problems: what is wrong, one by one.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class Value:
    """A value and its source.

    Attributes:
        data: a dict or list of values, or None, a bool, a number or a string.
        source: where it was written: ``"run.yaml:3"``, ``"command line"``, ``"default"``.
        text: a plain scalar as it was written, for an argument that wants text.
    """

    data: Any
    source: str
    text: str | None = None


def printable(text: str) -> str:
    """A text for the terminal. What stands in a file may hold a terminal's commands; they are shown, not obeyed."""
    return "".join(letter if letter.isprintable() else "?" for letter in text.replace("\t", "    "))


def apart(text: str, secrets: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The parts of a text between the secrets in it, each with the reference for the one behind it; "" at the end."""
    longest_first = sorted(secrets, key=len, reverse=True)
    parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", text) if secrets else [text]
    return zip(parts[::2], [*(secrets[part] for part in parts[1::2]), ""], strict=True)


def hidden(text: str, secrets: Mapping[str, str]) -> str:
    """A message with each secret in it, as it is or as Python writes it, as the reference that stands for it."""
    forms = {form: name for secret, name in secrets.items() for form in (secret, repr(secret)[1:-1])}
    return "".join(before + reference for before, reference in apart(text, forms))


def value_of(data: Any, source: str) -> Value:
    """Values of plain data, all from one source."""
    if isinstance(data, dict):
        return Value({key: value_of(item, source) for key, item in data.items()}, source)
    if isinstance(data, list | tuple):
        return Value([value_of(item, source) for item in data], source)
    return Value(data, source)


def plain(value: Value) -> Any:
    """The data alone."""
    if isinstance(value.data, dict):
        return {key: plain(item) for key, item in value.data.items()}
    if isinstance(value.data, list):
        return [plain(item) for item in value.data]
    return value.data


def walk(value: Value, path: Path = ()) -> Iterator[tuple[Path, Value]]:
    """Each value below ``value``, and itself, with the way there."""
    yield path, value
    inside: Iterable[tuple[Key, Value]] = ()
    if isinstance(value.data, dict):
        inside = value.data.items()
    elif isinstance(value.data, list):
        inside = enumerate(value.data)
    for key, item in inside:
        yield from walk(item, (*path, key))


def dotted(path: Path) -> str:
    """A path as it is written on the command line."""
    return ".".join(map(str, path))


def flattened(value: Value) -> Value:
    """The same in one form: ``class_path`` and ``init_args``, as LightningCLI has them, become ``class`` and arguments.

    Raises:
        ConfigError: both forms at once.
    """
    if isinstance(value.data, list):
        return replace(value, data=[flattened(item) for item in value.data])
    if not isinstance(value.data, dict):
        return value
    inside = {key: flattened(item) for key, item in value.data.items()}
    if "class_path" in inside:
        if "class" in inside:
            raise ConfigError(f"{inside['class_path'].source}: 'class' and 'class_path' both name a class; keep one.")
        inside = {("class" if key == "class_path" else key): item for key, item in inside.items()}
    arguments = inside.get("init_args")
    if arguments is not None and isinstance(arguments.data, dict | None):
        del inside["init_args"]
        for key, item in (arguments.data or {}).items():
            if key in inside:
                raise ConfigError(f"{item.source}: {key!r} stands in 'init_args' and beside it; keep one.")
            inside[key] = item
    return replace(value, data=inside)


def merged(before: Value, later: Value) -> Value:
    """What both say, the later where they differ: mappings are merged, everything else is replaced.

    A mapping that names another class takes the place of the whole, as the arguments were another's.
    """
    before = as_object(before) if isinstance(later.data, dict) else before
    if not (isinstance(before.data, dict) and isinstance(later.data, dict)):
        return later
    named, now = before.data.get("class"), later.data.get("class")
    if now is not None and (named is None or named.data != now.data):
        return later
    inside = dict(before.data)
    for key, item in later.data.items():
        inside[key] = merged(inside[key], item) if key in inside else item
    return replace(later, data=inside)


def as_object(value: Value) -> Value:
    """The mapping that a class's bare name stands for; anything else as it is."""
    parts = value.data.split(".") if isinstance(value.data, str) else [""]
    if all(part.isidentifier() for part in parts) and parts[-1][0].isupper():
        return Value({"class": value}, value.source)
    return value


def placed(root: Value, path: Path, new: Value | None, add: bool = False) -> Value:
    """The values with another one at ``path``; without what is there, for None.

    Args:
        root: the values so far, which stay as they are.
        path: the way, with numbers in lists.
        new: what is put there; mappings on the way that are missing are made.
        add: append it to the list there.

    Raises:
        ConfigError: there is no such place.
    """

    def put(value: Value | None, done: int) -> Value | None:
        if done == len(path):
            return _appended(value, path, new) if add and new is not None else new
        key, here = path[done], dotted(path[:done])
        if value is None or value.data is None:
            if new is None:
                raise ConfigError(f"there is no {dotted(path)!r} to take out: {here!r} is empty.")
            value = Value({}, new.source)
        value = as_object(value)
        if isinstance(value.data, list):
            number = _number(value, key, here)
            item = put(value.data[number], done + 1)
            return replace(
                value, data=[*value.data[:number], *([] if item is None else [item]), *value.data[number + 1 :]]
            )
        if not isinstance(value.data, dict):
            raise ConfigError(
                f"{dotted(path)!r} goes into {here!r}, which is {value.data!r} ({value.source}) and holds no keys."
            )
        # A number may be a key too, as of {0: 8, 4: 4}.
        key = int(key) if key not in value.data and str(key).isdecimal() and int(key) in value.data else key
        if new is None and key not in value.data:
            known = [str(one) for one in value.data]
            raise ConfigError(f"there is no {dotted(path[: done + 1])!r} to take out.{nearest(str(key), known)}")
        inside = dict(value.data)
        item = put(inside.get(key), done + 1)
        if item is None:
            del inside[key]
        else:
            inside[key] = item
        return replace(value, data=inside)

    return put(root, 0) or Value({}, root.source)


def _appended(value: Value | None, path: Path, new: Value) -> Value:
    if value is None or value.data is None:
        return Value([new], new.source)
    if not isinstance(value.data, list):
        raise ConfigError(f"'{dotted(path)}+=' adds to a list, but {dotted(path)!r} is none ({value.source}).")
    return replace(value, data=[*value.data, new])


def _number(value: Value, key: Key, here: str) -> int:
    size = len(value.data)
    if not str(key).isdecimal():
        raise ConfigError(f"{here!r} is a list ({value.source}): {key!r} must be a number from 0 on, as in {here}.0.")
    if int(key) >= size:
        held = f"holds {size}, numbered from 0" if size else "is empty"
        raise ConfigError(f"{here}.{key}: the list ({value.source}) {held}; '{here}+=...' adds one.")
    return int(key)
