"""Check that gradients are finite before an optimizer of a user-defined loop steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ...common.messages import announce
from .agreement import Ballots
from .gradient_check import HostCheck, collect_gradients, find_bad, largest_elements
from .nonfinite import SPOILED, Evidence, describe_group, describe_origin, list_samples, order_by_backward
from .optimizer_state import list_parameters

if TYPE_CHECKING:
    from .accumulation import Accumulation
    from .prepared_optimizer import PreparedOptimizer


class GradientGuard:
    """Guard that checks whether gradients are finite before a prepared optimizer steps; see `Accumulation.guard`.

    Replicas have the same gradients after the reduction, so they make the same decision without an exchange.

    The ``policy`` is ``"raise"`` or ``"skip"``. On accelerators, ``"raise"`` takes effect one step later, so that the
    host does not wait for the device. The step itself is skipped on the device if the optimizer supports this.
    """

    def __init__(self, policy: str, loaders: Sequence[Any], *, on_host: bool) -> None:
        self.policy = policy
        self.immediate = on_host or policy == "skip"
        self._on_host = on_host
        self._are_finite = HostCheck()
        self._loaders = loaders
        self._pending: WeakKeyDictionary[PreparedOptimizer, Ballots] = WeakKeyDictionary()

    def __call__(self, optimizer: PreparedOptimizer) -> bool:
        """Return whether the optimizer may step. If it may not, its gradients are discarded.

        Raises:
            ValueError: If the policy is ``"raise"`` and a gradient of this step, or on accelerators of the optimizer's
                previous step, is not finite.
        """
        accumulation = optimizer.accumulation
        if accumulation.loss_scale is not None:  # the loss scaler skips such steps
            return True
        strategy, world = accumulation.strategy, accumulation.world
        if not (self.immediate and self._on_host):
            return self._look_on_device(optimizer)
        finite = self._are_finite((optimizer.optimizer,), strategy.sharded)
        if strategy.sharded:
            finite = world.all(finite)
        if not finite:
            self._refuse(optimizer, find_bad(list_parameters(optimizer)), accumulation.steps_of(optimizer) + 1)
        return finite

    def _look_on_device(self, optimizer: PreparedOptimizer) -> bool:
        accumulation = optimizer.accumulation
        parameters, gradients = collect_gradients((optimizer.optimizer,))
        device = accumulation.world.device
        norms = largest_elements(gradients, device) if gradients else torch.zeros(0, device=device)
        taint = None
        if accumulation.strategy.sharded:
            taint = (norms * 0.0).sum()[None]  # NaN if one of them is not finite
            work = accumulation.world.start_all_reduce(taint)
            if work is not None:
                work.wait()
        ballots = Ballots(taint, [], [norms], parameters, accumulation.steps_of(optimizer) + 1)
        if self.immediate:
            return self._read(optimizer, ballots)
        accumulation.agreement.not_finite = ballots.flag_not_finite()
        before = self._pending.get(optimizer)
        self._pending[optimizer] = ballots.copy_to_host()
        return before is None or self._read(optimizer, before)

    def _read(self, optimizer: PreparedOptimizer, ballots: Ballots) -> bool:
        taint, _, norms = ballots.read()
        bad = [p for p, norm in zip(ballots.watched, norms, strict=True) if not math.isfinite(norm)]
        finite = not bad and (taint is None or math.isfinite(taint[0]))
        if not finite:
            self._refuse(optimizer, bad, ballots.place)
        return finite

    def read_pending(self) -> None:
        """Wait for the device, and read the pending check of each optimizer's latest step.

        Raises:
            ValueError: If a gradient of one of these steps was not finite.
        """
        pending = list(self._pending.items())
        self._pending.clear()
        for optimizer, ballots in pending:
            self._read(optimizer, ballots)

    def _refuse(self, optimizer: PreparedOptimizer, bad: list[Tensor], step: int) -> None:
        """Raise an error, or announce the skipped step and discard its gradients, according to the policy."""
        self._pending.clear()
        accumulation = optimizer.accumulation
        evidence = self._collect_evidence(accumulation, bad)
        if accumulation.strategy.sharded:
            by_rank = dict(enumerate(accumulation.world.gather_objects(evidence)))
        else:
            by_rank = {accumulation.world.rank: evidence}
        origin, order = describe_origin(by_rank)
        problem = f"{origin} is not finite{order} in optimizer step {step}"
        samples = list_samples(by_rank)
        if self.policy == "raise":
            tool = ""
            if accumulation.world.size > 1:
                tool = " The gradients are already reduced over ranks. torch.autograd.detect_anomaly() finds the rank."
            spoiled = "" if self.immediate or optimizer.guarded else SPOILED
            raise ValueError(
                f"{problem}.{samples}{tool}{spoiled} Check the data, lower the learning rate, or clip the gradients. "
                "Accelerator(on_nonfinite='skip') skips such steps."
            )
        announce(f"{problem}, which is skipped.{samples}")
        optimizer.optimizer.zero_grad()

    def _collect_evidence(self, accumulation: Accumulation, bad: list[Tensor]) -> Evidence:
        evidence = Evidence()
        for number, model in enumerate(accumulation.models):
            keys = order_by_backward(bad, model, accumulation.get_latest_loss(), accumulation.strategy)
            if len(accumulation.models) > 1:
                owner = type(accumulation.strategy.unwrap(model)).__name__
                keys = [(position, index, f"{name} (model {number}, {owner})") for position, index, name in keys]
            evidence.gradients += keys
        micro = accumulation.cursor.micro
        loader = next((loader for loader in self._loaders if micro is not None and loader.is_at(micro)), None)
        if loader is not None and micro is not None and self.immediate:
            evidence.samples, _ = describe_group(loader, None, micro.number)
        return evidence
