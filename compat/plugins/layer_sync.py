"""Layers that use the samples of all ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import nn

from ...strategies import TorchSyncBatchNorm

__all__ = ["LayerSync", "TorchSyncBatchNorm"]


class LayerSync(ABC):
    """Base of classes that add such layers to a model. A Trainer accepts `TorchSyncBatchNorm` only."""

    @abstractmethod
    def apply(self, model: nn.Module) -> nn.Module:
        """Return the model with such layers.

        Args:
            model: The model.
        """

    @abstractmethod
    def revert(self, model: nn.Module) -> nn.Module:
        """Return the model without such layers.

        Args:
            model: The model.
        """


LayerSync.register(TorchSyncBatchNorm)
