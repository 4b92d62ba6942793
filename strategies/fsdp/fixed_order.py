"""Reduction of FSDP2's gradients in a `FixedTree`, with the same bits on any number of processes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..distributed import FixedTree, PartialSums, World, get_original_class
from .sharded_router import iterate_groups_of


class ShardedSums(PartialSums):
    """Partial sums of the flat gradients that FSDP2 reduces for each of its modules.

    Args:
        tree: The tree.
        world: The processes.
        replicas: In hybrid sharding, the processes with the same shards as this one. Default: None.
    """

    def __init__(self, tree: FixedTree, world: World, replicas: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.tree, self.world, self._replicas = tree, world, replicas
        self._reductions: list[_TreeReduction] = []

    def attach(self, root: nn.Module) -> None:
        """Reduce the gradients of a sharded model in the tree."""
        for part in root.modules():
            if not any(True for _ in iterate_groups_of(part)):
                continue
            reduction = _TreeReduction(self, part)
            self._reductions.append(reduction)
            part.set_custom_reduce_scatter(reduction)  # type: ignore[operator]
            part.set_gradient_divide_factor(1.0)  # type: ignore[operator]
            part.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]  # else the factor needs NCCL

    def begin(self, parameters: Iterable[Tensor], number: int, last: bool, empty: bool = False) -> None:
        """See `PartialSums.begin`. The gradients of shards are zeros before the last micro-batch."""
        if not number:
            for parameter in parameters:
                parameter.grad = None
        for reduction in self._reductions if self._replicas is not None else ():
            reduction.module.set_requires_all_reduce(last, recurse=False)  # type: ignore[operator]
        self.number, self.last, self.empty = number, last, empty

    def end(self, parameters: Iterable[Tensor]) -> None:
        """See `PartialSums.end`.

        Raises:
            ValueError: If the loss does not depend on all parameters.
        """
        trained = set(parameters)
        for reduction in self._reductions:
            if reduction.number != self.number and not trained.isdisjoint(reduction.list_trained()):
                reduction.refuse()

    def reduce(self, key: Any, output: Tensor, gradients: Tensor, group: dist.ProcessGroup) -> None:
        """Hold the flat gradients of a module, or add those of all ranks after the last micro-batch."""
        if not self.number:
            self._held.pop(key, None)
        if not self.last:
            if gradients.is_cuda:
                gradients.record_stream(torch.cuda.current_stream())  # FSDP2 has a stream for reductions
            self.hold([key], [None if self.empty else gradients], self.number)
            output.zero_()
            return
        if self.empty:
            gradients.zero_()
        self.add_to([key], [gradients])
        received = torch.empty_like(gradients)
        dist.all_to_all_single(received, gradients, group=group)
        shards = group.size()
        total = self.tree.add(list(received.view(shards, -1)), self.world.rank // shards * shards)
        if self._replicas is not None:
            # torch adds the results of the replicas in an order of its own: one has the sum, the others zeros.
            count = self.world.size // shards
            sums = [torch.empty_like(total) for _ in range(count)]
            dist.all_gather(sums, total, group=self._replicas)
            total = FixedTree(count, count).add(sums) if self.world.rank < shards else total.zero_()
        # A placeholder's gradients are zeros of either sign. Adding 0.0 makes every zero positive.
        torch.add(total, 0.0, out=output)


class _TreeReduction:
    """Reduce-scatter of one FSDP2 module, in the interface of torch."""

    def __init__(self, sums: ShardedSums, module: nn.Module) -> None:
        self._sums, self.module = sums, module
        self.number = -1  # of the micro-batch whose gradients were reduced last

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        size = group.size()
        full = sum(-(-p.shape[0] // size) * size * math.prod(p.shape[1:]) for p in self.list_trained())
        if input_tensor.numel() != full or self.number == self._sums.number != 0:
            self.refuse()
        self.number = self._sums.number
        self._sums.reduce(self, output_tensor, input_tensor, group)

    def list_trained(self) -> list[Tensor]:
        """Return the module's own parameters that need gradients."""
        parameters = (p.sharded_param for _, group in iterate_groups_of(self.module) for p in group.fsdp_params)
        return [parameter for parameter in parameters if parameter.requires_grad]

    def refuse(self) -> None:
        raise ValueError(
            f"step_micro_batches with strategy='fsdp' needs each micro-batch to use all trained parameters of "
            f"{get_original_class(self.module).__name__} in one call, because FSDP adds the gradients of all of them "
            "at once. Use strategy='ddp' with find_unused_parameters=True, or freeze unused parameters."
        )
