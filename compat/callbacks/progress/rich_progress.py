"""Parts of Lightning's rich progress bar, for scripts that override ``configure_columns``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, Progress, ProgressColumn
from rich.progress import Task as RichTask
from rich.style import Style
from rich.text import Text

from ....callbacks import RichProgressBar, RichProgressBarTheme
from ....callbacks.progress import rich_progress

if TYPE_CHECKING:
    from rich.progress import Task

    from ....trainer import Trainer

__all__ = [
    "BatchesProcessedColumn",
    "CustomBarColumn",
    "CustomInfiniteTask",
    "CustomProgress",
    "CustomTimeColumn",
    "MetricsTextColumn",
    "ProcessingSpeedColumn",
    "RichProgressBar",
    "RichProgressBarTheme",
]


class CustomInfiniteTask(RichTask):
    """Task with an unknown number of batches, and therefore without a remaining time."""

    @property
    def time_remaining(self) -> float | None:
        """Return None."""
        return None


class CustomProgress(Progress):
    """Progress display of rich with the method `soft_refresh`."""

    def soft_refresh(self) -> None:
        """Redraw the display if the output is a terminal or a notebook."""
        if self.console.is_terminal or self.console.is_jupyter:
            self.refresh()


class CustomBarColumn(BarColumn):
    """Column with the progress bar, which pulses if the number of batches is unknown."""


class _StyledColumn(ProgressColumn):
    def __init__(self, style: str | Style) -> None:
        self.style = style
        super().__init__()


class CustomTimeColumn(_StyledColumn):
    """Column with the elapsed and the remaining time."""

    max_refresh = 0.5  # seconds between two computations of the estimate, which would otherwise jump

    def render(self, task: Task) -> Text:
        """See rich's ``ProgressColumn.render``."""
        return Text(rich_progress._format_time(task), style=self.style)


class BatchesProcessedColumn(_StyledColumn):
    """Column with the number of processed batches and the total number of batches."""

    def render(self, task: Task) -> Text:
        """See rich's ``ProgressColumn.render``."""
        return Text(rich_progress._format_batches(task), style=self.style)


class ProcessingSpeedColumn(_StyledColumn):
    """Column with the batches per second."""

    def render(self, task: Task) -> Text:
        """See rich's ``ProgressColumn.render``."""
        return Text(rich_progress._format_speed(task), style=self.style)


class MetricsTextColumn(ProgressColumn):
    """Column with the logged values that `update` set last.

    Args:
        trainer: Accepted and ignored.
        style: The text's style, such as ``"green"``.
        text_delimiter: The separator between two values.
        metrics_format: The format specification of floats, such as ``".3f"``.
    """

    def __init__(self, trainer: Trainer, style: str | Style, text_delimiter: str, metrics_format: str) -> None:
        self.trainer, self.style = trainer, style
        self.text_delimiter, self.metrics_format = text_delimiter, metrics_format
        self._text = ""
        super().__init__()

    def update(self, metrics: dict[Any, Any]) -> None:
        """Set the values to show, by name."""
        words = (
            f"{name}: {format(value, self.metrics_format) if isinstance(value, float) else value}"
            for name, value in metrics.items()
        )
        self._text = self.text_delimiter.join(words)

    def render(self, task: Task) -> Text:
        """See rich's ``ProgressColumn.render``."""
        return Text(self._text, justify="left", style=self.style)
