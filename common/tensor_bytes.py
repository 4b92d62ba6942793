"""View of a tensor's memory as bytes."""

from __future__ import annotations

import torch
from torch import Tensor


def view_bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor on the CPU as a vector of bytes that shares the memory.

    A tensor of one element is contiguous with any stride. ``reshape(-1)`` would keep this stride, with which the tensor
    may not be viewable as another dtype.
    """
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
