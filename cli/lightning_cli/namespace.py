"""Parsed settings: nested namespaces with access by attribute, by key and by dotted key."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

_MISSING: Any = object()


class Namespace(argparse.Namespace):
    """Nested settings; ``config.model.lr``, ``config["model"]["lr"]`` and ``config["model.lr"]`` are the same value.

    Args:
        entries: Values by name or dotted name. Nested mappings are not converted to namespaces. Default: None.
        **named: Further values by name.
    """

    def __init__(self, entries: Mapping[str, Any] | argparse.Namespace | None = None, **named: Any) -> None:
        super().__init__()
        given = vars(entries) if isinstance(entries, argparse.Namespace) else dict(entries or {})
        for key, value in {**given, **named}.items():
            self[key] = value

    def __getitem__(self, key: str) -> Any:
        value: Any = self
        for part in key.split("."):
            entries = vars(value) if isinstance(value, argparse.Namespace) else value
            if not isinstance(entries, Mapping) or part not in entries:
                raise KeyError(key)
            value = entries[part]
        return value

    def __setitem__(self, key: str, value: Any) -> None:
        parent, _, name = key.rpartition(".")
        holder: Any = self
        for part in parent.split(".") if parent else ():
            entries = holder if isinstance(holder, dict) else vars(holder)
            if not isinstance(entries.get(part), argparse.Namespace | dict):
                entries[part] = Namespace()
            holder = entries[part]
        (holder if isinstance(holder, dict) else vars(holder))[name] = value

    def __delitem__(self, key: str) -> None:
        parent, _, name = key.rpartition(".")
        holder = self[parent] if parent else self
        del (holder if isinstance(holder, dict) else vars(holder))[name]

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self.get(key, _MISSING) is not _MISSING

    def __bool__(self) -> bool:
        return bool(vars(self))

    def __len__(self) -> int:
        return len(vars(self))

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a dotted key, or ``default`` if the key is missing."""
        try:
            return self[key]
        except KeyError:
            return default

    def pop(self, key: str, default: Any = _MISSING) -> Any:
        """Remove a dotted key and return its value, or ``default`` if the key is missing.

        Raises:
            KeyError: If the key is missing and ``default`` is not passed.
        """
        value = self.get(key, default)
        if value is _MISSING:
            raise KeyError(key)
        if key in self:
            del self[key]
        return value

    def update(self, value: Any, key: str | None = None) -> Namespace:
        """Set the value of ``key``, or all values in ``value`` if ``key`` is None. Return this namespace."""
        if key is not None:
            self[key] = value
        else:
            for name, item in Namespace(value).items():
                self[name] = item
        return self

    def items(self, branches: bool = False) -> Iterator[tuple[str, Any]]:
        """Iterate over dotted keys and values. ``branches`` adds the nested namespaces themselves."""
        for name, value in vars(self).items():
            if isinstance(value, Namespace):
                if branches:
                    yield name, value
                for inner_name, inner_value in value.items(branches):
                    yield f"{name}.{inner_name}", inner_value
            else:
                yield name, value

    def keys(self, branches: bool = False) -> Iterator[str]:
        """Iterate over dotted keys. ``branches`` adds the keys of the nested namespaces themselves."""
        return (key for key, _ in self.items(branches))

    def values(self, branches: bool = False) -> Iterator[Any]:
        """Iterate over the values of dotted keys. ``branches`` adds the nested namespaces themselves."""
        return (value for _, value in self.items(branches))

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as nested dicts."""
        return {name: _convert_to_dicts(value) for name, value in vars(self).items()}

    def as_flat(self) -> argparse.Namespace:
        """Return a plain namespace with one attribute per dotted key."""
        return argparse.Namespace(**dict(self.items()))

    def clone(self) -> Namespace:
        """Return a copy with copies of nested namespaces, dicts and lists."""
        copied = Namespace()
        vars(copied).update({name: _copy(value) for name, value in vars(self).items()})
        return copied


def _copy(value: Any) -> Any:
    if isinstance(value, Namespace):
        return value.clone()
    if type(value) is dict:
        return {name: _copy(item) for name, item in value.items()}
    return [_copy(item) for item in value] if type(value) is list else value


def _convert_to_dicts(value: Any) -> Any:
    if isinstance(value, Namespace):
        return value.as_dict()
    if type(value) is dict:
        return {name: _convert_to_dicts(item) for name, item in value.items()}
    return [_convert_to_dicts(item) for item in value] if type(value) is list else value
