"""Default callbacks and loggers of a Trainer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from .. import callbacks
from ..callbacks import Callback
from ..common.validation import check_bool
from ..loggers import Logger
from . import logging

T = TypeVar("T")

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
    """Return the requested callbacks, and the default callback of each kind that is enabled and missing.

    Args:
        requested: Callbacks that the user passed.
        checkpointing: Whether to add a `ModelCheckpoint`; None means True.
        progress_bar: Whether to add a `TQDMProgressBar`; None means True.
        model_summary: Whether to add a `ModelSummary`, or a `RichModelSummary` beside a `RichProgressBar`; None means
            True.
        report: Whether to add a `RunReport`; None means the value of ``in_folder``.
        in_folder: Whether a logger has a folder for the run.
        collects_garbage: Whether to add a `GarbageCollection`. Default: False.

    Raises:
        TypeError, ValueError: If an argument is invalid, or a flag other than ``enable_model_summary`` disables a
            callback that was passed.
    """
    chosen = as_callbacks("callbacks", requested)
    has_rich = any(isinstance(callback, callbacks.RichProgressBar) for callback in chosen)
    summary = callbacks.RichModelSummary if has_rich else callbacks.ModelSummary
    defaults: tuple[tuple[str, bool | None, type[Callback], type[Callback]], ...] = (
        ("enable_model_summary", model_summary, callbacks.ModelSummary, summary),
        ("enable_progress_bar", progress_bar, callbacks.ProgressBar, callbacks.TQDMProgressBar),
        ("enable_checkpointing", checkpointing, callbacks.Checkpoint, callbacks.ModelCheckpoint),
        ("enable_report", report, callbacks.RunReport, callbacks.RunReport),
    )
    for flag, enabled, kind, default in defaults:
        if enabled is not None:
            check_bool(flag, enabled)
        # A callback that saves only after an error does not replace one that saves during the run.
        present = [c for c in chosen if isinstance(c, kind) and not isinstance(c, callbacks.OnExceptionCheckpoint)]
        # A callback with a keeper saves nothing in the run's folder, so the flag does not concern it.
        saving = next((callback for callback in present if not getattr(callback, "keeper", "")), None)
        # A summary beside enable_model_summary=False is shown, as in Lightning: the flag concerns only the default.
        if enabled is False and saving is not None and kind is not callbacks.ModelSummary:
            raise ValueError(
                f"{flag}=False contradicts the {type(saving).__name__} in callbacks. Remove one of the two."
            )
        if not present and enabled is not False and (enabled or in_folder or kind is not callbacks.RunReport):
            chosen.append(default())
    if collects_garbage and not any(isinstance(callback, callbacks.GarbageCollection) for callback in chosen):
        chosen.append(callbacks.GarbageCollection(every_n_steps=_STEPS_PER_COLLECTION))
    return chosen


def drop_idle(chosen: list[Callback]) -> list[Callback]:
    """Return the callbacks without those that a ``fast_dev_run`` never calls, though scripts still find them."""
    idle = (callbacks.ModelCheckpoint, callbacks.EarlyStopping, callbacks.RunReport)
    return [callback for callback in chosen if not isinstance(callback, idle)]


def as_callbacks(label: str, value: Any) -> list[Callback]:
    """Return callbacks as a list.

    Args:
        label: Name of the argument, for messages.
        value: One callback, several callbacks, or None.

    Raises:
        TypeError, ValueError: If an object is not a callback, or is listed twice.
    """
    rule = f"{label} must be a treadle.Callback or a list of Callbacks"
    return _as_list(Callback, label, value, rule, "every hook would run twice")


def choose_loggers(requested: Any, root: str, silent: bool) -> list[Logger]:
    """Return the requested loggers. True and None mean TensorBoard below ``root``.

    Args:
        requested: A bool, None, one `Logger`, or several.
        root: Directory in which the default logger writes.
        silent: Return one logger that stores nothing, unless ``requested`` is False.

    Raises:
        TypeError, ValueError: If an object is not a logger, or is listed twice.
    """
    if requested is False:
        return []
    if silent:
        return [logging.SilentLogger()]
    if requested is None or requested is True:
        from ..loggers import TensorBoardLogger

        return [TensorBoardLogger(root)]
    rule = "logger must be True, False, a treadle.loggers.Logger or a list of Loggers"
    return _as_list(Logger, "logger", requested, rule, "it would log each metric twice")  # type: ignore[type-abstract]


def _as_list(kind: type[T], label: str, value: Any, rule: str, effect: str) -> list[T]:
    """Return one object or several, such as a list or ListConfig, as a list; check the kind, and that none is twice."""
    several = isinstance(value, Iterable) and not isinstance(value, type | str | Mapping | kind)
    items = [] if value is None else list(value) if several else [value]
    for number, item in enumerate(items):
        if not isinstance(item, kind):
            hint = f" Pass {item.__name__}() instead of the class." if isinstance(item, type) else ""
            raise TypeError(f"{rule}, not {item!r}.{hint}")
        if any(item is previous for previous in items[:number]):
            raise ValueError(
                f"{label} contains the same {type(item).__name__} object twice, so {effect}. Remove the second one."
            )
    return items
