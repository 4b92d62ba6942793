"""Writing of configurations: their conversion to plain data, and of plain data to YAML."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

import torch
import yaml

from ...common import __version__
from ...common.remote_path import RemotePath, as_path
from ..config import parse_scalar
from ..config.instantiate import PLAIN
from .settings import describe_import_path, find_class


class NotWritten(Exception):
    """Error raised for an object that cannot be represented as text."""


class _Dumper(yaml.SafeDumper):
    """YAML dumper that quotes text that YAML 1.2 would read as a different type."""

    def represent_text(self, text: str) -> yaml.Node:
        style = None if isinstance(parse_scalar(text), str) else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_representer(str, _Dumper.represent_text)


def dump_yaml(data: Any) -> str:
    """Return plain data as YAML."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, default_flow_style=False, allow_unicode=True)


def to_plain(value: Any) -> Any:
    """Return a configuration as plain data, without entries that cannot be represented as text.

    Raises:
        NotWritten: If the value itself, or an item of a list, cannot be represented as text.
    """
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    if isinstance(value, Mapping):
        entries = {}
        for key, item in value.items():
            try:
                entries[key] = to_plain(item)
            except NotWritten:
                continue
        return entries
    if isinstance(value, list | tuple | set | frozenset):
        return [to_plain(item) for item in value]
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or type(value) in PLAIN:
        return value
    if isinstance(value, FilePath | torch.dtype | torch.device):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return to_plain({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if callable(value) and (path := describe_import_path(value)) and find_class(path) == value:
        return path
    raise NotWritten


def drop_none(data: Any) -> Any:
    """Return nested dicts without entries that are None."""
    if isinstance(data, dict):
        return {key: drop_none(item) for key, item in data.items() if item is not None}
    return data


def drop_equal(data: Any, defaults: Any) -> Any:
    """Return nested dicts without entries that equal their defaults.

    The settings of an object, a dict with ``class_path``, are kept or dropped as a whole.
    """
    kept = {}
    for key, item in data.items():
        if isinstance(item, dict) and isinstance(defaults.get(key), dict) and "class_path" not in item:
            item = drop_equal(item, defaults[key])
            if not item:
                continue
        elif key in defaults and item == defaults[key]:
            continue
        kept[key] = item
    return kept


def escape_references(data: Any) -> Any:
    """Return data with each ``${`` escaped, so it is read as text and not as a reference."""
    if isinstance(data, dict):
        return {key: escape_references(item) for key, item in data.items()}
    if isinstance(data, list):
        return [escape_references(item) for item in data]
    return data.replace("${", "\\${") if isinstance(data, str) else data


def dump_config(data: Any, format: str | None, header: Sequence[str] | None, interpolates: bool) -> str:
    """Return plain data as JSON or, with ``header`` as comments, as YAML.

    ``format`` is that of `LightningArgumentParser.dump`. ``interpolates`` is whether a reader interpolates ``${...}``.
    """
    if format in ("json", "json_indented"):
        return json.dumps(data, indent=2 if format == "json_indented" else None)
    header = [f"treadle=={__version__}"] if header is None else header
    return "".join(f"# {line}\n" for line in header) + dump_yaml(escape_references(data) if interpolates else data)


def save_text(text: str, path: str | FilePath, overwrite: bool) -> None:
    """Write text to a path or URL. Readers see the complete file or none.

    Raises:
        FileExistsError: If the file exists and ``overwrite`` is False.
        OSError: If the file cannot be written.
    """
    file = as_path(path)
    if file.exists() and not overwrite:
        raise FileExistsError(f"{file} exists. Pass overwrite=True, or write to another file.")
    if isinstance(file, RemotePath):
        file.write_bytes(text.encode())
        return
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, file)
