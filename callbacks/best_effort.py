"""Base class of callbacks that only display or measure."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

from ..common.messages import describe_error, warn
from .callback import Callback

if TYPE_CHECKING:
    from ..trainer import TaskModule, Trainer


_PACKAGE = __name__.partition(".")[0]


class BestEffortCallback(Callback):
    """Callback that only displays or measures. By default, an error in this work disables the callback with a warning.

    The hooks of a user's subclass count as such work.

    Attributes:
        strict: Raise an error that occurs while the callback displays or measures. If False, a warning reports the
            error, and the callback is disabled for the rest of the stage. Default: False.
    """

    strict: bool = False
    _calls_itself = ""  # name in the warning; the class's if empty
    _broken = False

    def setup(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """Enable the callback for a new stage."""
        self._broken = False

    def _safely(self, work: Callable[..., Any], *args: Any) -> Any:
        """Call ``work`` and return its result; return None if the callback is disabled.

        An exception in ``work`` disables the callback, unless ``strict`` is set.
        """
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
                warn(f"{name} failed and is disabled: {describe_error(error)}")
            return None

    def _guard(self, name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return a hook of this callback, called in `_safely` if the user's subclass defines it.

        Args:
            name: Name of the hook.
            hook: The callback's bound method.
        """
        if getattr(hook, "__module__", "").partition(".")[0] == _PACKAGE:  # it protects its own work
            return hook

        def guarded(*args: Any) -> Any:
            if name in ("setup", "teardown"):  # of a new stage, or to release resources
                self._broken = False
            return self._safely(hook, *args)

        return wraps(hook)(guarded)

    def _switch_off(self) -> None:
        """Release resources when the callback is disabled."""
