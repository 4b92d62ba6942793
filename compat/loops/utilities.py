"""Checks of a step's loss."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["check_finite_loss"]


def check_finite_loss(loss: Tensor | None) -> None:
    """Check that a loss is finite. The check synchronizes with the device.

    Args:
        loss: Loss of a step. None is accepted.

    Raises:
        ValueError: If the loss contains NaN or infinity.
    """
    if loss is not None and not torch.isfinite(loss).all():
        raise ValueError(f"The loss returned in `training_step` is {loss}.")
