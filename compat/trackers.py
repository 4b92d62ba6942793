"""Accelerate's functions for trackers."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

from ..engine.configuration import ProjectConfiguration
from ..engine.process_state import PartialState
from ..engine.trackers import GeneralTracker, list_installed_trackers, tracker_sources
from .enums import LoggerType


def on_main_process(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a tracker's method to run on rank zero only, if the tracker's ``main_process_only`` is True."""

    @wraps(function)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "main_process_only", False) and not PartialState().is_main_process:
            return None
        return function(self, *args, **kwargs)

    return run


def get_available_trackers() -> list[LoggerType]:
    """Return the Accelerate trackers that Treadle supports and whose packages are installed."""
    return [LoggerType(name) for name in list_installed_trackers() if name in LoggerType]


def filter_trackers(log_with: Any, logging_dir: str | os.PathLike[str] | None = None) -> list[Any]:
    """Return the trackers in ``log_with``: the `GeneralTracker` objects, then each name once.

    Args:
        log_with: A name, a member of `LoggerType`, a `GeneralTracker`, a list or tuple of these, or None. ``"all"``
            selects all installed trackers.
        logging_dir: Folder for trackers that write files. Default: None.

    Raises:
        ValueError, TypeError: If a tracker is not supported, or a required ``logging_dir`` is missing.
        ModuleNotFoundError: If the package of a tracker is not installed.
    """
    if log_with is None:
        return []
    entries = list(log_with) if isinstance(log_with, list | tuple) else [log_with]
    trackers = [entry for entry in entries if isinstance(entry, GeneralTracker)]
    names = [entry for entry in entries if not isinstance(entry, GeneralTracker)]
    if any(getattr(name, "value", name) == "all" for name in names):
        return [*trackers, *get_available_trackers()]
    sources = tracker_sources(names, ProjectConfiguration(logging_dir=logging_dir))
    return [*trackers, *(LoggerType(name) if name in LoggerType else name for name in sources)]
