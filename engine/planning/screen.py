"""A plan on one screen."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .advice import size
from .meter import ACTIVATIONS, CATEGORIES, PARAMETERS
from .plan import Plan

WIDTH = 100
_LABEL = 12
_BARS = "▁▂▃▄▅▆▇█"
_NAMES = {ACTIVATIONS: "activations", PARAMETERS: "parameters and buffers", "gathered": "gathered and to send"}

CHECKED = (
    "step times against torchtitan's published H100 runs: Llama 8B on 8 GPUs (fitted), on 64 and 128, 70B on 256; "
    "see docs/plan.md for how far off each was. Counts and bytes against real processes."
)
UNCHECKED = "Nobody published such runs past 512 GPUs: there the time is an extrapolation, and the band wider."


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How long a run is, and its learning rate.

    Attributes:
        samples: of an epoch, or None where that is not known.
        epochs: of the run, or None.
        steps: most optimizer steps, or None.
        rates: learning rates, evenly over the run; empty where there is no schedule.
    """

    samples: int | None = None
    epochs: int | None = None
    steps: int | None = None
    rates: Sequence[float] = field(default_factory=tuple)

    def per_epoch(self, plan: Plan) -> int | None:
        """Optimizer steps of an epoch; a last, shorter one counts."""
        return None if self.samples is None else -(-self.samples // plan.samples)

    def total(self, plan: Plan) -> int | None:
        """Optimizer steps of the run."""
        per_epoch = self.per_epoch(plan)
        whole = None if per_epoch is None or self.epochs is None else per_epoch * self.epochs
        known = [steps for steps in (whole, self.steps) if steps is not None]
        return min(known) if known else None


def screen(plan: Plan, name: str, schedule: Schedule, hints: Sequence[str] = ()) -> str:
    """The words.

    Args:
        plan: what is planned.
        name: of the model.
        schedule: how long it goes on.
        hints: what `advice.advise` found.
    """
    machines = -(-plan.world_size // plan.gpu.per_machine)
    where = f"{plan.world_size:,} x {plan.gpu.name}" + (f" ({machines:,} machines)" if machines > 1 else "")
    compiled = ", compiled" if plan.compiled else ""
    rows: list[tuple[str, str]] = [
        ("processes", _processes(plan)),
        ("batch", _batch(plan)),
        ("steps", _steps(plan, schedule)),
    ]
    if schedule.rates:
        low, high = min(schedule.rates), max(schedule.rates)
        rows.append(("schedule", f"{curve(schedule.rates)}  learning rate {low:.3g} to {high:.3g}"))
    frozen = plan.parameters - plan.trainable
    rows += [
        ("parameters", f"{plan.parameters:,}" + (f", {frozen:,} of them frozen" if frozen else ", all trained")),
        ("memory", _fit(plan)),
        ("", _memory(plan)),
        ("checkpoint", f"{size(plan.checkpoint)} in all, {size(plan.checkpoint / plan.grid['shard'])} per process"),
        ("exchange", _exchange(plan)),
        ("step", _time(plan)),
    ]
    total = schedule.total(plan)
    if total is not None:
        low_time, _, high_time = (seconds * total for seconds in plan.band)
        rows.append(("run", f"{duration(low_time)} to {duration(high_time)} of training"))
    rows += [("advice", hint) for hint in hints]
    rows.append(("checked", CHECKED + (f" {UNCHECKED}" if plan.world_size > 512 else "")))
    head = f"plan of {name} on {where}, {plan.strategy.name}, {plan.precision.name}{compiled}"
    return "\n".join([head, "", *(line for label, text in rows for line in _row(label, text))])


def _row(label: str, text: str) -> list[str]:
    lines = textwrap.wrap(text, WIDTH - _LABEL, break_long_words=False, break_on_hyphens=False)
    return [f"{label if number == 0 else '':<{_LABEL}}{line}" for number, line in enumerate(lines)]


def _processes(plan: Plan) -> str:
    if plan.world_size == 1:
        return "1: nothing is exchanged"
    grid = plan.grid
    shared = "" if grid["tensor"] == 1 else f" x {grid['tensor']:,} that share each sample"
    replicas = f"{grid['replicate']:,} replica" + ("" if grid["replicate"] == 1 else "s")
    return f"{plan.world_size:,} = {replicas} x {grid['shard']:,} shard" + ("" if grid["shard"] == 1 else "s") + shared


def _batch(plan: Plan) -> str:
    groups = plan.world_size // plan.grid["tensor"]
    whose = "processes" if plan.grid["tensor"] == 1 else f"groups of {plan.grid['tensor']} processes"
    return (
        f"{plan.samples:,} samples = {plan.micro_batch:,} per micro-batch x {plan.accumulate:,} accumulated x "
        f"{groups:,} {whose}"
    )


def _steps(plan: Plan, schedule: Schedule) -> str:
    per_epoch, total = schedule.per_epoch(plan), schedule.total(plan)
    if total is None:
        return "not known: say how long with --max-steps, or --samples and --max-epochs"
    return f"{total:,} in all" + ("" if per_epoch is None else f", {per_epoch:,} per epoch")


def _fit(plan: Plan) -> str:
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    return (
        f"{verdict}: of {size(plan.gpu.memory)} per process {size(plan.peak)} at the peak, with the allocator's share "
        f"about {size(plan.reserved)}"
    )


def _memory(plan: Plan) -> str:
    parts = [(kind, plan.memory[kind]) for kind in CATEGORIES if plan.memory.get(kind, 0) >= plan.peak / 1000]
    return "peak: " + ", ".join(f"{_NAMES.get(kind, kind)} {size(number)}" for kind, number in parts)


def _exchange(plan: Plan) -> str:
    if not plan.traffic.count:
        return "nothing"
    kinds = sorted(plan.traffic.size, key=lambda kind: -plan.traffic.size[kind])
    parts = [f"{plan.traffic.count[kind]:,} {kind} of {size(plan.traffic.size[kind])} together" for kind in kinds]
    return "per step and process: " + ", ".join(parts)


def _time(plan: Plan) -> str:
    low, likely, high = plan.band
    share = plan.flops / likely / plan.gpu.half
    return (
        f"{duration(low)} to {duration(high)}, {plan.samples / high:,.4g} to {plan.samples / low:,.4g} samples per "
        f"second; {share:.0%} of the peak arithmetic, what is computed again included"
    )


def duration(seconds: float) -> str:
    """Seconds, as people say them."""
    steps: tuple[tuple[float, str, Callable[[float], float]], ...] = (
        (1e-3, "us", lambda s: s * 1e6),
        (1.0, "ms", lambda s: s * 1e3),
        (120.0, "s", lambda s: s),
        (7200.0, "min", lambda s: s / 60),
        (172800.0, "h", lambda s: s / 3600),
    )
    for limit, unit, convert in steps:
        if seconds < limit:
            return f"{convert(seconds):.3g} {unit}"
    return f"{seconds / 86400:.3g} days"


def curve(values: Sequence[float], width: int = 40) -> str:
    """Numbers as a row of bars, the first to the last."""
    if not values:
        return ""
    count = min(width, len(values))
    picked = [values[round(at * (len(values) - 1) / max(1, count - 1))] for at in range(count)]
    top = max(picked)
    if top <= 0:
        return _BARS[0] * len(picked)
    return "".join(_BARS[min(len(_BARS) - 1, max(0, int(value / top * len(_BARS))))] for value in picked)
