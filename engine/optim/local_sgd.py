"""Local SGD: each process takes optimizer steps independently, and parameters are averaged periodically."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import nn

from ...common.validation import check_int
from ...strategies.ddp import average
from ..configuration import refuse_in_tree

if TYPE_CHECKING:
    from ..accelerator import Accelerator


class LocalSGD:
    """Context manager in which each process trains its own replica, and parameters are averaged every few steps.

    Args:
        accelerator: The Accelerator that prepared the model.
        model: A prepared model that is replicated on each process.
        local_sgd_steps: Number of optimizer steps after which the parameters are averaged. When the context ends
            without an exception, they are also averaged if any steps were taken since they were last averaged.
        enabled: Whether to use local SGD. With a world size of one, local SGD is always disabled. Default: True.

    Raises:
        ValueError: If ``local_sgd_steps`` is invalid. With several processes, the ``with`` statement also raises
            this error if the strategy does not support local SGD.

    Examples:
        >>> import torch, treadle
        >>> accelerator = treadle.Accelerator(cpu=True)
        >>> model = torch.nn.Linear(4, 1)
        >>> model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> with treadle.LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8) as local_sgd:
        ...     for batch in torch.randn(3, 2, 4):
        ...         with accelerator.accumulate(model):
        ...             accelerator.backward(model(batch).mean())
        ...             optimizer.step()
        ...             optimizer.zero_grad()
        ...             local_sgd.step()

    Source: Local SGD Converges Fast and Communicates Little (Stich, 2019), https://arxiv.org/abs/1805.09767
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, local_sgd_steps: int, enabled: bool = True) -> None:
        check_int("local_sgd_steps", local_sgd_steps, 1)
        refuse_in_tree("LocalSGD", accelerator.step_micro_batches)
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
        """Count an optimizer step, and average the parameters after every ``local_sgd_steps`` steps.

        Call this method after each micro-batch. With gradient accumulation, only the last micro-batch of each optimizer
        step counts.
        """
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
            if error is None and self.num_steps % self.local_sgd_steps:  # the others would wait for a rank that failed
                self._average()

    def _average(self) -> None:
        parameters = self._accelerator.unwrap_model(self._model).parameters()
        average([p for p in parameters if p.requires_grad], self._accelerator.world)
