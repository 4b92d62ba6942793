"""Reduction of gradients in a `FixedTree`, with the same bits on any number of processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..distributed import FixedTree, PartialSums, World

# torch 2.13 renamed it.
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class FixedOrder(PartialSums):
    """Partial sums with a communication hook, which adds the processes' gradients in a fixed tree without a division.

    Each rank adds one part of a bucket for all ranks, and sends the result to all. As many bytes are sent as in an
    all-reduce. The first exchange of a bucket runs while the buckets after it are computed, and is completed when the
    next bucket is ready, so that all ranks call the collectives in the same order.

    Args:
        tree: The tree.
        world: The processes.
        fills: Whether parameters with a held sum need a gradient before the last backward pass, even if that does not
            use them.
    """

    def __init__(self, tree: FixedTree, world: World, fills: bool = False) -> None:
        super().__init__()
        self._tree, self._world, self._fills = tree, world, fills
        self._complete: Callable[[], None] | None = None  # for the bucket before
        self._ignored: set[Tensor] = set()  # parameters whose gradients are those of a placeholder

    def register(self, module: torch.nn.parallel.DistributedDataParallel) -> None:
        """Register the hook with a replica."""

        def send(state, bucket):  # type: ignore[no-untyped-def]  # torch refuses annotations that are strings
            return state._reduce(bucket)

        module.register_comm_hook(self, send)

    def begin(self, parameters: Iterable[Tensor], number: int, last: bool, empty: bool = False) -> None:
        """See `PartialSums.begin`."""
        parameters = list(parameters)
        super().begin(parameters, number, last, empty)
        if last and self._fills:
            self.fill(parameters)
        self._ignored = set(parameters) if empty else set()

    def end(self, parameters: Iterable[Tensor]) -> None:
        """See `PartialSums.end`. The hook has completed the gradients of the last micro-batch."""
        if not self.last:
            super().end(parameters)

    def _reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        if bucket.index() == 0:
            self._complete = None  # of a backward pass that failed
        parameters, gradients = bucket.parameters(), bucket.gradients()
        for parameter, gradient in zip(parameters, gradients, strict=True) if self._ignored else ():
            if parameter in self._ignored:  # not votes, which are reduced with the gradients
                gradient.zero_()
        self.add_to(parameters, gradients)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        before, self._complete = self._complete, self._exchange(bucket.buffer(), done)
        if before is not None:
            before()
        if bucket.is_last():
            self._complete()
        return done

    def _exchange(self, buffer: Tensor, done: torch.futures.Future[Tensor]) -> Callable[[], None]:
        """Send each rank its part of a bucket, and return the function that adds the parts and completes ``done``."""
        world, group, count = self._world, self._world.group, buffer.numel()
        size = -(-count // world.size)
        sizes = [max(0, min(size, count - size * rank)) for rank in range(world.size)]
        own = sizes[world.rank]
        received = buffer.new_empty(world.size * own)
        work: Any = dist.all_to_all_single(received, buffer, [own] * world.size, sizes, group=group, async_op=True)

        def complete() -> None:
            work.wait()
            part = buffer.new_zeros(size)
            # A placeholder's gradients are zeros of either sign. Adding 0.0 makes every zero positive.
            torch.add(self._tree.add(list(received.view(world.size, own))), 0.0, out=part[:own])
            whole = buffer.new_empty(world.size * size)
            gathered: Any = _gather(whole, part, group=group, async_op=True)

            def finish(future: Any) -> None:
                try:
                    future.wait()
                    done.set_result(buffer.copy_(whole[:count]))
                except RuntimeError as error:
                    done.set_exception(error)  # type: ignore[arg-type]  # torch's annotation

            gathered.get_future().then(finish)

        return complete
