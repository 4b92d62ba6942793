"""One process among the others: who it is, and what it exchanges with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

from ..strategies import World
from . import exchange
from .loader import Cursor


class Process:
    """The part of an `Accelerator` that speaks to the other processes. A world of one answers at once.

    Args:
        world: all processes.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.cursor = Cursor()
        self._trigger = False

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self.world.device

    @property
    def num_processes(self) -> int:
        """Processes in all."""
        return self.world.size

    @property
    def process_index(self) -> int:
        """This process's rank."""
        return self.world.rank

    @property
    def local_process_index(self) -> int:
        """This process's rank on its machine."""
        return self.world.local_rank

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank zero."""
        return self.world.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its machine."""
        return self.world.local_rank == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last rank."""
        return self.world.rank == self.world.size - 1

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self.world.size > 1

    # -- exchange ------------------------------------------------------------------------------------------------

    def wait_for_everyone(self) -> None:
        """Wait until every process is here."""
        self.world.barrier()

    def end_training(self) -> None:
        """Wait for everyone at the end of a run."""
        self.wait_for_everyone()

    def gather(self, tensor: Any) -> Any:
        """Concatenate every process's tensors along dimension 0, on every process.

        Args:
            tensor: a tensor, or tensors nested in dicts, lists or tuples; row counts may differ.
        """
        return exchange.gather(tensor, self.world)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather what was computed from the current batch, each sample of the dataset once, in its order.

        Args:
            input_data: tensors of any row count (samples, tokens) or 0-d, nested as you like; or other objects.
            use_gather_object: treat the value as objects even if it holds tensors.

        Returns:
            Tensors concatenated along dimension 0; what holds no tensor as one list.
        """
        micro = self.cursor.micro
        stand_in = micro is not None and not micro.samples
        if use_gather_object or not exchange.holds_tensor(input_data):
            return exchange.gather_objects([] if stand_in else input_data, self.world)
        return exchange.gather(input_data, self.world, empty=stand_in)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Combine tensors over the processes: ``"sum"``, ``"mean"``, ``"max"``, ``"min"`` or ``"none"``."""
        return exchange.reduce(tensor, self.world, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """Pad tensors along ``dim`` to the longest of any process, with ``pad_index``."""
        return exchange.pad_across_processes(tensor, self.world, dim, pad_index, pad_first)

    def set_trigger(self) -> None:
        """Raise a flag that `check_trigger` shows on every process."""
        self._trigger = True

    def check_trigger(self) -> bool:
        """Whether any process has raised the flag since the last check. All processes must ask."""
        raised, self._trigger = self.world.any(self._trigger), False
        return raised

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print`` on rank zero."""
        if self.is_main_process:
            print(*args, **kwargs)

    def on_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorator: run on rank zero; None elsewhere."""

        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if self.is_main_process else None

        return run

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Rank zero runs the block before the others do, who go on even if it raises."""
        if not self.is_main_process:
            self.wait_for_everyone()
        try:
            yield
        finally:
            if self.is_main_process:
                self.wait_for_everyone()
