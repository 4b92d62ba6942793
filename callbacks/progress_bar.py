"""The progress bar. It redraws ten times a second at most, and reads the device only then."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..strategies import announce, logger, warn
from .callback import Callback

if TYPE_CHECKING:
    from ..trainer import TaskModule, Trainer

_REDRAW_EVERY = 0.1  # seconds; faster than that nobody reads


class TQDMProgressBar(Callback):
    """A bar for the epoch and one below it for validation, on rank zero; plain lines where there is no terminal.

    What fails in drawing never ends a run: a closed terminal, or an error in an override, turns the bar off with a
    warning. Override `get_metrics` to choose what is shown beside the bar, and ``init_train_tqdm`` and its kin to
    choose how it looks.

    Args:
        refresh_rate: micro-batches between redraws, at least; 0 draws nothing. Time limits it too.
        process_position: rows to leave free above.
        leave: leave each epoch's bar on the screen, not only the last one.
        line_every: seconds between the plain lines that stand for the bar where there is no terminal.

    Attributes:
        train_progress_bar: the epoch's bar, or None.
        val_progress_bar: the bar of the validation, test or prediction that runs, or None.
    """

    after_task = 3

    def __init__(
        self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False, line_every: float = 10.0
    ) -> None:
        self.refresh_rate = refresh_rate
        self.process_position = process_position
        self.leave = leave
        self.line_every = line_every
        self.train_progress_bar: Any = None
        self.val_progress_bar: Any = None
        self._enabled = True
        self._terminal = False
        self._due = math.inf  # when to draw next; never, where there is nothing to draw
        self._evaluating = ""

    def enable(self) -> None:
        """Draw again, from the next stage on."""
        self._enabled = True

    def disable(self) -> None:
        """Draw nothing any more."""
        self._enabled, self._due = False, math.inf
        self._close()

    # -- what users override -------------------------------------------------------------------------------------

    def get_metrics(self, trainer: Trainer, pl_module: TaskModule) -> dict[str, Any]:
        """What stands beside the bar: the first logger's version as ``v_num``, and what was logged for it.

        Asked for only when the bar is drawn.
        """
        version = getattr(trainer.logger, "version", None)
        shown = {} if version in (None, "") else {"v_num": version[-4:] if isinstance(version, str) else version}
        return shown | trainer.progress_bar_metrics

    def init_train_tqdm(self) -> Any:
        """The epoch's bar; its total and its text are filled in later."""
        return self._tqdm("epoch", leave=True)

    def init_sanity_tqdm(self) -> Any:
        """The bar of the validation before training."""
        return self._tqdm("sanity check", leave=False)

    def init_validation_tqdm(self) -> Any:
        """The bar of a validation."""
        return self._tqdm("validation", leave=self.train_progress_bar is None)

    def init_test_tqdm(self) -> Any:
        """The bar of a test."""
        return self._tqdm("test", leave=True)

    def init_predict_tqdm(self) -> Any:
        """The bar of a prediction."""
        return self._tqdm("predict", leave=True)

    def _tqdm(self, text: str, leave: bool) -> Any:
        from tqdm.auto import tqdm

        return tqdm(
            desc=text,
            position=self.process_position + (self.train_progress_bar is not None),
            leave=leave,
            dynamic_ncols=True,
            file=sys.stderr,
            mininterval=0.0,
            miniters=1,
            delay=1e-9,  # not drawn when made: it has no total yet, and a short validation need not flicker
        )

    # -- the run -------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """Find out where to draw: on rank zero only."""
        active = self._enabled and self.refresh_rate > 0 and trainer.is_global_zero
        self._terminal = active and (_is_terminal(sys.stderr) or "ipykernel" in sys.modules)
        self._due = math.inf if not active else time.monotonic() + (0.0 if self._terminal else self.line_every)
        if self._terminal:
            logger.addFilter(self._make_room)

    def teardown(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """Close what is open."""
        self._close()

    def _close(self) -> None:
        logger.removeFilter(self._make_room)
        for bar in (self.val_progress_bar, self.train_progress_bar):
            if bar is not None:
                with contextlib.suppress(Exception):
                    bar.close()
        self.train_progress_bar = self.val_progress_bar = None

    def _make_room(self, record: logging.LogRecord) -> bool:
        """Wipe the bars off before a message of ours is written; they come back with the next redraw."""
        for bar in (self.val_progress_bar, self.train_progress_bar):
            if bar is not None:
                with contextlib.suppress(Exception):
                    bar.clear()
        return True

    def print(self, *args: Any, sep: str = " ", end: str = "\n", file: Any = None, flush: bool = False) -> None:
        """``print`` without tearing the bar."""
        if self.train_progress_bar is None and self.val_progress_bar is None:
            print(*args, sep=sep, end=end, file=file, flush=flush)
            return
        from tqdm.auto import tqdm

        tqdm.write(sep.join(map(str, args)), file=file, end=end)

    def _safely(self, draw: Callable[..., None], *args: Any) -> None:
        """Draw; if that fails, never again."""
        try:
            draw(*args)
        except Exception as error:
            self._due, self._terminal = math.inf, False
            self._close()
            with contextlib.suppress(Exception):  # it may be standard error that is closed
                warn(f"the progress bar failed and is off from now on: {type(error).__name__}: {error}")

    # -- training ------------------------------------------------------------------------------------------------

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Begin the epoch's bar; where an epoch is resumed, at the batch where it goes on."""
        if self._terminal:
            self._safely(self._begin_epoch, trainer)

    def _begin_epoch(self, trainer: Trainer) -> None:
        progress, total = trainer.progress, trainer.num_training_batches
        bar = self.train_progress_bar
        if bar is None:
            bar = self.train_progress_bar = self.init_train_tqdm()
            bar.initial = bar.n = bar.last_print_n = progress.batch
        else:
            bar.initial = 0
            bar.reset()
        bar.total = total
        bar.set_description_str(f"epoch {progress.epoch}", refresh=False)
        self._due = 0.0

    def on_step_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Redraw if it is time to."""
        if time.monotonic() >= self._due:
            self._safely(self._draw_training, trainer, pl_module)

    def _draw_training(self, trainer: Trainer, task: TaskModule, always: bool = False) -> None:
        bar, done = self.train_progress_bar, trainer.progress.batch
        if self._terminal:
            self._due = time.monotonic() + _REDRAW_EVERY
            if bar is not None and (always or done - bar.n >= self.refresh_rate):
                bar.set_postfix(_words(self.get_metrics(trainer, task)), refresh=False)
                if not bar.update(done - bar.n):
                    bar.refresh()
        else:
            where = f"epoch {trainer.progress.epoch}, batch {_share(done, trainer.num_training_batches)}"
            self._line(where, self.get_metrics(trainer, task))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """The bar's last state, with the epoch's values."""
        if self.train_progress_bar is not None:
            self._safely(self._end_epoch, trainer, pl_module)

    def _end_epoch(self, trainer: Trainer, task: TaskModule) -> None:
        self._draw_training(trainer, task, always=True)
        if self.leave:
            self.train_progress_bar.close()
            self.train_progress_bar = None

    def on_train_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Leave the last bar on the screen."""
        self._close()

    def _line(self, where: str, values: dict[str, Any]) -> None:
        self._due = time.monotonic() + self.line_every
        announce(", ".join([where, *(f"{name} = {text}" for name, text in _words(values).items())]))

    # -- evaluation ----------------------------------------------------------------------------------------------

    def _begin(self, trainer: Trainer, text: str, make: Callable[[], Any]) -> None:
        self._evaluating = text
        if self._terminal:
            self._safely(self._open, trainer, make)

    def _open(self, trainer: Trainer, make: Callable[[], Any]) -> None:
        self.val_progress_bar = make()
        self.val_progress_bar.total = trainer.evaluation_total

    def _tick(self, trainer: Trainer) -> None:
        if time.monotonic() >= self._due:
            self._safely(self._draw_evaluation, trainer)

    def _draw_evaluation(self, trainer: Trainer) -> None:
        done = trainer.evaluation_batch + 1
        if not self._terminal:
            self._line(f"{self._evaluating}, batch {_share(done, trainer.evaluation_total)}", {})
            return
        self._due = time.monotonic() + _REDRAW_EVERY
        bar = self.val_progress_bar
        if bar is not None and done - bar.n >= self.refresh_rate:
            bar.update(done - bar.n)

    def _end(self, trainer: Trainer) -> None:
        if self.val_progress_bar is not None:
            self._safely(self._end_evaluation, trainer)

    def _end_evaluation(self, trainer: Trainer) -> None:
        bar, self.val_progress_bar = self.val_progress_bar, None
        if bar.leave:
            bar.update(trainer.evaluation_batch + 1 - bar.n)
        bar.close()

    def on_validation_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """A bar below the epoch's."""
        if trainer.sanity_checking:
            self._begin(trainer, "sanity check", self.init_sanity_tqdm)
        else:
            self._begin(trainer, "validation", self.init_validation_tqdm)

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Redraw if it is time to."""
        self._tick(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Close the bar."""
        self._end(trainer)

    def on_test_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """A bar."""
        self._begin(trainer, "test", self.init_test_tqdm)

    def on_test_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Redraw if it is time to."""
        self._tick(trainer)

    def on_test_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Close the bar."""
        self._end(trainer)

    def on_predict_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """A bar."""
        self._begin(trainer, "predict", self.init_predict_tqdm)

    def on_predict_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Redraw if it is time to."""
        self._tick(trainer)

    def on_predict_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Close the bar."""
        self._end(trainer)


def _is_terminal(stream: Any) -> bool:
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError, OSError):  # there is none, or it is closed
        return False


def _share(done: int, total: int | None) -> str:
    return str(done) if total is None else f"{done}/{total}"


def _words(values: dict[str, Any]) -> dict[str, str]:
    return {name: f"{value:.4g}" if isinstance(value, float) else str(value) for name, value in values.items()}
