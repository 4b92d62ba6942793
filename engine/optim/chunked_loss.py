"""`chunked_cross_entropy`: loss of a linear head whose logits are never in memory all at once."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ...common.messages import name_type
from ...strategies.distributed import count_shards, gather_parameters, is_sharded

_FEWEST_ROWS = 256  # smaller chunks would spend more time on reading the weight than on arithmetic


def chunked_cross_entropy(
    hidden: Tensor,
    head: nn.Module | Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """Return the cross-entropy of a linear head, as ``F.cross_entropy(head(hidden), targets)`` does, in less memory.

    The logits are computed for some of the samples at a time, and again in the backward pass. In float32 and float64,
    torch's ``linear_cross_entropy`` does so without a second computation, if torch has it (2.13). With FSDP, call this
    function in ``training_step`` or ``forward``.

    Args:
        hidden: Inputs of the head, of shape ``(..., features)``.
        head: ``nn.Linear``, an ``nn.Embedding`` whose weight is the head's, or a weight ``(classes, features)``.
        targets: Class indices, of shape ``(...)``.
        ignore_index: Target that does not contribute to the loss. Default: -100.
        label_smoothing: Share of the target that is spread over all classes. Default: 0.0.
        reduction: ``"mean"`` (default) over the targets that are not ignored, or ``"sum"``.

    Returns:
        A 0-d tensor, in float32 for inputs of lower precision.

    Raises:
        TypeError: If ``head`` is neither of these modules nor a tensor.
        ValueError: If ``reduction`` is invalid, the number of targets is another one, or the weight is sharded.

    Examples:
        >>> import torch
        >>> import treadle as tl
        >>> head, hidden, targets = torch.nn.Linear(8, 1000), torch.randn(2, 64, 8), torch.randint(1000, (2, 64))
        >>> loss = tl.chunked_cross_entropy(hidden, head, targets)
        >>> plain = torch.nn.functional.cross_entropy(head(hidden).flatten(0, 1), targets.flatten())
        >>> torch.allclose(loss, plain)
        True
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction={reduction!r} must be 'mean' or 'sum'.")
    weight, bias = _get_weights(head)
    hidden, targets = _flatten(hidden, targets)
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        hidden = hidden.to(torch.get_autocast_dtype(device))
    rows = max(_FEWEST_ROWS, hidden.numel() // len(weight))  # a chunk's logits are as large as ``hidden``
    # In lower precision, torch's function (2.13) rounds the loss, and factors such as 1 / count, to that precision.
    with torch.autocast(device, enabled=False):
        if _is_exact(hidden) and not label_smoothing and hasattr(torch.nn, "LinearCrossEntropyOptions"):
            options: dict[str, Any] = {"linear_bias": bias, "ignore_index": ignore_index, "reduction": "sum"}
            chunks = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=rows, chunking_method=None)
            total = F.linear_cross_entropy(hidden, weight, targets, options=chunks, **options)
        else:
            options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": "sum"}
            total = _recompute_chunks(hidden, targets, weight, bias, rows, options)
    if reduction == "sum":
        return total
    count = (targets != ignore_index).sum()  # without targets, the loss is NaN, but gradients are zero, as torch's are
    return torch.where(count > 0, total / count.clamp(min=1), torch.full_like(total, math.nan))


def _flatten(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    if hidden.shape[:-1].numel() != targets.numel():
        raise ValueError(
            f"hidden has shape {tuple(hidden.shape)} and targets {tuple(targets.shape)}, but each vector of hidden "
            "needs one target. Cut both to the same tokens."
        )
    return hidden.flatten(0, -2), targets.flatten()


def _recompute_chunks(
    hidden: Tensor, targets: Tensor, weight: Tensor, bias: Tensor | None, rows: int, options: dict[str, Any]
) -> Tensor:
    """Return the sum of the losses of chunks, whose logits are recomputed in the backward pass."""
    if not _is_exact(hidden):  # so that the gradients of the chunks are summed in float32
        weight, bias = weight.float(), None if bias is None else bias.float()
    losses = [
        checkpoint(_sum_losses, *chunk, weight, bias, options, use_reentrant=False, preserve_rng_state=False)
        for chunk in zip(hidden.split(rows), targets.split(rows), strict=True)
    ]
    return torch.stack(losses).sum()


def _is_exact(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.float32, torch.float64)


def _sum_losses(
    hidden: Tensor, targets: Tensor, weight: Tensor, bias: Tensor | None, options: dict[str, Any]
) -> Tensor:
    logits = F.linear(hidden, weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype))
    return F.cross_entropy(logits if _is_exact(logits) else logits.float(), targets, **options)


def _get_weights(head: nn.Module | Tensor) -> tuple[Tensor, Tensor | None]:
    if isinstance(head, nn.Linear | nn.Embedding):
        gather_parameters(head)
        weight, bias = head.weight, getattr(head, "bias", None)
    elif isinstance(head, Tensor):
        weight, bias = head, None
    else:
        raise TypeError(f"head={name_type(head)} must be an nn.Linear, an nn.Embedding or a weight.")
    if is_sharded(weight):
        raise ValueError(
            f"the head's weight is sharded over {count_shards(weight)} processes. Pass the module instead of its "
            "weight, call the loss in training_step or forward, and exclude the head from tensor parallelism."
        )
    return weight, bias
