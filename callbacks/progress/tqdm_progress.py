"""`TQDMProgressBar`: a progress bar drawn by tqdm."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

from ...common.validation import check_int
from ._refresh import DrawnBar, drop_infinite

_SHORTEST = 4  # minimum characters of the bar, below which values next to it are omitted


def __getattr__(name: str) -> Any:
    """Return tqdm's class under Lightning's name, ``Tqdm``."""
    if name != "Tqdm":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tqdm.auto import tqdm

    return tqdm


class TQDMProgressBar(DrawnBar):
    """Progress bar drawn by tqdm, with one bar for the epoch and another for a validation, test or prediction.

    Only rank zero draws the bars. During an epoch or an evaluation, they are redrawn at most ten times a second.
    Without a terminal or a notebook, lines are printed instead, such as
    ``epoch 3/40  loss 0.123  val_loss 0.2  4.1 s`` after an epoch. An error while drawing or printing disables the bar
    with a warning, unless the attribute ``strict`` is True.

    Override `get_metrics` to choose the values next to the epoch's bar. Override `init_train_tqdm` and the similar
    methods for the other bars to change their appearance.

    Args:
        refresh_rate: Minimum number of batches between redraws; 0 disables both the bar and the printed lines. A
            larger value of the environment variable ``TQDM_MINITERS`` takes precedence, except over 0. Default: 1.
        process_position: Number of rows to leave free above the bar. Default: 0.
        leave: Leave the bar of each epoch on the screen. Default: False.
        line_every: Minimum number of seconds between the lines that are printed within an epoch or an evaluation if no
            bar can be drawn. Default: 10.0.
        epoch_lines: Print a line after each epoch, with the values logged in it and its duration. After ten lines, at
            most one is printed per second, and one after the last epoch. Default: None, which prints them if no bar
            can be drawn.

    Attributes:
        train_progress_bar: The epoch's bar. While none is drawn, it is a disabled one.
        val_progress_bar: The bar of the running evaluation, likewise.

    Raises:
        ValueError, TypeError: If an argument is invalid.

    Examples:
        >>> import treadle as tl
        >>> from treadle.callbacks import TQDMProgressBar
        >>> bar = TQDMProgressBar(refresh_rate=10, leave=True)
        >>> trainer = tl.Trainer(accelerator="cpu", devices=1, logger=False, callbacks=bar)
        >>> trainer.progress_bar_callback is bar
        True
    """

    def __init__(
        self,
        refresh_rate: int = 1,
        process_position: int = 0,
        leave: bool = False,
        line_every: float = 10.0,
        epoch_lines: bool | None = None,
    ) -> None:
        super().__init__(refresh_rate, leave, line_every, epoch_lines)
        self._process_position = check_int("process_position", process_position, 0)
        if self._refresh_rate and (least := os.environ.get("TQDM_MINITERS", "")).isdecimal():
            self._refresh_rate = max(self._refresh_rate, int(least))
        self._batches = max(1, self._refresh_rate)
        self._epoch_bar: Any = None
        self._evaluation_bar: Any = None

    @property
    def train_progress_bar(self) -> Any:
        """The epoch's bar. While none is drawn, a disabled one with the epoch's numbers."""
        if self._epoch_bar is not None:
            return self._epoch_bar
        trainer = self._trainer
        if trainer is None or trainer.sources is None or trainer.sources.prepared_train is None:
            return _make_disabled()
        return _make_disabled(trainer.progress.batch, drop_infinite(self.total_train_batches))

    @train_progress_bar.setter
    def train_progress_bar(self, bar: Any) -> None:
        self._epoch_bar = bar

    @property
    def val_progress_bar(self) -> Any:
        """Bar of the running evaluation. While none is drawn, a disabled one."""
        return _make_disabled() if self._evaluation_bar is None else self._evaluation_bar

    @val_progress_bar.setter
    def val_progress_bar(self, bar: Any) -> None:
        self._evaluation_bar = bar

    @property
    def process_position(self) -> int:
        """Number of rows left free above the bar."""
        return self._process_position

    @property
    def test_progress_bar(self) -> Any:
        """Bar of the running evaluation; see `val_progress_bar`."""
        return self.val_progress_bar

    @property
    def predict_progress_bar(self) -> Any:
        """Bar of the running evaluation; see `val_progress_bar`."""
        return self.val_progress_bar

    # -- methods that may be overridden --------------------------------------------------------------------------

    def init_train_tqdm(self) -> Any:
        """Return a new bar for epochs."""
        return self._make_tqdm(self.train_description, leave=True)

    def init_sanity_tqdm(self) -> Any:
        """Return a new bar for the sanity check."""
        return self._make_tqdm(self.sanity_check_description, leave=False)

    def init_validation_tqdm(self) -> Any:
        """Return a new bar for a validation."""
        return self._make_tqdm(self.validation_description, leave=self._epoch_bar is None)

    def init_test_tqdm(self) -> Any:
        """Return a new bar for a test."""
        return self._make_tqdm(self.test_description, leave=True)

    def init_predict_tqdm(self) -> Any:
        """Return a new bar for a prediction."""
        return self._make_tqdm(self.predict_description, leave=True)

    def _make_tqdm(self, text: str, leave: bool) -> Any:
        from tqdm.auto import tqdm

        return tqdm(
            desc=text,
            position=self.process_position + (self._epoch_bar is not None),
            leave=leave,
            **_choose_size(),
            file=sys.stderr,
            mininterval=0.0,
            miniters=1,
            delay=1e-9,  # not drawn at creation: the total is unknown, and a short validation would flicker
        )

    # -- drawing -------------------------------------------------------------------------------------------------

    def _open_epoch(self, text: str, done: int, total: int | None) -> None:
        bar = self._epoch_bar
        if bar is None:
            bar = self._epoch_bar = self.init_train_tqdm()
            bar.initial = bar.n = bar.last_print_n = done
        else:
            bar.initial = 0
            bar.set_description_str(text, refresh=False)  # before the reset, which draws the bar
            bar.reset()
        bar.total = total
        bar.set_description_str(text, refresh=False)

    def _show_epoch(self, done: int, values: dict[str, Any]) -> None:
        if (bar := self._epoch_bar) is not None:
            bar.set_postfix(values, refresh=False)
            _fit_postfix(bar)
            if not bar.update(done - bar.n):
                bar.refresh()

    def _close_epoch(self) -> None:
        if self._epoch_bar is not None:
            self._epoch_bar.close()
            self._epoch_bar = None

    def _open_evaluation(self, kind: str, text: str, total: int | None) -> None:
        self._evaluation_bar = getattr(self, f"init_{kind}_tqdm")()
        self._evaluation_bar.total = total

    def _show_evaluation(self, done: int) -> None:
        if (bar := self._evaluation_bar) is not None:
            bar.update(done - bar.n)

    def _close_evaluation(self, done: int) -> None:
        bar, self._evaluation_bar = self._evaluation_bar, None
        if bar is not None:
            if bar.leave:
                bar.update(done - bar.n)
            bar.close()

    @property
    def _bars(self) -> list[Any]:
        return [bar for bar in (self._evaluation_bar, self._epoch_bar) if bar is not None]

    def _clear(self) -> None:
        for bar in self._bars:
            bar.clear()

    def _come_back(self) -> None:
        for bar in self._bars:
            bar.refresh()

    def _close(self) -> None:
        bars = self._bars
        self._epoch_bar = self._evaluation_bar = None
        for bar in bars:
            with contextlib.suppress(Exception):  # so that the other bar is closed too
                bar.close()


def _make_disabled(done: int = 0, total: int | None = None) -> Any:
    """Return a bar that draws nothing."""
    from tqdm.auto import tqdm

    return tqdm(initial=done, total=total, disable=True)


def _choose_size() -> dict[str, Any]:
    """Return tqdm's arguments for the bar's size. On a terminal without a size, as of `script`, tqdm draws nothing."""
    with contextlib.suppress(AttributeError, ValueError, OSError):  # standard error has no file descriptor
        if 0 in os.get_terminal_size(sys.stderr.fileno()):
            return {"ncols": 80, "nrows": 24}
    return {"dynamic_ncols": True}


def _fit_postfix(bar: Any) -> None:
    """Omit the values that do not fit next to a bar, because tqdm would cut off the text within a value."""
    facts = bar.format_dict
    if not facts["ncols"] or not bar.postfix:  # a notebook
        return
    widest = {"n": facts["total"] or facts["n"], "rate": 999.99}
    # With a bar of ten characters.
    fixed_width = len(bar.format_meter(**{**facts, **widest, "ncols": None, "postfix": ""}))
    room = facts["ncols"] - (fixed_width - 10 + _SHORTEST) - len(", ")
    if len(bar.postfix) > room:
        whole, _, _ = bar.postfix[: max(0, room - len(", ..") + 1)].rpartition(", ")
        bar.postfix = f"{whole}, ..." if whole else "..."
