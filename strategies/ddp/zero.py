"""Sharded optimizer state (ZeRO-1): each process updates its share of the parameters and broadcasts the result."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..distributed import World
from .coalesced import broadcast


class Shards:
    """Assignment of an optimizer's parameters and their state to processes (ZeRO-1).

    The state of parameters that belong to other processes is deleted.

    The user's optimizer is kept. During a step, its groups contain only this process's parameters. Optimizers that
    update each parameter separately therefore work with all group options and schedulers, and the result is
    bit-identical to that of the plain optimizer. In contrast, torch's ``ZeroRedundancyOptimizer`` builds a second
    optimizer from the class and its defaults, without the existing state. It gathers the state on only one process,
    with pickle.

    Source: ZeRO (Rajbhandari et al., 2020), https://arxiv.org/abs/1910.02054
    """

    def __init__(self, optimizer: Optimizer, world: World) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError(
                "zero=True does not support LBFGS, which treats all parameters as one vector. Use zero=False."
            )
        self.world = world
        self.owner: dict[Tensor, int] = {}
        self._load = [0] * world.size
        self._whole: list[list[Tensor]] | None = None
        self._assign(optimizer)
        for parameter in [p for p in optimizer.state if self.owner.get(p, world.rank) != world.rank]:
            del optimizer.state[parameter]
        optimizer.register_step_pre_hook(self._narrow)
        optimizer.register_step_post_hook(self._exchange)

    def _assign(self, optimizer: Optimizer) -> None:
        """Assign each parameter without an owner, the largest first, to the process with the fewest elements."""
        unassigned = [p for group in optimizer.param_groups for p in group["params"] if p not in self.owner]
        for parameter in sorted(unassigned, key=lambda p: p.numel(), reverse=True):
            rank = self._load.index(min(self._load))
            self.owner[parameter] = rank
            self._load[rank] += parameter.numel()

    def _narrow(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Keep only this process's parameters in the groups during a step."""
        self._widen(optimizer)  # a step that raised an error left them narrow
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        replaced: Any = None
        if closure is not None:  # it may clear and clip gradients, so it needs the whole groups
            with torch.enable_grad():
                loss = closure()
            replaced = (optimizer, lambda: loss), {}
        self._assign(optimizer)
        rank, owner = self.world.rank, self.owner
        self._whole = [group["params"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if owner[p] == rank]
        return replaced

    def _widen(self, optimizer: Optimizer) -> None:
        if self._whole is not None:
            for group, parameters in zip(optimizer.param_groups, self._whole, strict=True):
                group["params"] = parameters
            self._whole = None

    def _exchange(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Send the parameters that this process has updated, and receive those of the other processes."""
        self._widen(optimizer)
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        for source in range(self.world.size):
            broadcast([p for p in trained if self.owner[p] == source], self.world, source)

    def load_state_dict(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        """Load this process's share of an optimizer state that covers all parameters."""
        self._assign(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        remote_indices = {i for i, p in enumerate(parameters) if self.owner[p] != self.world.rank}
        local_state = {key: value for key, value in state["state"].items() if key not in remote_indices}
        optimizer.load_state_dict({**state, "state": local_state})
