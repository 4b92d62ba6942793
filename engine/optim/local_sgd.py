"""Steps that each process takes alone, with parameters that are averaged now and then."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import nn

from ...common.validation import check_int
from ...strategies.ddp import average

if TYPE_CHECKING:
    from ..accelerator import Accelerator


class LocalSGD:
    """A context in which processes train copies of their own and meet every few optimizer steps::

        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8) as local_sgd:
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(loss(model(batch)))
                    optimizer.step()
                    optimizer.zero_grad()
                    local_sgd.step()

    Args:
        accelerator: whose processes these are.
        model: a prepared model, a whole replica on each process.
        local_sgd_steps: optimizer steps from one average of the parameters to the next; there is one at the end too.
        enabled: False makes it do nothing, as on one process.

    Raises:
        ValueError: for a number that is not positive, or a strategy that can't.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, local_sgd_steps: int, enabled: bool = True) -> None:
        check_int("local_sgd_steps", local_sgd_steps, 1)
        self.enabled = enabled and accelerator.num_processes > 1
        self.num_steps = 0
        self.local_sgd_steps = local_sgd_steps
        self._accelerator = accelerator
        self._model = model
        self._apart: AbstractContextManager[Any] | None = None

    def __enter__(self) -> LocalSGD:
        if self.enabled:
            self._apart = self._accelerator.strategy.steps_apart(self._model)
            self._apart.__enter__()
        return self

    def step(self) -> None:
        """After each micro-batch: count it if it ended an optimizer step, and average if it is time."""
        if not self.enabled or not self._accelerator.sync_gradients:
            return
        self.num_steps += 1
        if self.num_steps % self.local_sgd_steps == 0:
            self._average()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._apart is not None:
            self._apart.__exit__(kind, error, trace)
            self._apart = None
            if error is None and self.num_steps % self.local_sgd_steps:  # the others would wait for one that failed
                self._average()

    def _average(self) -> None:
        parameters = self._accelerator.unwrap_model(self._model).parameters()
        average([p for p in parameters if p.requires_grad], self._accelerator.world)
