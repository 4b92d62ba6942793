"""Lightning's checks for out-of-memory errors, and `recursive_detach`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..engine.optim.batch_size import is_out_of_memory as is_oom_error
from ..strategies import apply_nested

__all__ = ["is_cuda_out_of_memory", "is_cudnn_snafu", "is_oom_error", "is_out_of_cpu_memory", "recursive_detach"]


def is_cuda_out_of_memory(exception: BaseException) -> bool:
    """Return whether an error reports exhausted memory of a CUDA device."""
    text = str(exception)
    return isinstance(exception, torch.cuda.OutOfMemoryError) or (
        isinstance(exception, RuntimeError) and "CUDA" in text and "out of memory" in text
    )


def is_cudnn_snafu(exception: BaseException) -> bool:
    """Return whether an error is cuDNN's "not supported", as it is if cuDNN cannot allocate a workspace."""
    return isinstance(exception, RuntimeError) and "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED" in str(exception)


def is_out_of_cpu_memory(exception: BaseException) -> bool:
    """Return whether an error reports exhausted memory of the host."""
    return isinstance(exception, MemoryError) or (
        isinstance(exception, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(exception)
    )


def recursive_detach(in_dict: Any, to_cpu: bool = False) -> Any:
    """Return nested dicts, lists and tuples with their tensors detached and, with ``to_cpu``, moved to the CPU."""
    return apply_nested(in_dict, Tensor, lambda t: t.detach().cpu() if to_cpu else t.detach())
