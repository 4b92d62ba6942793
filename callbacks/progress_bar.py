"""The progress bar. It redraws ten times a second at most, and reads the device only then."""

from __future__ import annotations

import math
import sys
import time
from typing import TYPE_CHECKING, Any

from ..strategies import announce
from .callback import Callback

if TYPE_CHECKING:
    from ..trainer import TaskModule, Trainer


class TQDMProgressBar(Callback):
    """A bar for each epoch and each evaluation, on rank zero; plain lines where there is no terminal.

    Args:
        refresh_rate: micro-batches between redraws, at least; 0 draws nothing. Time limits it too.
        process_position: rows to leave free above.
        leave: leave each finished bar on the screen.
        line_every: seconds between the plain lines that stand for the bar where there is no terminal.
    """

    after_task = 3

    def __init__(
        self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False, line_every: float = 10.0
    ) -> None:
        self.refresh_rate = refresh_rate
        self.process_position = process_position
        self.leave = leave
        self.line_every = line_every
        self._bar: Any = None
        self._inner: Any = None
        self._next = 0.0
        self._next_line = 0.0
        self._active = False

    def setup(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """Draw on rank zero only."""
        self._active = trainer.is_global_zero and self.refresh_rate > 0
        self._terminal = sys.stderr.isatty() or "ipykernel" in sys.modules
        self._next_line = time.monotonic() + self.line_every

    def teardown(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """Close what is open."""
        for bar in (self._inner, self._bar):
            if bar is not None:
                bar.close()
        self._bar = self._inner = None

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print`` without tearing the bar."""
        if self._bar is None and self._inner is None:
            print(*args, **kwargs)
            return
        from tqdm.auto import tqdm

        tqdm.write(kwargs.pop("sep", " ").join(map(str, args)), **kwargs)

    def _open(self, text: str, total: int | None, initial: int = 0, leave: bool = False) -> Any:
        if not self._active or not self._terminal:
            return None
        from tqdm.auto import tqdm

        return tqdm(
            desc=text,
            total=total,
            initial=initial,
            position=self.process_position + (self._bar is not None),
            leave=leave,
            dynamic_ncols=True,
            file=sys.stderr,
            mininterval=0.0,
            miniters=1,
        )

    # -- training ------------------------------------------------------------------------------------------------

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """A new bar."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        progress = trainer.progress
        self._bar = self._open(f"epoch {progress.epoch}", trainer.num_training_batches, progress.batch, self.leave)
        self._next = 0.0

    def on_step_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Redraw if it is time to."""
        now = time.monotonic()
        if self._active and now >= self._next:
            self._next = now + 0.1
            self._draw_training(trainer, now)

    def _draw_training(self, trainer: Trainer, now: float) -> None:
        progress = trainer.progress
        if self._bar is None:
            if now >= self._next_line:
                self._next_line = now + self.line_every
                total = trainer.num_training_batches
                of = "" if total is None else f"/{total}"
                self._line(f"epoch {progress.epoch}, batch {progress.batch}{of}", trainer.progress_bar_metrics)
            return
        self._bar.set_postfix(_words(trainer.progress_bar_metrics), refresh=False)
        self._bar.update(progress.batch - self._bar.n)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """The bar's last state; a line for each epoch where there is no terminal and epochs are long."""
        if self._active and self._bar is not None:
            self._draw_training(trainer, time.monotonic())
            self._bar.refresh()

    def _line(self, where: str, values: dict[str, float]) -> None:
        announce(", ".join([where, *(f"{name} = {text}" for name, text in _words(values).items())]))

    # -- evaluation ----------------------------------------------------------------------------------------------

    def _start(self, trainer: Trainer, text: str) -> None:
        self._inner = self._open(text, trainer.evaluation_total)
        self._next = 0.0

    def _tick(self, trainer: Trainer) -> None:
        now = time.monotonic()
        if self._inner is not None and now >= self._next:
            self._next = now + 0.1
            self._inner.update(trainer.evaluation_batch + 1 - self._inner.n)

    def _stop(self) -> None:
        if self._inner is not None:
            self._inner.close()
            self._inner = None

    def on_validation_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """A bar below the epoch's."""
        self._start(trainer, "sanity check" if trainer.sanity_checking else "validation")

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Redraw if it is time to."""
        self._tick(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Close the bar."""
        self._stop()

    def on_test_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """A bar."""
        self._start(trainer, "test")

    def on_test_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Redraw if it is time to."""
        self._tick(trainer)

    def on_test_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Close the bar."""
        self._stop()

    def on_predict_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """A bar."""
        self._start(trainer, "predict")

    def on_predict_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Redraw if it is time to."""
        self._tick(trainer)

    def on_predict_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Close the bar."""
        self._stop()


def _words(values: dict[str, float]) -> dict[str, str]:
    return {name: f"{value:.4g}" if math.isfinite(value) else str(value) for name, value in values.items()}
