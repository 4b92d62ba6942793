"""`RichModelSummary`: prints the table of `ModelSummary` with the package ``rich``."""

from __future__ import annotations

import sys

from ..common.optional import require
from ._summary import Summary
from .model_summary import ModelSummary


class RichModelSummary(ModelSummary):
    """Callback that uses the package ``rich`` to print a table of the model's modules when ``fit`` begins.

    Args:
        max_depth: Levels of nested modules to show; -1 shows all, 0 prints no table. Default: 1.
        header_style: Rich style of the header. Default: ``"bold magenta"``.

    Raises:
        ModuleNotFoundError: If ``rich`` is not installed.
        ValueError: If ``max_depth`` is invalid.

    Examples:
        >>> from treadle.callbacks import RichModelSummary
        >>> RichModelSummary(max_depth=2, header_style="bold").max_depth
        2
    """

    def __init__(self, max_depth: int = 1, header_style: str = "bold magenta") -> None:
        require("RichModelSummary", "rich", extra="rich")
        super().__init__(max_depth)
        self.header_style = self._summarize_kwargs["header_style"] = header_style

    def show(self, summary: Summary) -> None:
        """Print the table and the line of totals to standard error.

        Args:
            summary: The summary to print.
        """
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(header_style=self.header_style)
        columns = summary.columns()
        for head, _ in columns:
            table.add_column(head, justify="right" if head in summary.NUMBERS else "left", no_wrap=head == "name")
        for row in zip(*(cells for _, cells in columns), strict=True):
            table.add_row(*map(Text, row))  # Text, because rich would interpret a shape in brackets as markup
        console = Console(file=sys.stderr)
        console.print(table)
        console.print(Text(summary.totals()))
