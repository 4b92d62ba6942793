"""Sums over the micro-batches of a step whose rounding does not depend on the number of processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...common.validation import check_int
from .tensors import local


class FixedTree:
    """Fixed binary tree in which the micro-batches of an optimizer step are added, whatever processes compute them.

    The sum of floating-point numbers depends on the order of the additions. Here, the number of micro-batches is a
    power of two, the sums of both halves are added, and each half is split further in the same way. A rank has the
    micro-batches of an aligned subtree, so it adds its own, and the ranks' sums are added in the rest of the tree.
    Micro-batches that a short step does not have are left out.

    Args:
        leaves: Number of micro-batches per optimizer step.
        ranks: Number of processes.

    Attributes:
        parts: The numbers of each rank's micro-batches.
        most: Number of micro-batches that each rank runs in a full step.

    Raises:
        ValueError: If ``leaves`` is not a power of two, or less than ``ranks``.

    Examples:
        >>> from treadle.strategies.distributed import FixedTree
        >>> FixedTree(8, 3).parts
        [range(0, 4), range(4, 6), range(6, 8)]
    """

    def __init__(self, leaves: int, ranks: int) -> None:
        check_int("step_micro_batches", leaves, 1)
        if leaves & (leaves - 1):
            below = 1 << (leaves.bit_length() - 1)
            raise ValueError(
                f"step_micro_batches={leaves} must be a power of two, because the micro-batches of a step are added in "
                f"pairs, pairs of pairs and so on. Use {below} or {2 * below}."
            )
        if leaves < ranks:
            raise ValueError(
                f"step_micro_batches={leaves} must be at least the number of processes, {ranks}, because each process "
                "computes whole micro-batches. Increase it, or use fewer processes."
            )
        self.leaves, self.ranks = leaves, ranks
        # Halves, because a part of equal length for each of 3 ranks would cut a subtree, whose sum no rank would have.
        # As the longest part is halved, no rank computes more than twice as many micro-batches as another.
        parts = [range(leaves)]
        while len(parts) < ranks:
            at = max(range(len(parts)), key=lambda n: (len(parts[n]), n))
            middle = (parts[at].start + parts[at].stop) // 2
            parts[at : at + 1] = [range(parts[at].start, middle), range(middle, parts[at].stop)]
        self.parts = parts
        self.most = max(map(len, parts))

    def rows(self, leaves: int) -> int:
        """Return how many micro-batches each rank runs for the first ``leaves`` ones of an epoch, with placeholders."""
        steps, rest = divmod(leaves, self.leaves)
        partial = max(min(len(part), max(0, rest - part.start)) for part in self.parts)
        return steps * self.most + partial

    def leaves_in(self, rows: int) -> int:
        """Return how many micro-batches, over all ranks, the steps contain in which a rank runs its first ``rows``."""
        return -(-rows // self.most) * self.leaves

    def cut(self, leaves: int) -> list[list[int | None]]:
        """Return the ranks' micro-batches of a step with ``leaves`` ones, one list per position in the step.

        None stands for a placeholder, with which a rank stays in step. Placeholders are a rank's last ones.
        """
        return [
            [part[row] if row < len(part) and part[row] < leaves else None for part in self.parts]
            for row in range(self.rows(leaves) or 1)
        ]

    def add(self, sums: Sequence[Tensor], first: int = 0) -> Tensor:
        """Add the sums of all ranks, or of those from ``first`` on that share a subtree. The sums are overwritten."""
        parts = self.parts[first : first + len(sums)]
        by_start = {part.start: (len(part), total) for part, total in zip(parts, sums, strict=True)}

        def add_node(start: int, size: int) -> Tensor:
            own, total = by_start.get(start, (0, None))
            if own == size:
                assert total is not None
                return total
            left = add_node(start, size // 2)
            return left.add_(add_node(start + size // 2, size // 2))

        return add_node(parts[0].start, parts[-1].stop - parts[0].start)


class PartialSums:
    """Sums of a rank's gradients in a `FixedTree`, held like the bits of a binary counter.

    After each micro-batch but the last one, the gradients are taken from the parameters. Two sums of equally many
    micro-batches become one, so at most ``log2`` of their number are held. Subclasses add the sums of several ranks.

    Attributes:
        number: Index of the current micro-batch among those of this rank in the step.
        last: Whether it is the last one.
        empty: Whether it is a placeholder, whose gradients do not count.

    Examples:
        >>> import torch
        >>> from treadle.strategies.distributed import PartialSums
        >>> weight, sums = torch.zeros(1, requires_grad=True), PartialSums()
        >>> for number in range(4):
        ...     sums.begin([weight], number, number == 3)
        ...     weight.grad = torch.ones(1)
        ...     sums.end([weight])
        >>> weight.grad
        tensor([4.])
    """

    def __init__(self) -> None:
        self.number, self.last, self.empty = 0, True, False
        self._held: dict[Any, list[Tensor | None]] = {}

    def clear(self) -> None:
        """Discard all sums."""
        self._held = {}

    def begin(self, parameters: Iterable[Tensor], number: int, last: bool, empty: bool = False) -> None:
        """Begin a micro-batch, and take the gradients of the previous one from the parameters.

        The first micro-batch of a step discards what is left of the gradients and sums of these parameters.
        """
        parameters = list(parameters)
        if not number:
            for parameter in parameters:
                self._held.pop(parameter, None)
        else:
            self.hold(parameters, [parameter.grad for parameter in parameters], number - 1)
        # Otherwise, torch would add the gradients one after another: ((0 + 1) + 2) + 3 is not (0 + 1) + (2 + 3), which
        # is what two ranks with two micro-batches each compute.
        for parameter in parameters:
            parameter.grad = None
        self.number, self.last, self.empty = number, last, empty

    def end(self, parameters: Iterable[Tensor]) -> None:
        """End a micro-batch after its backward pass. After the last one, the gradients of the step are complete."""
        parameters = list(parameters)
        if self.empty:  # the loss was multiplied by 0, but its gradients may not be finite
            for parameter in parameters:
                parameter.grad = None
        if self.last:
            self.fill(parameters)
            trained = [parameter for parameter in parameters if parameter.grad is not None]
            gradients = [local(parameter.grad) for parameter in trained if parameter.grad is not None]
            if gradients:
                self.add_to(trained, gradients)
                # -0.0 + 0.0 is 0.0. Zeros of placeholders have either sign, and the number of ranks determines how many
                # placeholders there are.
                torch._foreach_add_(gradients, 0.0)

    def hold(self, keys: Iterable[Any], gradients: Sequence[Tensor | None], number: int) -> None:
        """Hold the gradients of micro-batch ``number``, each under its key, such as the parameter."""
        stacks = [self._held.setdefault(key, []) for key in keys]
        for gradient, stack in zip(gradients, stacks, strict=True):
            stack.append(gradient)
        while number % 2:
            lefts, rights = [], []
            for stack in stacks:
                right, left = stack.pop(), stack[-1]
                if left is None:  # not used in that micro-batch; without its place, the sum's depth would be wrong
                    stack[-1] = right
                elif right is not None:
                    lefts.append(local(left))
                    rights.append(local(right))
            if lefts:
                torch._foreach_add_(lefts, rights)
            number //= 2

    def fill(self, parameters: Iterable[Tensor]) -> None:
        """Give parameters that have a held sum, but no gradient, a gradient of zeros."""
        for parameter in parameters:
            if parameter.grad is None and any(total is not None for total in self._held.get(parameter, ())):
                parameter.grad = torch.zeros_like(parameter)

    def add_to(self, keys: Sequence[Any], gradients: Sequence[Tensor]) -> None:
        """Add the held sums to the ``gradients`` of the last micro-batch, the smallest sum first."""
        # Each is the left neighbour of what has been added before. a + b has the bits of b + a.
        stacks = [self._held.get(key, ()) for key in keys]
        for depth in range(1, 1 + max(map(len, stacks), default=0)):
            pairs = [
                (gradient, local(held))
                for gradient, stack in zip(gradients, stacks, strict=True)
                if len(stack) >= depth and (held := stack[-depth]) is not None
            ]
            if pairs:
                torch._foreach_add_(*map(list, zip(*pairs, strict=True)))
