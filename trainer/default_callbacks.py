"""The callbacks and loggers a Trainer has when it is told nothing, or told True."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..callbacks import (
    Callback,
    Checkpoint,
    EarlyStopping,
    GarbageCollection,
    ModelCheckpoint,
    ModelSummary,
    OnExceptionCheckpoint,
    ProgressBar,
    RunReport,
    TQDMProgressBar,
)
from ..common.validation import check_bool
from ..loggers import Logger, TensorBoardLogger
from .logging import SilentLogger

_STEPS_PER_COLLECTION = 100


def choose_callbacks(
    requested: Iterable[Callback] | Callback | None,
    *,
    checkpointing: bool | None,
    progress_bar: bool | None,
    model_summary: bool | None,
    report: bool | None,
    in_folder: bool,
    collects_garbage: bool = False,
) -> list[Callback]:
    """The callbacks given, and a default of each kind that is wanted and missing.

    Args:
        requested: One, several or none.
        checkpointing: Whether a `ModelCheckpoint` is wanted (default yes).
        progress_bar: Whether a `TQDMProgressBar` is wanted (default yes).
        model_summary: Whether a `ModelSummary` is wanted (default yes).
        report: Whether a `RunReport` is wanted (default: if the run is ``in_folder``).
        in_folder: Whether a logger has a folder for the run.
        collects_garbage: Whether a `GarbageCollection` is wanted, where several processes would wait for each other's.

    Raises:
        TypeError: For something that is no callback.
        ValueError: If a callback was given that a flag forbids.
    """
    callbacks = as_callbacks("callbacks", requested)
    defaults: tuple[tuple[str, bool | None, type[Callback], type[Callback]], ...] = (
        ("enable_model_summary", model_summary, ModelSummary, ModelSummary),
        ("enable_progress_bar", progress_bar, ProgressBar, TQDMProgressBar),
        ("enable_checkpointing", checkpointing, Checkpoint, ModelCheckpoint),
        ("enable_report", report, RunReport, RunReport),
    )
    for flag, enabled, kind, default in defaults:
        if enabled is not None:
            check_bool(flag, enabled)
        # What saves when an error comes is in addition to what saves while all goes well.
        present = [c for c in callbacks if isinstance(c, kind) and not isinstance(c, OnExceptionCheckpoint)]
        # Nothing is saved in the run's folder by one whose checkpoints somebody else keeps.
        if enabled is False and any(not getattr(callback, "keeper", "") for callback in present):
            raise ValueError(f"{flag}=False contradicts the {kind.__name__} in callbacks; drop one of them.")
        if not present and enabled is not False and (enabled or in_folder or kind is not RunReport):
            callbacks.append(default())
    if collects_garbage and not any(isinstance(callback, GarbageCollection) for callback in callbacks):
        callbacks.append(GarbageCollection(every_n_steps=_STEPS_PER_COLLECTION))
    return callbacks


def set_aside(callbacks: list[Callback]) -> list[Callback]:
    """Remove the callbacks that save or stop from ``callbacks``, as ``fast_dev_run`` does; return them."""
    removed: list[Callback] = [c for c in callbacks if isinstance(c, ModelCheckpoint | EarlyStopping | RunReport)]
    callbacks[:] = [c for c in callbacks if not any(c is other for other in removed)]
    return removed


def as_callbacks(label: str, value: Any) -> list[Callback]:
    """One callback, several or none, as a list.

    Raises:
        TypeError: For something that is no callback.
        ValueError: For one that is there twice.
    """
    if value is not None and not isinstance(value, Callback) and not _is_several(value):
        raise TypeError(f"{label} must be a treadle.Callback or several of them, not {value!r}.")
    callbacks = [] if value is None else [value] if isinstance(value, Callback) else list(value)
    for number, callback in enumerate(callbacks):
        if not isinstance(callback, Callback):
            hint = ": put () behind it" if isinstance(callback, type) else ""
            raise TypeError(f"{label} must be treadle.Callback objects, not {callback!r}{hint}.")
        if any(callback is previous for previous in callbacks[:number]):
            raise ValueError(
                f"{label} has the same {type(callback).__name__} object twice; every hook would run twice."
            )
    return callbacks


def choose_loggers(requested: Any, root: str, silent: bool) -> list[Logger]:
    """The loggers given; TensorBoard under ``root`` for True or None, none for False.

    Args:
        requested: A bool, None, a `Logger`, or several.
        root: The directory for a default logger.
        silent: Put one that keeps nothing in their place.

    Raises:
        TypeError: For something that is no logger.
        ValueError: For one that is there twice.
    """
    if requested is False:
        return []
    if silent:
        return [SilentLogger()]
    if requested is None or requested is True:
        return [TensorBoardLogger(root)]
    loggers = list(requested) if not isinstance(requested, Logger) and _is_several(requested) else [requested]
    for number, logger in enumerate(loggers):
        if not isinstance(logger, Logger):
            raise TypeError(f"logger must be True, False, a treadle.loggers.Logger or several of them, not {logger!r}.")
        if any(logger is previous for previous in loggers[:number]):
            raise ValueError(f"logger has the same {type(logger).__name__} object twice; it would get each row twice.")
    return loggers


def _is_several(value: Any) -> bool:
    """Whether it is a list or the like, such as OmegaConf's. A class, a text or a dict is no list of objects."""
    return isinstance(value, Iterable) and not isinstance(value, type | str | Mapping)
