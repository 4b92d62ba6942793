"""Accelerate's operations over processes and on outputs."""

import torch
from treadle.utils.operations import ConvertOutputsToFp32


def test_outputs_become_whole_floats():
    assert ConvertOutputsToFp32(lambda: torch.ones(1, dtype=torch.bfloat16))().dtype == torch.float32
