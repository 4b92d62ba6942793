"""Gradient scalers for training loops without an Accelerator."""

from __future__ import annotations

from typing import Any

import torch


def get_grad_scaler(distributed_type: Any = None, **kwargs: Any) -> torch.amp.GradScaler:
    """Return a gradient scaler for this machine's accelerator, or for CUDA if the machine has none.

    With ``DistributedType.FSDP``, it checks the shards of all ranks for overflow.
    """
    if getattr(distributed_type, "value", distributed_type) == "FSDP":
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        return ShardedGradScaler(**kwargs)
    current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.amp.GradScaler("cuda" if current is None else current.type, **kwargs)
