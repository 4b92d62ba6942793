"""Base class of progress bars that are drawn."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ...common.messages import announce, logger
from ...common.validation import check_bool, check_int, check_number
from .progress_bar import ProgressBar

if TYPE_CHECKING:
    from ...trainer import TaskModule, Trainer

_REDRAW_EVERY = 0.1  # seconds; faster updates are unreadable
_FIRST_EPOCHS = 10  # each has a line; then there is at most one line per second, because epochs may take milliseconds
_MOST_VALUES = 8  # in the line of an epoch


class DrawnBar(ProgressBar):
    """Base class of progress bars that show the epoch and any evaluation, or print lines if no bar can be drawn.

    Only rank zero draws or prints. Epochs are counted from 1, as in ``epoch 1/40``. An error while drawing or printing
    disables the bar with a warning, unless the attribute ``strict`` is True.

    Args:
        refresh_rate: Rate of redraws, in a unit that subclasses define; 0 draws and prints nothing.
        leave: Leave the bar of each epoch on the screen.
        line_every: Minimum number of seconds between the lines that are printed within an epoch or an evaluation.
        epoch_lines: Print a line after each epoch. None prints it if no bar can be drawn.
    """

    _calls_itself = "the progress bar"

    def __init__(self, refresh_rate: int, leave: bool, line_every: float, epoch_lines: bool | None) -> None:
        super().__init__()
        self._refresh_rate = check_int("refresh_rate", refresh_rate, 0, "draws nothing")
        self._leave = check_bool("leave", leave)
        self.line_every = check_number("line_every", line_every, 0.0)
        self.epoch_lines = None if epoch_lines is None else check_bool("epoch_lines", epoch_lines)
        self._enabled = True
        self._terminal = False
        self._due = math.inf  # time of the next redraw; infinite if nothing is drawn
        self._every = _REDRAW_EVERY
        self._batches = 1  # batches between redraws
        self._shown = 0  # batches shown by the bar of the epoch or of the evaluation
        self._text = ""
        self._pace = _Pace()
        self._prints_epochs = False
        self._began, self._first_step = 0.0, 0  # time and optimizer step at which the epoch began
        self._printed, self._lines = -math.inf, 0  # time of the latest line of an epoch, and their number
        self._unprinted = ""  # line of the latest epoch, if it was too early to print it

    @property
    def refresh_rate(self) -> int:
        """Rate of redraws, in the unit of the constructor's argument."""
        return self._refresh_rate

    @property
    def leave(self) -> bool:
        """True if the bar of each epoch is left on the screen."""
        return self._leave

    @property
    def is_enabled(self) -> bool:
        """True if drawing is enabled."""
        return self._enabled and self._refresh_rate > 0

    @property
    def is_disabled(self) -> bool:
        """True if drawing is disabled."""
        return not self.is_enabled

    def enable(self) -> None:
        """Enable drawing from the next stage on."""
        self._enabled = True

    def disable(self) -> None:
        """Stop drawing, and close open bars."""
        self._enabled = False
        self._switch_off()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print above the bar, if one is drawn.

        Args:
            args: Positional arguments of ``print``.
            kwargs: Keyword arguments of ``print``.
        """
        if self._terminal:
            self._safely(self._clear)
        print(*args, **kwargs)
        if self._terminal:
            self._safely(self._come_back)

    # -- appearance ----------------------------------------------------------------------------------------------

    def _can_draw(self) -> bool:
        return is_terminal(sys.stderr) or "ipykernel" in sys.modules

    # Nothing is drawn unless a subclass overrides these methods.
    def _open_epoch(self, text: str, done: int, total: int | None) -> None:
        """Draw the bar of a new epoch."""

    def _show_epoch(self, done: int, values: dict[str, Any]) -> None:
        """Redraw the epoch's bar."""

    def _close_epoch(self) -> None:
        """Close the epoch's bar, but leave it on the screen."""

    def _open_evaluation(self, kind: str, text: str, total: int | None) -> None:
        """Draw an evaluation's bar. ``kind`` is ``"sanity"``, ``"validation"``, ``"test"`` or ``"predict"``."""

    def _show_evaluation(self, done: int) -> None:
        """Redraw the evaluation's bar."""

    def _close_evaluation(self, done: int) -> None:
        """Close the evaluation's bar."""

    def _clear(self) -> None:
        """Erase the bars until the next redraw."""

    def _come_back(self) -> None:
        """Redraw the bars that `_clear` erased."""

    def _close(self) -> None:
        """Leave the last bars on the screen and release them."""

    # -- the run -------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """Choose between bars, lines and no output."""
        super().setup(trainer, pl_module, stage)
        active = self.is_enabled and trainer.is_global_zero
        self._terminal = active and bool(self._safely(self._can_draw))
        self._due = math.inf if not active else time.monotonic() + (0.0 if self._terminal else self.line_every)
        self._prints_epochs = active and (not self._terminal if self.epoch_lines is None else self.epoch_lines)
        self._printed, self._lines, self._unprinted = -math.inf, 0, ""
        if self._terminal:
            logger.addFilter(self._make_room)

    def teardown(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """Close open bars, and print the line of the last epoch before an error."""
        self._print_epoch()
        self._switch_off()

    def _switch_off(self) -> None:
        self._due, self._terminal, self._prints_epochs, self._unprinted = math.inf, False, False, ""
        logger.removeFilter(self._make_room)
        with contextlib.suppress(Exception):
            self._close()

    def _make_room(self, record: logging.LogRecord) -> bool:
        self._safely(self._clear)
        return True

    # -- training ------------------------------------------------------------------------------------------------

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Start the epoch's bar."""
        done = self._shown = trainer.progress.batch
        self._began, self._first_step = time.monotonic(), trainer.progress.step
        self._pace.restart(done)
        if self._terminal:
            self._safely(self._begin_epoch, trainer, done)
        elif self._prints_epochs:
            self._due = self._began + self.line_every

    def _begin_epoch(self, trainer: Trainer, done: int) -> None:
        description = self._get_train_description(trainer.progress.epoch)
        self._open_epoch(description, done, drop_infinite(self.total_train_batches))
        self._due = 0.0

    def _get_train_description(self, current_epoch: int) -> str:  # Lightning's name, which subclasses override
        epochs = self.trainer.max_epochs
        total = f"/{epochs}" if epochs is not None and epochs > 0 else ""
        return f"{self.train_description} {current_epoch + 1}{total}"

    def on_step_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Redraw, if this is due."""
        if time.monotonic() >= self._due:
            self._safely(self._draw_training, trainer, pl_module)

    def _draw_training(self, trainer: Trainer, task: TaskModule, always: bool = False) -> None:
        done = trainer.progress.batch
        if not self._terminal:
            position, values = self._describe_position(trainer, done), self.get_metrics(trainer, task)
            self._write_line(position, done, self.total_train_batches, values, "left in the epoch")
            return
        self._due = time.monotonic() + self._every
        if always or done - self._shown >= self._batches:
            self._shown = done
            self._show_epoch(done, self._format_values(self.get_metrics(trainer, task)))

    def _format_values(self, values: dict[str, Any]) -> dict[str, str]:
        return {name: self._format(value) for name, value in values.items()}

    def _format(self, value: Any) -> str:
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    def _describe_position(self, trainer: Trainer, done: int) -> str:
        progress, steps = trainer.progress, trainer.estimated_stepping_batches
        batch, step = _format_share(done, self.total_train_batches), _format_share(progress.step, steps)
        return f"{self._get_train_description(trainer.progress.epoch)}, batch {batch}, step {step}"

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Draw the bar's final state, and print the epoch's line."""
        if self._terminal:
            self._safely(self._end_epoch, trainer, pl_module)
        if self._prints_epochs:
            self._safely(self._write_epoch, trainer, pl_module)

    def _end_epoch(self, trainer: Trainer, task: TaskModule) -> None:
        self._draw_training(trainer, task, always=True)
        if self._leave:
            self._close_epoch()

    def _write_epoch(self, trainer: Trainer, task: TaskModule) -> None:
        """Print a line with the epoch's values and duration, or keep it for later if many lines were printed."""
        from ..reporting import format_duration

        progress, current_time = trainer.progress, time.monotonic()
        words = [str(self._get_train_description(trainer.progress.epoch))]  # it may be a rich Text
        if not progress.epoch_is_over:  # a limit ended the run
            words[0] += f", batch {_format_share(progress.batch, self.total_train_batches)}"
        values = self.get_epoch_metrics(trainer, task, self._first_step)
        words += [f"{name} {self._format(value)}" for name, value in list(values.items())[:_MOST_VALUES]]
        words += [f"and {len(values) - _MOST_VALUES} more"] * (len(values) > _MOST_VALUES)
        self._unprinted = "  ".join([*words, format_duration(current_time - self._began)])
        if self._lines < _FIRST_EPOCHS or current_time >= self._printed + 1.0:
            self._print_epoch()

    def _print_epoch(self) -> None:
        if self._unprinted:
            self._printed, self._lines = time.monotonic(), self._lines + 1
            announce(self._unprinted)
            self._unprinted = ""

    def on_train_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Leave the last bar on the screen, and print the line of the last epoch."""
        self._print_epoch()
        if self._terminal:
            self._safely(self._close)

    def _write_line(
        self, position: str, done: int, total: int | float | None, values: dict[str, Any], unit: str = "left"
    ) -> None:
        self._due = time.monotonic() + self.line_every
        shown = [f"{name} = {text}" for name, text in self._format_values(values).items()]
        announce(", ".join([position, *self._pace.describe(done, drop_infinite(total), unit), *shown]))

    # -- evaluation ----------------------------------------------------------------------------------------------

    def _begin(self, trainer: Trainer, kind: str, text: str) -> None:
        self._text = text
        if self._terminal:
            self._shown = 0
            self._safely(self._open_evaluation, kind, text, trainer.evaluation_total)
        elif self._due < math.inf:
            self._pace.restart(0)

    def _draw_evaluation(self, trainer: Trainer) -> None:
        done, total = trainer.evaluation_batch + 1, trainer.evaluation_total
        if not self._terminal:
            self._write_line(f"{self._text}, batch {_format_share(done, total)}", done, total, {})
            return
        self._due = time.monotonic() + self._every
        if done - self._shown >= self._batches:
            self._shown = done
            self._show_evaluation(done)

    def on_validation_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Start the bar of the validation."""
        if trainer.sanity_checking:
            self._begin(trainer, "sanity", self.sanity_check_description)
        else:
            self._begin(trainer, "validation", self.validation_description)

    def on_test_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Start the bar of the test."""
        self._begin(trainer, "test", self.test_description)

    def on_predict_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Start the bar of the prediction."""
        self._begin(trainer, "predict", self.predict_description)

    def on_validation_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Redraw, if this is due."""
        if time.monotonic() >= self._due:
            self._safely(self._draw_evaluation, trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Close the bar of the evaluation."""
        if self._terminal:
            self._safely(self._close_evaluation, trainer.evaluation_batch + 1)
        if trainer.stage == "fit":
            self._shown = trainer.progress.batch
            self._pace.restart(self._shown)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end  # type: ignore[assignment]  # names differ
    on_test_end = on_predict_end = on_validation_end


class _Pace:
    def __init__(self) -> None:
        self.restart(0)

    def restart(self, done: int) -> None:
        self.since, self.done = time.monotonic(), done

    def describe(self, done: int, total: int | None, unit: str) -> list[str]:
        current_time = time.monotonic()
        speed = (done - self.done) / max(current_time - self.since, 1e-9)
        self.since, self.done = current_time, done
        if speed <= 0:
            return []
        words = [f"{speed:.1f} batches/s" if speed >= 1 else f"{1 / speed:.1f} s/batch"]
        return words if total is None else [*words, f"{timedelta(seconds=round((total - done) / speed))} {unit}"]


def is_terminal(stream: Any) -> bool:
    """Return whether a stream is a terminal."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError, OSError):  # the stream is missing or closed
        return False


def drop_infinite(total: int | float | None) -> int | None:
    """Return a number of batches, or None if it is unknown."""
    return None if total is None or math.isinf(total) else int(total)


def _format_share(done: int, total: int | float | None) -> str:
    finite_total = drop_infinite(total)
    return str(done) if finite_total is None or finite_total < 0 else f"{done}/{finite_total}"
