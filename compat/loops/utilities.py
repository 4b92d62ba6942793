"""Checks of a step's loss."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["check_finite_loss"]


def check_finite_loss(loss: Tensor | None) -> None:
    """Raise a ValueError if a loss contains NaN or infinity. The check synchronizes with the device."""
    if loss is not None and not torch.isfinite(loss).all():
        value = f"is {loss.item()}" if loss.numel() == 1 else "contains NaN or infinity"
        raise ValueError(f"the loss from training_step {value}, but it must be finite.")
