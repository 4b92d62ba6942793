"""Functions that save and load hyperparameters in YAML files."""

from __future__ import annotations

import ast
import io
import os
from argparse import Namespace
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

import torch
import yaml

from ...common.lazy_exports import lazy_exports
from ...common.messages import name_type, warn
from ...loggers import plain
from ...trainer import TaskModule
from ...trainer.core.hparams import make_config

__all__ = [
    "convert",
    "load_hparams_from_yaml",
    "save_hparams_to_yaml",
    "update_hparams",
]

_File = str | os.PathLike[str]


def update_hparams(hparams: MutableMapping[str, Any], updates: Mapping[str, Any]) -> None:
    """Update hyperparameters in place, nested dicts item by item."""
    for name, value in updates.items():
        if isinstance(value, Mapping) and name in hparams:
            update_hparams(hparams[name], value)
        else:
            hparams[name] = value


def convert(val: str) -> Any:
    """Return the value of a Python literal (a number, True, a list), or the text itself if it is not a literal."""
    try:
        return ast.literal_eval(val)
    except (ValueError, SyntaxError):
        return val


def load_hparams_from_yaml(config_yaml: _File, use_omegaconf: bool = True) -> Any:
    """Return the hyperparameters in a YAML file. If the file is missing, warn and return an empty dict.

    Tags in the file never run code. With ``use_omegaconf``, the result is a ``DictConfig`` if it supports all values.

    Raises:
        yaml.YAMLError: If the file is not valid YAML of plain data.
    """
    if not os.path.isfile(config_yaml):
        warn(f"the file {os.fspath(config_yaml)!r} does not exist, so there are no hyperparameters to load.")
        return {}
    values = yaml.safe_load(Path(config_yaml).read_text(encoding="utf-8"))
    return make_config(values) if use_omegaconf else values


def save_hparams_to_yaml(
    config_yaml: _File, hparams: Mapping[str, Any] | Namespace, use_omegaconf: bool = True
) -> None:
    """Write hyperparameters to a YAML file in an existing folder, as plain data. ``use_omegaconf`` is ignored.

    A value that cannot be converted to plain data is written as text.
    """
    _check_folder(config_yaml)
    text = yaml.safe_dump(plain(_as_mapping(hparams)), sort_keys=False, allow_unicode=True)
    Path(config_yaml).write_text(text, encoding="utf-8")


def _load_from_checkpoint(cls: type[TaskModule], checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
    """Return ``cls.load_from_checkpoint(...)`` as Treadle defines it, for classes that override the method."""
    return vars(TaskModule)["load_from_checkpoint"].__func__(cls, checkpoint_path, *args, **kwargs)


def _load_state(
    cls: type[TaskModule], checkpoint: Mapping[str, Any], strict: bool | None = None, **cls_kwargs_new: Any
) -> Any:
    """Return the task in the content of a checkpoint. ``cls_kwargs_new`` override the saved hyperparameters."""
    buffer = io.BytesIO()
    torch.save(dict(checkpoint), buffer)
    buffer.seek(0)
    return _load_from_checkpoint(cls, buffer, strict=strict, **cls_kwargs_new)


def _as_mapping(hparams: Any) -> Mapping[str, Any]:
    values = vars(hparams) if isinstance(hparams, Namespace) else hparams
    if not isinstance(values, Mapping):
        raise TypeError(f"hparams must be a dict or a Namespace, not {name_type(hparams)}.")
    return values


def _check_folder(file: _File) -> None:
    folder = os.path.dirname(file) or "."
    if not os.path.isdir(folder):
        raise RuntimeError(f"the folder {folder!r} for {os.fspath(file)!r} does not exist. Create it first.")


__getattr__ = lazy_exports(__name__)[0]  # the names that the tables have
