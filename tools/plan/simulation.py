"""Simulation of one optimizer step of one process of a run, without the hardware of the run."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...strategies import built_in_place, iter_tensors
from . import simulated_world
from .meter import ACTIVATIONS, BATCH, GATHERED, GRADIENTS, OPTIMIZER, PARAMETERS, Clocks, Memory, Meter
from .op_costs import Prices, estimate_collective_seconds
from .plan import WAITING, Conditions, Plan
from .strategy_facts import facts_of


def simulate(
    build_model: Callable[[], nn.Module],
    make_batch: Callable[[int], Any],
    loss: Callable[[Any, Any], Tensor],
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer | list[Optimizer]],
    **conditions: Any,
) -> Plan:
    """Simulate one optimizer step of one process with fake tensors, and return its plan.

    Args:
        build_model: Function that creates the model. It is called on the meta device.
        make_batch: Function that creates a batch, given the number of samples.
        loss: Function ``loss(model, batch)``, which must not read a tensor's value. If the condition ``step`` is set,
            its first argument is the model's method of this name instead of the model.
        optimizer: Function that creates an optimizer, or a list of them, given the trainable parameters.
        conditions: Arguments of `Conditions`.

    Raises:
        ValueError: If an argument is invalid, or a plan does not support the step.
        TypeError: If an argument is missing, unknown or of the wrong type.
    """
    on = Conditions(**conditions)
    clocks, memory = Clocks(), Memory()
    meter = Meter(clocks, Prices(on.gpu, on.calibration, on.compiled), memory)
    with simulated_world.simulated_world(on.world_size, on.rank, clocks, memory.resized) as world:
        with built_in_place(torch.device("meta"), on.precision.storage, True):
            model = build_model()
        numbers = [(p.numel(), p.requires_grad) for p in model.parameters()]
        step = _Step(simulated_world.lay_out(on.strategy, world, on.precision, model), on, meter, loss, optimizer)
        step.run(make_batch)
        on.strategy.detach()  # a copy of it, for another plan, has its containers of wrapped models
    return Plan(
        **{field.name: getattr(on, field.name) for field in fields(on)},
        grid=facts_of(on.strategy).grid(on.world_size),
        parameters=sum(number for number, _ in numbers),
        trainable=sum(number for number, trained in numbers if trained),
        shards=step.shards,
        memory={name: size for name, size in memory.peak.items() if size},
        states=step.states,
        checkpoint=step.checkpoint,
        traffic=meter.traffic,
        flops=meter.prices.flops,
        seconds=step.seconds,
        spent=step.spent,
        launched=meter.launched,
    )


class _Step:
    def __init__(self, called: nn.Module, on: Conditions, meter: Meter, loss: Any, optimizer: Any) -> None:
        self.called = called
        self.model = on.strategy.unwrap(called)
        self.on = on
        self.facts = facts_of(on.strategy)
        self.meter = meter
        self.loss = loss
        self.make_optimizers = optimizer
        self.shards: dict[str, tuple[int, ...]] = {}
        self.states: dict[str, int] = {}
        self.checkpoint = 0
        self.seconds = 0.0
        self.spent: dict[str, float] = {}

    def run(self, make_batch: Any) -> None:
        """Run the step with fake tensors."""
        from torch._subclasses.fake_tensor import (
            DataDependentOutputException,
            DynamicOutputShapeException,
            FakeTensorMode,
        )

        memory, meter = self.meter.memory, self.meter
        with FakeTensorMode(allow_non_fake_inputs=True):
            _give_sizes(self.called)
            parameters = dict(self.model.named_parameters())
            local_parameters = simulated_world.local_tensors(parameters.values())
            self.shards = {name: tuple(part.shape) for name, part in zip(parameters, local_parameters, strict=True)}
            for tensor in (*local_parameters, *self.model.buffers()):
                memory.hold(tensor, PARAMETERS)
            order = self._note_gradients()
            copies = torch.empty(self.facts.gradient_copy_bytes(self.model), dtype=torch.uint8)
            memory.hold(copies, GATHERED)
            trained = (p for p in parameters.values() if p.requires_grad)
            size = self.on.partial_sums * sum(p.numel() * p.element_size() for p in trained)
            sums = torch.empty(size, dtype=torch.uint8)
            memory.hold(sums, GRADIENTS)
            batches = [self.on.precision.cast(make_batch(self.on.micro_batch)) for _ in range(self.on.accumulate)]
            try:
                with meter:
                    optimizers = self._prepare_optimizers()
                    self._train(optimizers, batches, order)
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                raise _make_value_error(error, str(error.func)) from error
            except RuntimeError as error:
                if ".numpy()" not in str(error):
                    raise
                raise _make_value_error(error, "numpy()") from error

    def _note_gradients(self) -> list[tuple[Tensor, float]]:
        """Return a list that hooks fill with each replicated parameter and the time at which its gradient is ready."""
        order: list[tuple[Tensor, float]] = []

        def note(parameter: Tensor) -> None:
            assert parameter.grad is not None
            self.meter.memory.name(simulated_world.local_tensors([parameter.grad]), GRADIENTS)
            order.append((parameter, self.meter.clocks.current.time))

        for parameter in self.model.parameters():
            if parameter.requires_grad and not hasattr(parameter, "device_mesh"):
                parameter.register_post_accumulate_grad_hook(note)
        return order

    def _prepare_optimizers(self) -> list[Optimizer]:
        """Create the optimizers and their state, and record the sizes of the state and a checkpoint."""
        trained = [p for p in self.model.parameters() if p.requires_grad]
        made: Optimizer | list[Optimizer] = self.make_optimizers(trained)
        optimizers = made if isinstance(made, list) else [made]
        for optimizer in optimizers:
            closure = inspect.signature(optimizer.step).parameters.get("closure")
            if closure is not None and closure.default is closure.empty:
                name = type(optimizer).__name__
                raise ValueError(
                    f"{name} calls its closure a varying number of times per step, so its steps can't be planned. Use "
                    "another optimizer."
                )
            for group in optimizer.param_groups:
                if group.get("foreach", False) is None and not group.get("fused"):
                    group["foreach"] = True  # torch's choice on a GPU
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        self.meter.category = OPTIMIZER
        _step_together(optimizers)
        slots = [slots for optimizer in optimizers for slots in optimizer.state.values()]
        states = [v for state in slots for v in state.values() if isinstance(v, Tensor)]
        self.meter.memory.name(simulated_world.local_tensors(states), OPTIMIZER)
        self.states = {name: self.meter.memory.live[name] for name in (PARAMETERS, OPTIMIZER)}
        saved_tensors = {id(tensor): tensor for tensor in self.model.state_dict(keep_vars=True).values()}
        self.checkpoint = sum(t.numel() * t.element_size() for t in (*saved_tensors.values(), *states))
        return optimizers

    def _train(self, optimizers: list[Optimizer], batches: list[Any], order: list[tuple[Tensor, float]]) -> None:
        meter, clocks = self.meter, self.meter.clocks
        for tensor in iter_tensors(batches):
            meter.memory.hold(tensor, BATCH)
        meter.begin()
        meter.category = ACTIVATIONS
        begun = clocks.compute.time
        target = self.called if self.on.step is None else self.on.strategy.method(self.called, self.on.step)
        for size in self.facts.buffer_broadcast_bytes(self.model):
            clocks.spend(self._note_collective("broadcast", size))
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            if hasattr(self.called, "set_requires_gradient_sync"):
                self.on.strategy.set_gradient_sync(self.called, last or not self.on.strategy.delays_sync)
            order.clear()
            value = self.loss(target, batch)
            (value / len(batches) if len(batches) > 1 else value).backward()
            del value
        self._reduce(order)
        if self.on.clip is not None:
            self.on.strategy.clip_grad_norm_(self.model.parameters(), self.on.clip)
        meter.category = OPTIMIZER
        _step_together(optimizers)
        self.seconds = clocks.compute.time - begun
        waited = self.seconds - sum(meter.spent.values())
        self.spent = {**meter.spent, WAITING: max(0.0, waited)}

    def _reduce(self, order: list[tuple[Tensor, float]]) -> None:
        """Record the reductions of gradients over replicas, which overlap with the backward pass."""
        if self.facts.reduces_unused_gradients:
            noted_ids = {id(parameter) for parameter, _ in order}
            backward_end = self.meter.clocks.compute.time
            order += [(p, backward_end) for p in self.model.parameters() if p.requires_grad and id(p) not in noted_ids]
        buckets = self.facts.reduction_buckets([p for p, _ in order], ballot=self.on.step is not None)
        if buckets is None:
            if self.on.step is not None and self.on.strategy.sharded and self.on.world_size > 1:
                self._note_collective("all_reduce", simulated_world.VOTES_BYTES)  # during the last backward pass
            return
        done = 0.0
        for bucket in buckets:
            members = [order[at] for at in bucket if at >= 0]
            size = sum(p.numel() * p.element_size() for p, _ in members)
            if len(bucket) > len(members):
                size += simulated_world.ballot_bytes(p for p, _ in order)
            begun = max((when for _, when in members), default=order[0][1])
            done = max(done, begun) + self._note_collective("all_reduce", size)
        compute = self.meter.clocks.compute
        compute.time = max(compute.time, done)

    def _note_collective(self, kind: str, size: int) -> float:
        ranks = tuple(range(self.on.strategy.world.size))
        self.meter.traffic.add(kind, size)
        return estimate_collective_seconds(kind, size, ranks, self.meter.prices.gpu)


def _step_together(optimizers: list[Optimizer]) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def _give_sizes(called: nn.Module) -> None:
    """Replace a model's meta tensors with fake CPU tensors, whose size can be counted."""
    simulated_world.keep_ties(called, lambda: called.to_empty(device="cpu"))
    for part in called.modules():
        for name, value in vars(part).items():
            if isinstance(value, Tensor) and value.is_meta:  # stored in a plain attribute
                part.__dict__[name] = torch.empty_like(value, device="cpu")


def _make_value_error(error: Exception, operation: str) -> ValueError:
    user_frames = [
        (frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").partition(".")[0] not in ("torch", "treadle")
    ]
    location = f", in {user_frames[-1][0]}, line {user_frames[-1][1]}" if user_frames else ""
    return ValueError(
        f"the step reads a tensor's value ({operation}{location}), but tensors in a plan have no values. For the "
        "plan, remove .item(), print, and branches and sizes that depend on values (nonzero, masks as indices)."
    )
