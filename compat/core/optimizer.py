"""Optimizers that a task gets from ``self.optimizers()``."""

from __future__ import annotations

from ...engine.optim import PreparedOptimizer as LightningOptimizer

__all__ = ["LightningOptimizer", "do_nothing_closure"]


def do_nothing_closure() -> None:
    """Do nothing, as the closure of a step whose gradients have already been computed."""
