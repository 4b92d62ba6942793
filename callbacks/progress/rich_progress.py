"""`RichProgressBar`: a progress bar drawn by the package ``rich``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

from ...common.messages import name_type
from ...common.optional import require
from ._refresh import DrawnBar

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn, Task, TaskID
    from rich.style import Style

    from ...trainer import Trainer


@dataclass
class RichProgressBarTheme:
    """Styles of a `RichProgressBar`'s columns, as style definitions or ``rich.style.Style`` objects.

    Args:
        description: Style of the label, such as ``epoch 3``. Default: no style.
        progress_bar: Style of the bar. Default: ``"#6206E0"``.
        progress_bar_finished: Style of the bar when it is finished. Default: ``"#6206E0"``.
        progress_bar_pulse: Style of the bar while the number of batches is unknown. Default: ``"#6206E0"``.
        batch_progress: Style of the batch counter, such as ``3/10``. Default: no style.
        time: Style of the elapsed and remaining time. Default: ``"dim"``.
        processing_speed: Style of the speed in batches per second. Default: ``"dim underline"``.
        metrics: Style of the logged values. Default: ``"italic"``.
        metrics_text_delimiter: Text between two logged values. Default: a space.
        metrics_format: Format of a logged floating-point number. Default: ``".3f"``.

    Examples:
        >>> from treadle.callbacks import RichProgressBarTheme
        >>> RichProgressBarTheme(progress_bar="green", metrics_format=".2e").metrics_format
        '.2e'
    """

    description: str | Style = ""
    progress_bar: str | Style = "#6206E0"
    progress_bar_finished: str | Style = "#6206E0"
    progress_bar_pulse: str | Style = "#6206E0"
    batch_progress: str | Style = ""
    time: str | Style = "dim"
    processing_speed: str | Style = "dim underline"
    metrics: str | Style = "italic"
    metrics_text_delimiter: str = " "
    metrics_format: str = ".3f"


class RichProgressBar(DrawnBar):
    """Progress bar like `TQDMProgressBar`, but drawn by the package ``rich``.

    Override `configure_columns` to choose the columns of the bar, and `get_metrics` to choose the values shown after
    them.

    Args:
        refresh_rate: Maximum number of redraws per second. Values above 10 have the same effect as 10; 0 disables
            both the bar and the printed lines. Default: 100.
        leave: Leave the bar of each epoch on the screen. Default: False.
        theme: Styles of the columns, a `RichProgressBarTheme` or an object with the same attributes. Default: a
            `RichProgressBarTheme` with its default values.
        console_kwargs: Arguments of ``rich.console.Console``. Unless they contain ``file`` or ``stderr``, the console
            writes to standard error. Default: None.
        line_every: Minimum number of seconds between the lines that are printed within an epoch or an evaluation if no
            bar can be drawn. Default: 10.0.
        epoch_lines: Print a line after each epoch, with the values logged in it and its duration. After ten lines, at
            most one is printed per second, and one after the last epoch. Default: None, which prints them if no bar
            can be drawn.

    Attributes:
        progress: The ``rich.progress.Progress`` that is drawn. While none is, it is a disabled one.

    Raises:
        ModuleNotFoundError: If ``rich`` is not installed.
        ValueError, TypeError: If an argument is invalid.

    Examples:
        >>> from treadle.callbacks import RichProgressBar, RichProgressBarTheme
        >>> bar = RichProgressBar(leave=True, theme=RichProgressBarTheme(metrics_format=".2e"))
        >>> bar.is_enabled
        True
    """

    def __init__(
        self,
        refresh_rate: int = 100,
        leave: bool = False,
        theme: RichProgressBarTheme | None = None,
        console_kwargs: dict[str, Any] | None = None,
        line_every: float = 10.0,
        epoch_lines: bool | None = None,
    ) -> None:
        require("RichProgressBar", "rich", extra="rich")
        super().__init__(refresh_rate, leave, line_every, epoch_lines)
        self.theme = RichProgressBarTheme() if theme is None else theme  # or any object with its fields
        if lacking := [field.name for field in fields(RichProgressBarTheme) if not hasattr(self.theme, field.name)]:
            raise TypeError(
                f"theme={theme!r} must be a RichProgressBarTheme, or have its fields, but {name_type(theme)} lacks "
                f"{', '.join(lacking)}."
            )
        self._drawn: Progress | None = None
        self._console_kwargs = dict(console_kwargs or {})
        self._every = max(self._every, 1 / max(1, refresh_rate))
        self._epoch: TaskID | None = None
        self._evaluation: TaskID | None = None
        self._leaves_evaluation = False

    @property
    def progress(self) -> Progress:
        """The ``rich.progress.Progress`` that is drawn. While none is, a disabled one."""
        return _make_disabled() if self._drawn is None else self._drawn

    def configure_columns(self, trainer: Trainer) -> list[ProgressColumn]:
        """Return the columns of the bar, from left to right. The logged values are shown after them.

        Args:
            trainer: The Trainer.
        """
        from rich.progress import BarColumn, TextColumn

        theme, words = self.theme, _make_words_column()
        return [
            TextColumn("{task.description}", style=theme.description, markup=False),
            BarColumn(
                complete_style=theme.progress_bar,
                finished_style=theme.progress_bar_finished,
                pulse_style=theme.progress_bar_pulse,
            ),
            words(_format_batches, theme.batch_progress),
            words(_format_time, theme.time),
            words(_format_speed, theme.processing_speed),
        ]

    # -- drawing -------------------------------------------------------------------------------------------------

    def _can_draw(self) -> bool:
        console = _make_console(self._console_kwargs)
        return console.is_terminal or console.is_jupyter

    def _start_progress(self) -> Progress:
        if self._drawn is None:
            from rich.progress import Progress

            metrics = _make_words_column()(lambda task: task.fields.get("metrics", ""), self.theme.metrics)
            self._drawn = Progress(
                *self.configure_columns(self.trainer),
                metrics,
                console=_make_console(self._console_kwargs),
                auto_refresh=False,  # its thread could fail unnoticed
                redirect_stdout=False,  # the process's streams stay unchanged
                redirect_stderr=False,
            )
            self._drawn.live.transient = True  # erased when stopped, which `_clear` relies on
        self._drawn.start()
        return self._drawn

    def _open_epoch(self, text: str, done: int, total: int | None) -> None:
        progress = self._start_progress()
        if self._epoch is None:
            self._epoch = progress.add_task(text, total=total, completed=done)
        else:
            progress.reset(self._epoch, description=text, total=total, completed=done, metrics="")
        progress.refresh()

    def _show_epoch(self, done: int, values: dict[str, Any]) -> None:
        if self._epoch is not None:
            text = self.theme.metrics_text_delimiter.join(f"{name}: {value}" for name, value in values.items())
            progress = self._start_progress()
            progress.update(self._epoch, completed=done, metrics=text)
            progress.refresh()

    def _format(self, value: Any) -> str:
        return f"{value:{self.theme.metrics_format}}" if isinstance(value, float) else str(value)

    def _close_epoch(self) -> None:
        self._close()

    def _open_evaluation(self, kind: str, text: str, total: int | None) -> None:
        self._evaluation = self._start_progress().add_task(text, total=total)
        self._leaves_evaluation = kind in ("test", "predict") or (kind == "validation" and self._epoch is None)

    def _show_evaluation(self, done: int) -> None:
        if self._evaluation is not None:
            progress = self._start_progress()
            progress.update(self._evaluation, completed=done)
            progress.refresh()

    def _close_evaluation(self, done: int) -> None:
        if self._evaluation is None:
            return
        progress = self._start_progress()
        if self._leaves_evaluation:
            progress.update(self._evaluation, completed=done)
            self._close()
        else:
            progress.remove_task(self._evaluation)
            self._evaluation = None
            progress.refresh()

    def _clear(self) -> None:
        if self._drawn is not None:
            self._drawn.stop()

    def _come_back(self) -> None:
        if self._drawn is not None:
            self._start_progress().refresh()

    def _close(self) -> None:
        progress, self._drawn = self._drawn, None
        self._epoch = self._evaluation = None
        if progress is not None:
            progress.live.transient = False
            progress.start()  # it may have been erased
            progress.stop()


@cache
def _make_disabled() -> Progress:
    from rich.progress import Progress

    return Progress(disable=True)


@cache
def _make_console_class() -> type[Console]:
    """Return a console class that raises an error where rich would end the process."""
    from rich.console import Console

    class Screen(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError("the program that reads the output has closed it")

    return Screen


def _make_console(console_kwargs: dict[str, Any]) -> Console:
    """Return a new console, which by default writes to the current ``sys.stderr``."""
    defaults = {} if {"file", "stderr"} & console_kwargs.keys() else {"file": sys.stderr}
    return _make_console_class()(**{**defaults, **console_kwargs})


@cache
def _make_words_column() -> Callable[..., ProgressColumn]:
    """Return a class of progress columns whose text is not interpreted as markup."""
    from rich.progress import ProgressColumn
    from rich.text import Text

    class Words(ProgressColumn):
        def __init__(self, words: Callable[[Task], str], style: str | Style) -> None:
            super().__init__()
            self.words, self.style = words, style

        def render(self, task: Task) -> Text:
            return Text(self.words(task), style=self.style)

    return Words


def _format_batches(task: Task) -> str:
    return f"{int(task.completed)}/{'--' if task.total is None else int(task.total)}"


def _format_time(task: Task) -> str:
    spent = task.finished_time if task.finished else task.elapsed
    durations = (spent, task.time_remaining)
    return " • ".join("-:--:--" if seconds is None else str(timedelta(seconds=int(seconds))) for seconds in durations)


def _format_speed(task: Task) -> str:
    speed = task.finished_speed or task.speed
    return "" if speed is None else f"{speed:.2f}it/s"
