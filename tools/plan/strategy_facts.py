"""Properties of the strategies that a plan needs, beside the strategies themselves."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import singledispatch
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...strategies import BALLOT_SIZE, DDP, FSDP, Strategy, ballot_dtype

T = TypeVar("T", bound=Strategy)


class StrategyFacts(Generic[T]):
    """Properties of a strategy in a plan. These are those of a strategy that keeps the model on one process.

    Attributes:
        reduces_unused_gradients: Whether gradients of parameters that were not used in the step are also reduced.
        gathers_in_storage_dtype: Whether shards are gathered in the storage dtype, because no setting selects another.
        recomputes_activations: Whether activations are recomputed in the backward pass.
    """

    reduces_unused_gradients = False
    gathers_in_storage_dtype = False
    recomputes_activations = False

    def __init__(self, strategy: T) -> None:
        self.strategy = strategy

    def grid(self, world_size: int) -> dict[str, int]:
        """Return the degrees ``"replicate"``, ``"shard"`` and ``"tensor"`` for a world size."""
        return {"replicate": world_size, "shard": 1, "tensor": 1}

    def reduction_buckets(self, ready: list[Tensor], *, ballot: bool) -> list[list[int]] | None:
        """Return the groups of gradients that are reduced together, as lists of indices into ``ready``.

        The result is None if the wrapped model performs all reductions itself, so that a plan adds none.

        Args:
            ready: Parameters in the order in which their gradients become ready.
            ballot: Whether the processes' votes are reduced with the gradients; see `Strategy.votes_in_backward`. In
                the result, their index is -1.

        Raises:
            ValueError: If a plan does not support the strategy or its settings.
        """
        if self.strategy.world.size == 1:
            return None
        name = self.strategy.name
        raise ValueError(f"strategy={name!r} is not supported in a plan. Use strategy='ddp' or strategy='fsdp'.")

    def gradient_copy_bytes(self, module: nn.Module) -> int:
        """Return the size in bytes of the buffers that hold copies of the gradients for reduction."""
        return 0

    def buffer_broadcast_bytes(self, module: nn.Module) -> list[int]:
        """Return the sizes in bytes of the broadcasts that send rank zero's buffers in one step."""
        return []

    def change(self, replicate: int | None, recompute: bool | None, gather: torch.dtype | None) -> None:
        """Change the settings that are not None: the number of replicas, recomputation, and the dtype of gathers.

        Raises:
            ValueError: If the strategy does not support a setting.
        """
        settings: dict[str, Any] = {
            "replicate shards": replicate,
            "recompute activations": recompute,
            "gather parameters in another dtype": gather,
        }
        for action in (action for action, value in settings.items() if value is not None):
            raise ValueError(f"strategy={self.strategy.name!r} can't {action}. Use strategy='fsdp'.")


class _ReplicaFacts(StrategyFacts[DDP]):
    @property
    def reduces_unused_gradients(self) -> bool:  # type: ignore[override]
        return self.strategy.world.size > 1

    def reduction_buckets(self, ready: list[Tensor], *, ballot: bool) -> list[list[int]] | None:
        strategy = self.strategy
        if strategy.world.size == 1:
            return None
        settings = {
            "comm_hook": strategy.comm_hook,
            "zero": strategy.zero,
            "sync_batchnorm": strategy.sync_batchnorm,
        }
        for name in (name for name, value in settings.items() if value):
            raise ValueError(f"DDP({name}=...) is not supported in a plan. Remove {name} for the plan.")
        from torch.utils._python_dispatch import _disable_current_modes

        cap = strategy.options["bucket_cap_mb"]
        limits = [dist._DEFAULT_FIRST_BUCKET_BYTES, 25 * 2**20] if cap is None else [int(cap * 2**20)] * 2
        with _disable_current_modes():  # a plan's own mode would count these tensors as part of the model
            shapes = [torch.empty(p.shape, dtype=p.dtype, device="meta") for p in ready]
            if ballot:
                shapes.insert(0, torch.empty(BALLOT_SIZE, dtype=ballot_dtype(ready), device="meta"))
            buckets = dist._compute_bucket_assignment_by_size(shapes, limits, [False] * len(shapes))[0]
        return [[index - ballot for index in bucket] for bucket in buckets]

    def gradient_copy_bytes(self, module: nn.Module) -> int:
        if self.strategy.world.size == 1 or self.strategy.options["gradient_as_bucket_view"]:
            return 0
        return sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)

    def buffer_broadcast_bytes(self, module: nn.Module) -> list[int]:
        if self.strategy.world.size == 1 or not self.strategy.options["broadcast_buffers"]:
            return []
        sizes: dict[torch.dtype, int] = {}
        for buffer in module.buffers():
            sizes[buffer.dtype] = sizes.get(buffer.dtype, 0) + buffer.numel() * buffer.element_size()
        return list(sizes.values())


class _ShardFacts(StrategyFacts[FSDP]):
    @property
    def gathers_in_storage_dtype(self) -> bool:  # type: ignore[override]
        return self.strategy.mixed_precision is None

    @property
    def recomputes_activations(self) -> bool:  # type: ignore[override]
        return bool(self.strategy.activation_checkpointing_policy)

    def grid(self, world_size: int) -> dict[str, int]:
        layout = self.strategy.layout
        shard = layout.sizes(world_size)["data_parallel"]
        return {"replicate": layout.replicate, "shard": shard, "tensor": layout.tensor}

    def reduction_buckets(self, ready: list[Tensor], *, ballot: bool) -> list[list[int]] | None:
        return None

    def change(self, replicate: int | None, recompute: bool | None, gather: torch.dtype | None) -> None:
        if replicate is not None:
            self.strategy.layout = replace(self.strategy.layout, replicate=replicate)
        if recompute is not None:
            self.strategy.activation_checkpointing_policy = recompute
        if gather is not None:
            self.strategy.mixed_precision = FSDP(gather_dtype=gather).mixed_precision


@singledispatch
def facts_of(strategy: Strategy) -> StrategyFacts[Any]:
    """Return the properties of a strategy. Those of a custom strategy can be added with ``facts_of.register``."""
    return StrategyFacts(strategy)


facts_of.register(DDP, _ReplicaFacts)
facts_of.register(FSDP, _ShardFacts)


def varied(
    strategy: Strategy,
    *,
    shard: bool = False,
    replicate: int | None = None,
    recompute: bool | None = None,
    gather: torch.dtype | None = None,
) -> Strategy:
    """Return a copy of a strategy with different settings, for comparison in a plan.

    If ``shard`` is set and the strategy does not shard models, the result is an `FSDP` strategy. The other settings are
    those of `StrategyFacts.change`.
    """
    copied = FSDP() if shard and not strategy.sharded else copy.copy(strategy)
    facts_of(copied).change(replicate, recompute, gather)
    return copied
