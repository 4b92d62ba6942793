"""Plugins that replace layers with synchronized ones."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import nn

from ...strategies import TorchSyncBatchNorm

__all__ = ["LayerSync", "TorchSyncBatchNorm"]


class LayerSync(ABC):
    """Base class of plugins that replace layers with synchronized ones. A Trainer accepts only `TorchSyncBatchNorm`."""

    @abstractmethod
    def apply(self, model: nn.Module) -> nn.Module:
        """Return the model with layers that use the samples of all ranks."""

    @abstractmethod
    def revert(self, model: nn.Module) -> nn.Module:
        """Return the model, which `apply` returned, with its original layers."""


LayerSync.register(TorchSyncBatchNorm)
