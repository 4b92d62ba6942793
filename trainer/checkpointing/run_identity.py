"""Comparison of a checkpoint with the current run, for checkpoints that are requested by a word such as "last"."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...engine.checkpoint import OpenCheckpoint, compare_weights
from ..core import DataModule, TaskModule, overrides
from ..loop import callback_overrides

if TYPE_CHECKING:
    from ..trainer import Trainer

_PACKAGE = __name__.partition(".")[0]
_MOST_VALUES = 1000  # values of a configuration that are compared
_MOST_CHARACTERS = 1000  # characters of a value that are compared

# Hyperparameters that an ordinary resume may change, by the last component of their name. They set how long the run
# is, its hardware, the places of files and what is printed; none of them makes it another experiment.
_LENGTHS = r"(max|min|num|n|total|num_train|train)_(epochs|iters|iterations)|epochs|max_time|t_max|patience"
_STEPS = r"(max|min|total|train|training|num_train|num_training)_steps"
_BATCHES = r"(.*_)?batch_size|accumulate_grad_batches|gradient_accumulation_steps|prefetch_factor"
_HARDWARE = (
    r"(.*_)?workers|pin_memory|persistent_workers|(n_|num_)?(gpus|devices|nodes)|device|accelerator|strategy|precision|"
    r"world_size|num_processes|(local_)?rank|compile"
)
_PLACES = r"(.*_)?(dir|directory|dirpath|path|paths|root|folder|file|url|uri)|output"
_NAMES = r"(run|experiment|project)(_name|_id)?|tags|notes|(wandb|mlflow)(_.*)?"
_PRINTED = r"(log|print|eval|save|val)_(every|interval|freq|frequency)(_.*)?|verbose|debug|logger|progress_bar"
_RESUME = r"ckpt(_path)?|checkpoint|resume(_.*)?"
_MAY_DIFFER = "|".join((_LENGTHS, _STEPS, _BATCHES, _HARDWARE, _PLACES, _NAMES, _PRINTED, _RESUME))


def class_name(cls: type) -> str:
    """Return a class's full name.

    For a class that is defined in the running script, the name of the script or of the ``-m`` module replaces
    ``__main__``. For a class that is defined in a notebook, ``__main__`` stays.
    """
    module = cls.__module__
    if module in ("__main__", "__mp_main__"):
        script = sys.modules.get(module)
        spec, file = getattr(script, "__spec__", None), getattr(script, "__file__", None)
        module = spec.name if spec is not None else Path(file).stem if file else "__main__"
    return f"{module}.{cls.__qualname__}"


def configuration(task: TaskModule, datamodule: DataModule | None) -> dict[str, Any]:
    """Return the plain hyperparameters of the task and data module as of the first call, by dotted name.

    The first call precedes ``setup`` and the searches, which may change hyperparameters. The names of the data module's
    hyperparameters begin with ``data.``.
    """
    values: dict[str, Any] = {}
    for owner, prefix in ((task, ""), (datamodule, "data.")):
        if owner is not None:
            if "_configuration" not in owner.__dict__:
                owner.__dict__["_configuration"] = dict(_iterate_plain_values(owner.plain_hparams()))
            values |= {f"{prefix}{name}": value for name, value in owner.__dict__["_configuration"].items()}
    return values


def _iterate_plain_values(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the values to compare in plain data, which consists of dicts, lists, text, numbers and None."""
    if isinstance(value, dict) and depth < 8:
        for key in list(value)[:_MOST_VALUES]:
            yield from _iterate_plain_values(value[key], f"{name}.{key}" if name else key, depth + 1)
    elif isinstance(value, list):
        if len(value) <= _MOST_CHARACTERS and not any(isinstance(item, dict | list) for item in value):
            yield name, value
    elif not isinstance(value, dict | str) or (isinstance(value, str) and len(value) <= _MOST_CHARACTERS):
        yield name, value


def differences(trainer: Trainer, opened: OpenCheckpoint) -> list[str]:
    """Return a description of each difference that shows that a checkpoint is from another run.

    The task's class, the hyperparameters and, with ``strict_loading``, the names and shapes of the weights are
    compared. Hyperparameters that an ordinary resume may change, such as the batch size, are ignored.
    """
    task = trainer.task
    saved_class = opened.manifest.info.get("task")
    if isinstance(saved_class, str) and not _matches_class(saved_class, type(task)):
        return [f"task {saved_class} in the checkpoint, {class_name(type(task))} in this run"]
    saved_values = opened.manifest.info.get("configuration")
    lines = []
    if isinstance(saved_values, dict):
        values = configuration(task, trainer.datamodule)
        lines = [
            f"{name}={saved_values[name]!r} in the checkpoint, {values[name]!r} in this run"
            for name in values
            if name in saved_values and _makes_another_run(name, saved_values[name], values[name])
        ]
    if lines or not task.strict_loading:
        return lines
    return compare_weights(task, opened, complete=is_complete(trainer, task))


def _matches_class(saved: str, cls: type) -> bool:
    """Return whether a saved class name refers to this class."""
    name = class_name(cls)
    if not saved.endswith(f".{cls.__qualname__}"):
        return False
    saved_module, current_module = (text.removesuffix(f".{cls.__qualname__}") for text in (saved, name))
    # A notebook has no name to compare; a file has another prefix when it is run from within its package.
    return (
        "__main__" in (saved_module, current_module)
        or f".{saved_module}".endswith(f".{current_module}")
        or f".{current_module}".endswith(f".{saved_module}")
    )


def _makes_another_run(name: str, saved: Any, value: Any) -> bool:
    """Return whether a changed hyperparameter means that a checkpoint belongs to another run."""
    if saved == value or (saved != saved and value != value):
        return False
    return not (re.fullmatch(_MAY_DIFFER, name.rpartition(".")[2], re.I) or _is_place(saved) or _is_place(value))


def _is_place(value: Any) -> bool:
    """Return whether a value is a path or a URL, or a list of paths or URLs."""
    if isinstance(value, list):
        return bool(value) and all(map(_is_place, value))
    if not isinstance(value, str):
        return False
    return value.startswith(("~", ".")) or os.path.isabs(value) or "://" in value or ("/" in value and _exists(value))


def _exists(value: str) -> bool:
    try:
        return os.path.exists(value)
    except ValueError:  # a null character
        return False


def is_complete(trainer: Trainer, task: TaskModule) -> bool:
    """Return whether the model is complete: no custom ``setup`` or ``configure_model`` can add to it later."""
    if any(overrides(task, name) for name in ("configure_model", "setup")):
        return False
    return not any(
        callback_overrides(callback, "setup")
        for callback in trainer.callbacks
        if type(callback).__module__.partition(".")[0] != _PACKAGE or "setup" in vars(callback)
    )
