"""What a plan is of: a run's configuration, or a model by its name."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...engine.planning import Decoder, Schedule, next_token_loss, sizes_of, tokens
from ...strategies import Strategy, simulation

if TYPE_CHECKING:
    from ...engine.planning import Plan


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is planned.

    Attributes:
        name: in words.
        build_model: makes the model, where parameters get no memory.
        make_batch: makes a batch of so many samples.
        loss: what is trained on.
        optimizer: makes one.
        strategy: makes one for so many processes.
        schedule: how long the run of a plan is, with its learning rates.
        step: the method of the model that returns the loss, where that is not `loss`.
        settings: what `simulate` is given beside these, and ``per_machine`` where the run says it.
    """

    name: str
    build_model: Callable[[], nn.Module]
    make_batch: Callable[[int], Any]
    loss: Callable[[Any, Any], Tensor]
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    strategy: Callable[[int], Strategy]
    schedule: Callable[[Plan], Schedule]
    step: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)


def build_model_subject(options: argparse.Namespace) -> Subject:
    """A transformer of the usual kind, trained with AdamW.

    Raises:
        ValueError: for a name that is none, with the nearest known.
    """
    sizes = sizes_of(options.model)
    if options.length is not None:
        sizes = replace(sizes, length=options.length)
    return Subject(
        name=options.model,
        build_model=partial(Decoder, sizes),
        make_batch=partial(tokens, sizes),
        loss=next_token_loss,
        optimizer=partial(torch.optim.AdamW, fused=True),
        strategy=partial(vary_strategy, options, options.strategy or "fsdp"),
        schedule=partial(_build_schedule, options),
        settings={"world_size": 1, "precision": "bf16-mixed"},
    )


def _build_schedule(options: argparse.Namespace, plan: Plan) -> Schedule:
    per_epoch = None if options.samples is None else -(-options.samples // plan.samples)
    epoch_limit = None if per_epoch is None or options.max_epochs is None else per_epoch * options.max_epochs
    step_limits = [steps for steps in (epoch_limit, options.max_steps) if steps is not None]
    steps = min(step_limits) if step_limits else None
    rates = [] if steps is None or options.lr is None else compute_rates(options.lr, options.warmup_steps or 0, steps)
    return Schedule(steps=steps, samples=options.samples, per_epoch=per_epoch, rates=rates)


def compute_rates(peak: float, warmup: int, steps: int, points: int = 80) -> list[float]:
    """Learning rates of a linear warm-up, then half a cosine down to a tenth, evenly over a run."""

    def compute_rate(step: float) -> float:
        if step < warmup:
            return peak * (step + 1) / warmup
        done = (step - warmup) / max(1, steps - warmup)
        return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done))))

    return [compute_rate(index * steps / (points - 1)) for index in range(points)]


def vary_strategy(options: argparse.Namespace, name: str | Strategy, world_size: int) -> Strategy:
    """The strategy that was asked for, with what the options change of it.

    Raises:
        ValueError: for an unknown name, or options that the strategy has no use for.
    """
    strategy = name if isinstance(name, Strategy) else simulation.strategy_named(name, world_size)
    changes: dict[str, Any] = {}
    if options.replicate is not None:
        changes["replicate"] = options.replicate
    if options.checkpoint_activations:
        changes["recompute"] = True
    return simulation.varied(strategy, **changes)
