"""Lightning's names for what a strategy or its world has under a name of ours. Our own code never reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .distributed import World


class StrategyAliases:
    """Base class of `Strategy` that adds Lightning's names, for ``trainer.strategy.barrier()`` and its kin.

    Attributes:
        prepared: the models and the optimizers that were prepared; the Accelerator's lists.
    """

    world: World
    prepared: tuple[Sequence[nn.Module], Sequence[Any]] = ((), ())

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        return self.world.device

    @property
    def is_global_zero(self) -> bool:
        """True on rank zero."""
        return self.world.is_main

    @property
    def global_rank(self) -> int:
        """Rank of this process."""
        return self.world.rank

    @property
    def local_rank(self) -> int:
        """Rank of this process on its machine."""
        return self.world.local_rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.world.size

    @property
    def model(self) -> nn.Module | None:
        """The model as it is called in training; None before it is prepared."""
        models, _ = self.prepared
        return models[0] if models else None

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers, as they were before they were prepared."""
        return [prepared.optimizer for prepared in self.prepared[1]]

    @optimizers.setter
    def optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Go on with other optimizers of the same parameters.

        Raises:
            ValueError: if there are more or fewer than were prepared.
        """
        prepared = self.prepared[1]
        if len(optimizers) != len(prepared):
            raise ValueError(
                f"strategy.optimizers takes as many as configure_optimizers returned: {len(prepared)}, not "
                f"{len(optimizers)}."
            )
        for slot, optimizer in zip(prepared, optimizers, strict=True):
            slot.replace(optimizer)

    def barrier(self, name: str | None = None) -> None:
        """Wait until every process is here; the name says in Lightning where that is, and is not needed."""
        self.world.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return process ``src``'s value of anything that can be pickled. All processes must call it."""
        return self.world.broadcast(obj, src)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all processes say yes, or with ``all=False`` any of them. All processes must call it."""
        return self.world.all(decision) if all else self.world.any(decision)
