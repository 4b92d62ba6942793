"""Layers that see the samples of all processes."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import nn

from ...strategies import TorchSyncBatchNorm

__all__ = ["LayerSync", "TorchSyncBatchNorm"]


class LayerSync(ABC):
    """Base of what puts such layers into a model. A Trainer takes `TorchSyncBatchNorm` only."""

    @abstractmethod
    def apply(self, model: nn.Module) -> nn.Module:
        """Return the model with such layers."""

    @abstractmethod
    def revert(self, model: nn.Module) -> nn.Module:
        """Return the model without them."""


LayerSync.register(TorchSyncBatchNorm)
