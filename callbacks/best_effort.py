"""Base class of callbacks that only display or measure. By default, an error in such a callback never ends a run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..common.messages import warn
from .callback import Callback

if TYPE_CHECKING:
    from ..trainer import TaskModule, Trainer


class BestEffortCallback(Callback):
    """Callback that is not essential for training. An error disables it for the rest of the stage, with a warning.

    Attributes:
        strict: Whether errors in the callback are raised instead of reported as a warning. Default: False.
    """

    strict: bool = False
    _calls_itself = ""  # name in the warning; the class's if empty
    _broken = False

    def setup(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """Enable the callback for a new stage."""
        self._broken = False

    def _safely(self, work: Callable[..., Any], *args: Any) -> Any:
        """Call ``work`` unless the callback is disabled. Disable it after an error, or raise if ``strict`` is set."""
        if self._broken:
            return None
        try:
            return work(*args)
        except Exception as error:
            if self.strict:
                raise
            self._broken = True
            with contextlib.suppress(Exception):
                self._switch_off()
            with contextlib.suppress(Exception):  # standard error may be closed, or warnings may be errors
                name = self._calls_itself or type(self).__name__
                warn(f"{name} failed and is disabled: {type(error).__name__}: {error}")
            return None

    def _switch_off(self) -> None:
        """Release resources, such as an open progress bar, when the callback is disabled. Does nothing by default."""
