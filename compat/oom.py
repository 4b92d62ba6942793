"""Lightning's checks for out-of-memory errors."""

from __future__ import annotations

import torch

from ..engine.optim.batch_size import is_out_of_memory as is_oom_error

__all__ = ["is_cuda_out_of_memory", "is_oom_error", "is_out_of_cpu_memory"]


def is_cuda_out_of_memory(exception: BaseException) -> bool:
    """Return whether an error reports exhausted memory of a CUDA device."""
    text = str(exception)
    return isinstance(exception, torch.cuda.OutOfMemoryError) or (
        isinstance(exception, RuntimeError) and "CUDA" in text and "out of memory" in text
    )


def is_out_of_cpu_memory(exception: BaseException) -> bool:
    """Return whether an error reports exhausted memory of the host."""
    return isinstance(exception, MemoryError) or (
        isinstance(exception, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(exception)
    )
