"""Averaging of gradients at the end of every backward pass, for manual optimization."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.utils.weak import TensorWeakRef

from .coalesced import average_gradients, broadcast, count_ranks

if TYPE_CHECKING:
    from ..strategy import Strategy


class BackwardReduction:
    """Hooks that average gradients over the ranks at the end of each backward pass, even of ``loss.backward()``.

    torch's DDP needs one forward pass through its wrapper per backward pass. Manual optimization may call any method of
    the model, and run any number of backward passes on any part of it. Autograd itself therefore reports which
    gradients a pass has accumulated into. They are averaged together when the pass ends.

    A gradient is averaged as a whole, including what earlier passes have accumulated. This is exact, because the mean
    of values that are equal on all ranks is that value.

    Attributes:
        unreduced: Parameters whose gradients contain contributions of one rank alone, with their versions at that
            time. Those of another rank are known here after the next average.
        blocked: Number of active `no_sync` contexts.
        enabled: False if backward passes accumulate without a reduction, as in `no_sync`.
    """

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self.unreduced = strategy.unreduced
        self.blocked = 0
        self.enabled = True
        self._names: dict[Tensor, str] = {}  # of all parameters, in the same order on all ranks
        self._handles: list[Any] = []
        self._nodes: list[Any] = []  # of the autograd graph, which would otherwise be freed along with their hooks
        self._averaged: dict[Tensor, TensorWeakRef] = {}  # the gradients that were averaged last
        self._touched: dict[Tensor, None] = {}
        self._pass: int | None = None  # the backward pass at whose end `_finish_pass` is due

    def add(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Include parameters, given with their names, which must be the same on all ranks."""
        for name, parameter in parameters:
            if parameter in self._names or not (parameter.is_floating_point() or parameter.is_complex()):
                continue
            self._names[parameter] = name
            trained = parameter.requires_grad
            parameter.requires_grad_(True)  # a hook of a frozen parameter is for the time after it is unfrozen
            node = torch.autograd.graph.get_gradient_edge(parameter).node
            self._nodes.append(node)
            self._handles.append(node.register_prehook(self._weigh))
            self._handles.append(parameter.register_post_accumulate_grad_hook(self._note_gradient))
            parameter.requires_grad_(trained)

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()
        for collection in (self._handles, self._nodes, self._names, self._averaged, self._touched, self.unreduced):
            collection.clear()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which backward passes accumulate each rank's own gradients."""
        self.blocked += 1
        try:
            yield
        finally:
            self.blocked -= 1

    def _weigh(self, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        weight = self.strategy.backward_weight
        return None if weight == 1.0 else tuple(gradient * weight for gradient in gradients)

    def _note_gradient(self, parameter: Tensor) -> None:
        self._touched[parameter] = None
        current = torch._C._current_graph_task_id()
        if self._pass != current:  # not a flag, which a pass that raised an error would leave set
            self._pass = current
            Variable._execution_engine.queue_callback(self._finish_pass)  # as torch's own fully_shard

    def _finish_pass(self) -> None:
        touched, self._touched, self._pass = self._touched, {}, None
        if self.blocked or not self.enabled:
            self.unreduced.update((parameter, parameter._version) for parameter in touched)
        elif touched:
            # Others stay as they are, such as those of a second network whose gradients are accumulated meanwhile.
            pending = {parameter: None for parameter in self.unreduced if parameter.requires_grad}
            self._average({**pending, **touched})

    @torch.no_grad()
    def finish(self, parameters: Iterable[Tensor]) -> None:
        """Average those of the gradients that no backward pass has averaged, before an optimizer step.

        They come from `no_sync`, or were assigned to ``parameter.grad``. Parameters that were created after `add` are
        included from here on.
        """
        parameters = list(parameters)
        new = [parameter for parameter in parameters if parameter not in self._names]
        if new:
            self.add((f"a parameter of shape {tuple(parameter.shape)}", parameter) for parameter in new)
            broadcast((parameter.detach() for parameter in new), self.strategy.world, 0)
        pending = dict.fromkeys(new)
        for parameter in parameters:
            averaged = self._averaged.get(parameter)
            if parameter in self.unreduced:
                pending[parameter] = None
            elif parameter.grad is not None and (averaged is None or averaged() is not parameter.grad):
                pending[parameter] = None
                # If it was computed from averaged gradients, this and the average leave it as it is.
                parameter.grad.mul_(self.strategy.backward_weight)
        if pending or self.unreduced:  # or another rank has used other parameters in `no_sync`
            self._average(pending, dict.fromkeys(parameters))

    @torch.no_grad()
    def _average(self, chosen: dict[Tensor, None], asked: Collection[Tensor] = ()) -> None:
        strategy, world = self.strategy, self.strategy.world
        moved = self._find_moved()
        remaining = self.unreduced.keys() - chosen.keys()
        # A rank may have used other parameters than the rest.
        none = [False] * len(self._names)
        flags = [[p in some for p in self._names] if some else none for some in (chosen, moved, remaining, asked)]
        is_chosen, is_moved, is_unreduced, is_asked = count_ranks(flags, world)
        for name, count in zip(self._names.values(), is_asked, strict=True):
            if 0 < count < world.size:
                raise ValueError(
                    f"an optimizer of {name} is about to step on {count} of {world.size} ranks, while the others run a "
                    "backward pass or step another optimizer. All ranks must run the same backward passes and steps "
                    "in the same order, and no rank may be the only one to set the gradients of an optimizer."
                )
        for parameter, count in zip(self._names, is_unreduced, strict=True):
            if count:
                self.unreduced.setdefault(parameter, parameter._version)
        if any(is_moved):
            self._compare([p for p, count in zip(self._names, is_moved, strict=True) if count])
        used = [p for p, count in zip(self._names, is_chosen, strict=True) if count]
        note = None if strategy.backward_note is None else strategy.backward_note()
        strategy.agreed_note = average_gradients(used, world, note)
        for parameter in used:
            self.unreduced.pop(parameter, None)
            self._averaged[parameter] = TensorWeakRef(parameter.grad)  # type: ignore[arg-type]  # it has one now

    def _find_moved(self) -> dict[Tensor, None]:
        return {p: None for p, version in self.unreduced.items() if p._version != version}

    def check_replicas(self, updated: Iterable[Tensor]) -> None:
        """Check that no update has used gradients that were not averaged.

        Args:
            updated: Parameters that were updated without an optimizer.

        Raises:
            ValueError: If a parameter differs between the ranks.
        """
        moved = dict.fromkeys([*self._find_moved(), *(p for p in updated if p in self._names)])
        if moved:
            self._compare(list(moved))

    @torch.no_grad()
    def _compare(self, parameters: list[Tensor]) -> None:
        """Raise an error on all ranks if a parameter differs between them. Equal changes, such as a clamp, may pass."""
        norms = torch.stack([torch.linalg.vector_norm(p).double().cpu() for p in parameters])
        largest, smallest = self.strategy.world.all_reduce(torch.stack([norms, -norms]), "max")
        differing = [p for p, high, low in zip(parameters, largest, smallest, strict=True) if high != -low]
        if differing:
            others = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
            raise ValueError(
                f"{self._names[differing[0]]}{others} was updated with gradients that are not averaged, so the ranks "
                "have different weights. manual_backward averages gradients, except in no_sync, block_backward_sync "
                "and toggle_model(sync_grad=False), and torch.autograd.grad does not. Run the last manual_backward "
                "before an update outside of these contexts, or step an optimizer, which averages gradients first."
            )
        self.unreduced.update((p, p._version) for p in parameters if p in self.unreduced)
