"""Errors of memory are told from others."""

import torch

from treadle.utilities import memory


def test_errors_of_memory() -> None:
    assert memory.is_oom_error(RuntimeError("CUDA error: out of memory"))
    assert memory.is_cuda_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert memory.is_out_of_cpu_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    assert memory.is_cudnn_snafu(RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED."))
    assert not memory.is_oom_error(RuntimeError("no"))
    detached = memory.recursive_detach({"a": [torch.ones(1, requires_grad=True)], "b": 1}, to_cpu=True)
    assert (detached["a"][0].requires_grad, detached["b"]) == (False, 1)
