"""Columns of a `RichProgressBar`, for scripts that override ``configure_columns``."""

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
    """A task whose number of batches is not known, so there is no time left to tell."""

    @property
    def time_remaining(self) -> float | None:
        """None."""
        return None


class CustomProgress(Progress):
    """rich's progress, refreshed by whoever changes it."""

    def soft_refresh(self) -> None:
        """Draw in a terminal only, where lines can be drawn again."""
        if self.console.is_terminal or self.console.is_jupyter:
            self.refresh()


class CustomBarColumn(BarColumn):
    """The bar; it pulses where the number of batches is not known."""


class _StyledColumn(ProgressColumn):
    def __init__(self, style: str | Style) -> None:
        self.style = style
        super().__init__()


class CustomTimeColumn(_StyledColumn):
    """The time spent, and the time left."""

    max_refresh = 0.5  # seconds between two computations of the estimate, which jumps otherwise

    def render(self, task: Task) -> Text:
        """See rich's ``ProgressColumn.render``."""
        return Text(rich_progress._format_time(task), style=self.style)


class BatchesProcessedColumn(_StyledColumn):
    """The number of batches done, and of all."""

    def render(self, task: Task) -> Text:
        """See rich's ``ProgressColumn.render``."""
        return Text(rich_progress._format_batches(task), style=self.style)


class ProcessingSpeedColumn(_StyledColumn):
    """Batches per second."""

    def render(self, task: Task) -> Text:
        """See rich's ``ProgressColumn.render``."""
        return Text(rich_progress._format_speed(task), style=self.style)


class MetricsTextColumn(ProgressColumn):
    """Logged values, as `update` got them last.

    Args:
        trainer: whose they are.
        style: how they look.
        text_delimiter: stands between two of them.
        metrics_format: the format of a number.
    """

    def __init__(self, trainer: Trainer, style: str | Style, text_delimiter: str, metrics_format: str) -> None:
        self.trainer, self.style = trainer, style
        self.text_delimiter, self.metrics_format = text_delimiter, metrics_format
        self._text = ""
        super().__init__()

    def update(self, metrics: dict[Any, Any]) -> None:
        """Show these values from here on."""
        words = (
            f"{name}: {format(value, self.metrics_format) if isinstance(value, float) else value}"
            for name, value in metrics.items()
        )
        self._text = self.text_delimiter.join(words)

    def render(self, task: Task) -> Text:
        """See rich's ``ProgressColumn.render``."""
        return Text(self._text, justify="left", style=self.style)
