"""Accelerate's functions for trackers."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from ..engine.process_state import PartialState


def on_main_process(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a tracker's method to run on rank zero only, if the tracker's ``main_process_only`` is True."""

    @wraps(function)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "main_process_only", False) and not PartialState().is_main_process:
            return None
        return function(self, *args, **kwargs)

    return run
