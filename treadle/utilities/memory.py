"""Names that scripts import from ``lightning.pytorch.utilities.memory``."""

from ..compat.environment import clear_device_cache as garbage_collection_cuda
from ..compat.oom import (
    is_cuda_out_of_memory,
    is_cudnn_snafu,
    is_oom_error,
    is_out_of_cpu_memory,
    recursive_detach,
)

__all__ = [
    "garbage_collection_cuda",
    "is_cuda_out_of_memory",
    "is_cudnn_snafu",
    "is_oom_error",
    "is_out_of_cpu_memory",
    "recursive_detach",
]
