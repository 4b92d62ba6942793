"""The memory of a tensor, byte by byte."""

from __future__ import annotations

import torch
from torch import Tensor


def view_bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor on the CPU as a vector of bytes.

    Not with ``reshape(-1)``: a tensor of one element is contiguous whatever its stride, keeps that, and then can't be
    viewed as another dtype.
    """
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
