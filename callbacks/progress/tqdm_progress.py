"""The progress bar that is there by default, drawn by tqdm."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

from ...common.validation import check_int
from ._refresh import DrawnBar


def __getattr__(name: str) -> Any:
    """Return tqdm's class under Lightning's name ``Tqdm``, imported when it is asked for."""
    if name != "Tqdm":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tqdm.auto import tqdm

    return tqdm


class TQDMProgressBar(DrawnBar):
    """A bar for the epoch and one below it for validation, on rank zero; plain lines where there is no terminal.

    It redraws ten times a second at most, and reads the device only then. What fails in drawing never ends a run: a
    closed terminal, or an error in an override, turns the bar off with a warning. Override `get_metrics` to choose
    what is shown beside the bar, and ``init_train_tqdm`` and its kin to choose how it looks.

    Args:
        refresh_rate: Batches between redraws, at least (the variable ``TQDM_MINITERS`` can make it more); 0 draws
            nothing. Time limits it too.
        process_position: Rows to leave free above.
        leave: Leave each epoch's bar on the screen, not only the last one.
        line_every: Seconds between the plain lines that stand for the bar where there is no terminal.

    Attributes:
        train_progress_bar: The epoch's bar, or None.
        val_progress_bar: The bar of the validation, test or prediction that runs, or None; also
            ``test_progress_bar`` and ``predict_progress_bar``.

    Raises:
        ValueError, TypeError: For an argument that can't be honoured.
    """

    def __init__(
        self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False, line_every: float = 10.0
    ) -> None:
        super().__init__(refresh_rate, leave, line_every)
        self._process_position = check_int("process_position", process_position, 0)
        if self._refresh_rate and (least := os.environ.get("TQDM_MINITERS", "")).isdecimal():
            self._refresh_rate = max(self._refresh_rate, int(least))
        self._batches = max(1, self._refresh_rate)
        self.train_progress_bar: Any = None
        self.val_progress_bar: Any = None

    @property
    def process_position(self) -> int:
        """As given."""
        return self._process_position

    @property
    def test_progress_bar(self) -> Any:
        """The bar of the evaluation that runs, or None."""
        return self.val_progress_bar

    @property
    def predict_progress_bar(self) -> Any:
        """The bar of the evaluation that runs, or None."""
        return self.val_progress_bar

    # -- what users override -------------------------------------------------------------------------------------

    def init_train_tqdm(self) -> Any:
        """The epoch's bar; its total and its text are filled in later."""
        return self._make_tqdm(self.train_description, leave=True)

    def init_sanity_tqdm(self) -> Any:
        """The bar of the validation before training."""
        return self._make_tqdm(self.sanity_check_description, leave=False)

    def init_validation_tqdm(self) -> Any:
        """The bar of a validation."""
        return self._make_tqdm(self.validation_description, leave=self.train_progress_bar is None)

    def init_test_tqdm(self) -> Any:
        """The bar of a test."""
        return self._make_tqdm(self.test_description, leave=True)

    def init_predict_tqdm(self) -> Any:
        """The bar of a prediction."""
        return self._make_tqdm(self.predict_description, leave=True)

    def _make_tqdm(self, text: str, leave: bool) -> Any:
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

    # -- drawing -------------------------------------------------------------------------------------------------

    def _open_epoch(self, text: str, done: int, total: int | None) -> None:
        bar = self.train_progress_bar
        if bar is None:
            bar = self.train_progress_bar = self.init_train_tqdm()
            bar.initial = bar.n = bar.last_print_n = done
        else:
            bar.initial = 0
            bar.reset()
        bar.total = total
        bar.set_description_str(text, refresh=False)

    def _show_epoch(self, done: int, values: dict[str, Any]) -> None:
        if (bar := self.train_progress_bar) is not None:
            bar.set_postfix(values, refresh=False)
            if not bar.update(done - bar.n):
                bar.refresh()

    def _close_epoch(self) -> None:
        if self.train_progress_bar is not None:
            self.train_progress_bar.close()
            self.train_progress_bar = None

    def _open_evaluation(self, kind: str, text: str, total: int | None) -> None:
        self.val_progress_bar = getattr(self, f"init_{kind}_tqdm")()
        self.val_progress_bar.total = total

    def _show_evaluation(self, done: int) -> None:
        if (bar := self.val_progress_bar) is not None:
            bar.update(done - bar.n)

    def _close_evaluation(self, done: int) -> None:
        bar, self.val_progress_bar = self.val_progress_bar, None
        if bar is not None:
            if bar.leave:
                bar.update(done - bar.n)
            bar.close()

    @property
    def _bars(self) -> list[Any]:
        return [bar for bar in (self.val_progress_bar, self.train_progress_bar) if bar is not None]

    def _clear(self) -> None:
        for bar in self._bars:
            bar.clear()

    def _come_back(self) -> None:
        for bar in self._bars:
            bar.refresh()

    def _close(self) -> None:
        bars = self._bars
        self.train_progress_bar = self.val_progress_bar = None
        for bar in bars:
            with contextlib.suppress(Exception):  # the other one is closed all the same
                bar.close()
