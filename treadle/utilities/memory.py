"""What scripts import from ``lightning.pytorch.utilities.memory``: names, nothing else."""

from ..compat.environment import clear_device_cache as garbage_collection_cuda

__all__ = ["garbage_collection_cuda"]
