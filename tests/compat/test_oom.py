"""Errors of memory are told from others."""

from treadle.utilities import memory


def test_errors_of_memory() -> None:
    assert memory.is_oom_error(RuntimeError("CUDA error: out of memory"))
    assert memory.is_cuda_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert memory.is_out_of_cpu_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    assert not memory.is_oom_error(RuntimeError("no"))
