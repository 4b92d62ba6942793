"""Order in which a replica's gradients become ready, which determines how they are added up.

After the first backward, torch regroups the gradients that it reduces together, in the order in which they became
ready. From three processes on, the position of a number in its group determines the order in which the processes'
gradients are added, and thereby the last bit of the sum. A run that resumes from a checkpoint would begin with the
first grouping again, so it rehearses that backward with zeros, in the order stored in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor


class ReadyOrder:
    """Order of one replica's gradients.

    Args:
        replica: Torch's DistributedDataParallel.
        fixed: Whether its grouping never changes, so that there is nothing to record.

    Attributes:
        order: The indices of the trained parameters; empty before the first reduced backward.
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
        """True until the first reduced backward has been recorded."""
        return bool(self._handles)

    def settle(self) -> None:
        """Stop recording after the first reduced backward. Call it between two backward passes."""
        if self.order:
            for handle in self._handles:
                handle.remove()
            self._handles = []

    def rehearse(self, order: Iterable[int]) -> None:
        """Reduce the next backward as if a first backward in this order had preceded it. All processes must call it.

        The order of another model is ignored.

        Args:
            order: The indices of the trained parameters.
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
        self.settle()
