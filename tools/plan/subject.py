"""Subject of a plan: a run that a configuration describes, or a model that is selected by name."""

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

from ...strategies import Strategy
from . import simulated_world
from .decoder import Decoder, next_token_loss, sizes_of, tokens
from .report import Schedule
from .strategy_facts import varied

if TYPE_CHECKING:
    from .plan import Plan


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Functions and settings that describe a run to `simulate`.

    Attributes:
        build_model: Function that builds the model, called with the meta device as torch's default device.
        loss: Function that returns the loss, given the model (or its method ``step``) and a batch.
        step: Name of the model's method that ``loss`` calls. Default: None, ``forward``.
        settings: Further arguments of `simulate`, and ``per_machine`` (GPUs per machine) if the run sets it.
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
    """Build the `Subject` of a standard transformer, selected with ``--model``, that is trained with AdamW."""
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
    """Return learning rates, at evenly spaced steps, of a linear warmup and a cosine decay to a tenth of the peak."""

    def compute_rate(step: float) -> float:
        if step < warmup:
            return peak * (step + 1) / warmup
        done = (step - warmup) / max(1, steps - warmup)
        return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done))))

    return [compute_rate(index * steps / (points - 1)) for index in range(points)]


def vary_strategy(options: argparse.Namespace, name: str | Strategy, world_size: int) -> Strategy:
    """Return a strategy with the options ``--replicate`` and ``--checkpoint-activations`` applied."""
    strategy = name if isinstance(name, Strategy) else simulated_world.strategy_named(name, world_size)
    changes: dict[str, Any] = {}
    if options.replicate is not None:
        changes["replicate"] = options.replicate
    if options.checkpoint_activations:
        changes["recompute"] = True
    return varied(strategy, **changes)
