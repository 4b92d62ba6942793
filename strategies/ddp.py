"""Replicas that average their gradients: torch's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .precision import Precision
from .router import Ballot, Router
from .strategy import Strategy
from .world import World


class _Replica(DistributedDataParallel):
    """A DDP module through which the attributes of the user's model stay within reach."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class DDP(Strategy):
    """One whole copy of the model on every process; gradients are averaged during backward.

    Args:
        find_unused_parameters: let some parameters take no part in a step, at the cost of a walk over the graph.
        options: further arguments of ``torch.nn.parallel.DistributedDataParallel``
            (``static_graph``, ``bucket_cap_mb``, ``gradient_as_bucket_view``, ``broadcast_buffers``, ...).
    """

    name = "ddp"
    distributed = True

    def __init__(self, find_unused_parameters: bool = False, **options: Any) -> None:
        self.options = {"find_unused_parameters": find_unused_parameters, **options}

    def attach(self, world: World, precision: Precision) -> None:
        """See `Strategy.attach`. On one process there is nothing to average, and nothing is wrapped."""
        super().attach(world, precision)
        self.delays_sync = world.size > 1
        self._ballot: Ballot | None = None

    def wrap(self, module: nn.Module, step: str | None = None) -> nn.Module:
        """See `Strategy.wrap`. With ``step``, what the processes must agree on rides in the gradient reduction."""
        if self.world.size == 1 or not (step or any(p.requires_grad for p in module.parameters())):
            return super().wrap(module)
        self.place(module)
        device = self.world.device
        ballot = None
        if step:
            double = all(p.dtype == torch.float64 for p in module.parameters())
            ballot = self._ballot = Ballot(device, torch.float64 if double else torch.float32)
        router = Router(module, self.precision.context(device), self.precision.compute is not None, ballot)
        return _Replica(router, device_ids=[device] if device.type == "cuda" else None, **self.options)

    def set_gradient_sync(self, module: nn.Module, on: bool) -> None:
        """See `Strategy.set_gradient_sync`; this is the switch behind torch's own ``no_sync``."""
        module.require_backward_grad_sync = on  # type: ignore[assignment]

    def no_sync(self, module: nn.Module) -> Any:
        """See `Strategy.no_sync`."""
        return module.no_sync() if isinstance(module, DistributedDataParallel) else super().no_sync(module)

    def start_agreement(self, votes: Tensor) -> None:
        """See `Strategy.start_agreement`. With a ballot, the coming backward is the exchange."""
        if self._ballot is None:
            super().start_agreement(votes)
        else:
            self._ballot.value = votes.to(self._ballot.carrier.dtype)

    def agreement(self) -> Tensor:
        """See `Strategy.agreement`."""
        ballot = self._ballot
        if ballot is None:
            return super().agreement()
        summed = ballot.carrier.grad
        assert summed is not None, "the step's loss did not carry the ballot"
        ballot.carrier.grad = None
        ballot.clear()
        return summed * self.world.size  # DDP averages


def unused_parameters_allowed(flag: bool) -> Callable[[], DDP]:
    """A factory for the registry's ``ddp_find_unused_parameters_*`` names."""
    return lambda: DDP(find_unused_parameters=flag)
