"""What a plan is of: a run's configuration, or a model by its name."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..engine.planning.decoder import Decoder, Sizes, next_token_loss, sizes_of, tokens
from ..engine.planning.screen import Schedule
from ..strategies import Strategy, simulated
from .plan_command import warmed_up

if TYPE_CHECKING:
    from ..engine.planning.plan import Plan


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
        step: the method of the model that returns the loss, where that is not `loss`.
        settings: what `simulate` is given beside these.
        length: ``samples``, ``epochs`` and ``steps`` of the run, as far as they are known.
        rates: learning rates over so many steps, given also how many an epoch has; none where it has no schedule.
    """

    name: str
    build_model: Callable[[], nn.Module]
    make_batch: Callable[[int], Any]
    loss: Callable[[Any, Any], Tensor]
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
    strategy: Callable[[int], Strategy]
    step: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    length: dict[str, int] = field(default_factory=dict)
    rates: Callable[[int, int | None], list[float]] | None = None

    def schedule(self, plan: Plan, length: dict[str, Any]) -> Schedule:
        """How long the run is, with its learning rates."""
        schedule = Schedule(**length)
        total = schedule.total(plan)
        if total is None or self.rates is None:
            return schedule
        return replace(schedule, rates=self.rates(total, schedule.per_epoch(plan)))


def of_model(options: argparse.Namespace) -> Subject:
    """A transformer of the usual kind, trained with AdamW.

    Raises:
        ValueError: for a name that is none, with the nearest known.
    """
    sizes = sizes_of(options.model)
    if options.length is not None:
        sizes = Sizes(**{**vars(sizes), "length": options.length})

    def rates(steps: int, per_epoch: int | None) -> list[float]:
        return [] if options.lr is None else warmed_up(options.lr, options.warmup_steps, steps)

    return Subject(
        name=options.model,
        build_model=partial(Decoder, sizes),
        make_batch=partial(tokens, sizes),
        loss=next_token_loss,
        optimizer=partial(torch.optim.AdamW, fused=True),
        strategy=partial(varied_by, options, options.strategy or "fsdp"),
        settings={"world_size": 1, "precision": "bf16-mixed"},
        rates=rates,
    )


def varied_by(options: argparse.Namespace, name: str | Strategy, world_size: int) -> Strategy:
    """The strategy that was asked for, with what the options change of it."""
    changes: dict[str, Any] = {}
    if options.replicate is not None:
        changes["replicate"] = options.replicate
    if options.checkpoint_activations:
        changes["recompute"] = True
    made = name if isinstance(name, Strategy) else simulated.called(name, world_size)
    return simulated.varied(made, **changes)
