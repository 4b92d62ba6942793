"""Attention masks that separate the documents in a packed row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def make_sdpa_mask(seq_idx: Tensor, causal: bool = True) -> Tensor:
    """Return a mask for ``scaled_dot_product_attention`` with which tokens attend only to their own document.

    Args:
        seq_idx: Tensor of shape ``[rows, length]`` with the document of each token, as in the batches of `pack`.
        causal: Whether a token attends only to itself and to earlier tokens. Default: True. Do not pass ``is_causal``
            to ``scaled_dot_product_attention`` as well.

    Returns:
        Boolean tensor of shape ``[rows, 1, length, length]``; True where a token (third dimension) attends to another.

    Examples:
        >>> import torch
        >>> from treadle.data import make_sdpa_mask
        >>> make_sdpa_mask(torch.tensor([[0, 0, 1]])).int()
        tensor([[[[1, 0, 0],
                  [1, 1, 0],
                  [0, 0, 1]]]], dtype=torch.int32)
    """
    mask = seq_idx[:, None, :, None] == seq_idx[:, None, None, :]
    return mask.tril() if causal else mask


def make_flex_mask(seq_idx: Tensor, causal: bool = True) -> BlockMask:
    """Return a mask for ``flex_attention`` with which tokens attend only to their own document.

    ``flex_attention`` skips the blocks of the matrix that are fully masked. On CPUs, torch's ``flex_attention`` has no
    backward pass, so it can evaluate a model but not train it.

    Args:
        seq_idx: Tensor of shape ``[rows, length]`` with the document of each token, as in the batches of `pack`.
        causal: Whether a token attends only to itself and to earlier tokens. Default: True.

    Returns:
        Block mask on the device of ``seq_idx``, for any number of heads.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    def attends(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = seq_idx[row, query] == seq_idx[row, key]
        return same & (query >= key) if causal else same

    rows, length = seq_idx.shape
    return create_block_mask(attends, rows, None, length, length, device=torch.device(seq_idx.device))  # type: ignore[arg-type]
