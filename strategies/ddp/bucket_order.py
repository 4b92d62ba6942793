"""Order in which the gradients of a replica become ready, which determines how they are summed.

torch reduces gradients in buckets. After the first backward pass, it rebuilds the buckets in the order in which the
gradients became ready. With three or more processes, the position of an element in its bucket determines the order in
which the processes' gradients are added. This order affects the last bit of the sum. A resumed run would begin with the
initial buckets again. It therefore first runs a backward pass with zeros, in the order stored in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor


class ReadyOrder:
    """Order in which the gradients of one replica become ready.

    torch rebuilds its buckets in this order after the first backward pass. With three or more processes, the buckets
    affect the last bit of the sums. A resumed run therefore rehearses the order of its checkpoint. ``fixed`` means that
    torch never rebuilds the buckets, so no order is recorded.

    Attributes:
        order: Indices of the trained parameters in this order; empty if it is unknown.
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
        """True while hooks record the order."""
        return bool(self._handles)

    def finish_recording(self) -> None:
        """Stop recording if a backward pass with reduction was recorded. Must be called between two backward passes."""
        if self.order:
            for handle in self._handles:
                handle.remove()
            self._handles = []

    def rehearse(self, order: Iterable[int]) -> None:
        """Run a backward pass with zeros in ``order``, so that torch rebuilds its buckets in this order.

        Must be called on all ranks. Existing gradients are discarded. An order that does not match this model is
        ignored.
        """
        order, replica = list(order), self._replica()
        if replica is None or not order or sorted(order) != list(range(len(self._parameters))):
            return
        replica.reducer.prepare_for_forward()
        replica.reducer.prepare_for_backward([])  # as torch's own forward does
        with torch.enable_grad():
            for number in order:
                (self._parameters[number].sum() * 0).backward()
        for parameter in self._parameters:
            parameter.grad = None
        self.order = order
        self.finish_recording()
