"""In which order a replica's gradients become ready, as that decides how they are added up.

After the first backward torch lays out anew what it reduces together, in the order in which the gradients became ready
in it. From three processes on, where a number lies there decides in which order the processes' parts are added, and so
its last bit. A run that goes on from a checkpoint would begin with the first layout again, so it rehearses that
backward: zeros, in the order that the checkpoint names.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor


class ReadyOrder:
    """The order of one replica.

    Args:
        replica: torch's DistributedDataParallel.
        fixed: whether its layout never changes, so that there is nothing to note.

    Attributes:
        order: the numbers of the parameters to be trained, empty before the first reduced backward.
    """

    def __init__(self, replica: Any, fixed: bool) -> None:
        self.order: list[int] = []
        self._replica = ref(replica)
        self._parameters: list[Tensor] = [] if fixed else [p for p in replica.parameters() if p.requires_grad]
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(self._note, number))
            for number, parameter in enumerate(self._parameters)
        ]

    def _note(self, number: int, _: Tensor) -> None:
        replica = self._replica()
        if replica is not None and replica.require_backward_grad_sync:
            self.order.append(number)

    @property
    def watching(self) -> bool:
        """Whether the first reduced backward is still to come, or has just been."""
        return bool(self._handles)

    def settle(self) -> None:
        """Stop watching after the first reduced backward. Called between a backward and the next."""
        if self.order:
            for handle in self._handles:
                handle.remove()
            self._handles = []

    def rehearse(self, order: Iterable[int]) -> None:
        """Let the coming backward be reduced as one after a first backward in this order. All processes must ask.

        Of another model's order nothing is taken.
        """
        order, replica = list(order), self._replica()
        if replica is None or not order or sorted(order) != list(range(len(self._parameters))):
            return
        replica.reducer.prepare_for_forward()
        replica.reducer.prepare_for_backward([])  # what torch's own forward does
        with torch.enable_grad():
            for number in order:
                (self._parameters[number].sum() * 0).backward()
        for parameter in self._parameters:
            parameter.grad = None
        self.order = order
        self.settle()
