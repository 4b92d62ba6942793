"""Autocast and gradient scalers as Accelerate's own code asks for them, outside an Accelerator's methods."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..engine import AcceleratorState


def get_mixed_precision_context_manager(
    native_amp: bool = False, autocast_kwargs: Any = None
) -> AbstractContextManager[Any]:
    """Return the context in which forward passes run in the precision of the current Accelerator.

    Args:
        native_amp: False makes it a context that changes nothing.
        autocast_kwargs: An `AutocastKwargs` with arguments for ``torch.autocast``.
    """
    if not native_amp:
        return nullcontext()
    state = AcceleratorState()
    kwargs = autocast_kwargs.to_kwargs() if autocast_kwargs is not None else {}
    dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}
    if (dtype := dtypes.get(state.mixed_precision)) is not None:
        kwargs["dtype"] = dtype
    return torch.autocast(state.device.type, **kwargs)


def get_grad_scaler(distributed_type: Any = None, **kwargs: Any) -> torch.amp.GradScaler:
    """Return a gradient scaler for this machine's accelerator.

    Args:
        distributed_type: ``DistributedType.FSDP`` for one that looks for overflow in the shards of all processes.
        kwargs: Arguments of ``torch.amp.GradScaler``.
    """
    if getattr(distributed_type, "value", distributed_type) == "FSDP":
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        return ShardedGradScaler(**kwargs)
    current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.amp.GradScaler("cuda" if current is None else current.type, **kwargs)


def get_fsdp2_grad_scaler(**kwargs: Any) -> torch.amp.GradScaler:
    """Return a gradient scaler; the arguments are those of ``torch.amp.GradScaler``."""
    return torch.amp.GradScaler(**kwargs)
