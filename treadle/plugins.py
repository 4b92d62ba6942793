"""What ``Trainer(plugins=...)`` takes: names, nothing else."""

from .strategies import Precision, TorchSyncBatchNorm

__all__ = ["Precision", "TorchSyncBatchNorm"]
