"""View of a tensor's memory as bytes."""

from __future__ import annotations

import torch
from torch import Tensor


def view_bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor on the CPU as a vector of bytes that shares the memory.

    ``reshape(-1)`` fails for some tensors of one element, which count as contiguous with any stride: they keep that
    stride, and then cannot be viewed as another dtype.
    """
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
