"""A table of the model's parts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.parameter import is_lazy

from ..strategies import announce
from .callback import Callback

if TYPE_CHECKING:
    from ..trainer import TaskModule, Trainer


class ModelSummary(Callback):
    """Print a table of the model's parts when ``fit`` begins: type, parameters, training or evaluation mode, frozen.

    Args:
        max_depth: how many levels of parts to show; -1 for all, 0 for no table.

    Raises:
        ValueError: for a depth that is none.
    """

    def __init__(self, max_depth: int = 1) -> None:
        if not isinstance(max_depth, int) or max_depth < -1:
            raise ValueError(f"max_depth={max_depth!r} must be a whole number of at least -1, which shows all.")
        self.max_depth = max_depth

    def on_fit_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Print the table."""
        if self.max_depth:
            announce(summarize(pl_module, self.max_depth))


def summarize(module: nn.Module, max_depth: int = 1) -> str:
    """The table of a module's parts, and their sum.

    Args:
        module: whose parts are shown. Parameters that it holds itself are one row, ``(own)``.
        max_depth: how many levels; -1 for all.
    """
    rows = [("name", "type", "parameters", "mode")]
    for name, part in module.named_modules():
        if name and (max_depth == -1 or name.count(".") < max_depth):
            rows.append((name, type(part).__name__, *_describe(part.parameters(), part.training)))
    if own := list(module.parameters(recurse=False)):
        rows.append(("(own)", type(module).__name__, *_describe(own, module.training)))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [f"{row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]}".rstrip() for row in rows]
    rule = "-" * max(map(len, lines))
    return "\n".join([lines[0], rule, *lines[1:], rule, _totals(module)])


def _describe(parameters: Iterable[nn.Parameter], training: bool) -> tuple[str, str]:
    known = list(parameters)
    frozen = bool(known) and not any(p.requires_grad for p in known)
    return _count(known), ("train" if training else "eval") + (", frozen" if frozen else "")


def _count(parameters: list[nn.Parameter]) -> str:
    """Their elements; lazy ones have none before the first batch."""
    count = sum(p.numel() for p in parameters if not is_lazy(p))
    if any(is_lazy(p) for p in parameters):
        return f"{count:,} + lazy" if count else "lazy"
    return f"{count:,}"


def _totals(module: nn.Module) -> str:
    every = list(module.parameters())
    trainable = [p for p in every if p.requires_grad]
    frozen = [p for p in every if not p.requires_grad]
    size = sum(p.numel() * p.element_size() for p in every if not is_lazy(p))
    training = sum(part.training for part in module.modules())
    evaluating = sum(not part.training for part in module.modules())
    return (
        f"{_count(every)} parameters: {_count(trainable)} trainable, {_count(frozen)} frozen; {size / 2**20:,.1f} MiB; "
        f"{training} modules in train mode, {evaluating} in eval mode"
    )
