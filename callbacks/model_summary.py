"""A table of the model's parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from ..strategies import announce
from .callback import Callback

if TYPE_CHECKING:
    from ..trainer import TaskModule, Trainer


class ModelSummary(Callback):
    """Print a table of the model's parts when ``fit`` begins.

    Args:
        max_depth: how many levels of parts to show; -1 for all, 0 for no table.
    """

    def __init__(self, max_depth: int = 1) -> None:
        if not isinstance(max_depth, int) or max_depth < -1:
            raise ValueError(f"max_depth={max_depth!r} must be a whole number of at least -1, which shows all.")
        self.max_depth = max_depth

    def on_fit_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Print the table."""
        if self.max_depth and trainer.is_global_zero:
            announce(summarize(pl_module, self.max_depth))


def summarize(module: nn.Module, max_depth: int = 1) -> str:
    """The table of a module's parts: name, type, parameters, mode."""
    rows = [("name", "type", "parameters", "mode")]
    for name, part in module.named_modules():
        depth = name.count(".") + 1
        if name and (max_depth == -1 or depth <= max_depth):
            count = sum(p.numel() for p in part.parameters())
            frozen = count and not any(p.requires_grad for p in part.parameters())
            mode = ("train" if part.training else "eval") + (", frozen" if frozen else "")
            rows.append((name, type(part).__name__, f"{count:,}", mode))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]}".rstrip() for row in rows]
    lines.insert(1, "-" * max(map(len, lines)))
    return "\n".join(lines)
