"""Text report of a plan, and suggestions that make the run fit into memory or run faster."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ...common.messages import join_words
from .meter import ACTIVATIONS, CATEGORIES, PARAMETERS
from .plan import Plan
from .strategy_facts import facts_of

# A plan cannot distinguish smaller differences.
_WORTH = 0.02

Again = Callable[..., Plan]


def advise(plan: Plan, again: Again) -> list[str]:
    """Return suggestions that make a run fit into memory or, if it fits, make it faster.

    ``again`` plans the same run with changes. Its keyword arguments are those of `strategy_facts.varied`, and
    ``micro_batch``, ``accumulate`` and ``precision``.
    """
    if not plan.fits:
        return [_advise_fit(plan, again)]
    hints = _suggest_mixed_precision(plan, again)
    if plan.grid["shard"] > 1:
        hints += _suggest_hybrid_sharding(plan, again)
        hints += _suggest_half_gathering(plan, again)
    return hints


def _advise_fit(plan: Plan, again: Again) -> str:
    changes: dict[str, Any] = {}
    words: list[str] = []
    candidate = plan

    def attempt(word: str, **change: Any) -> Plan:
        changed = again(**{**changes, **change})
        changes.update(change)
        words.append(word)
        return changed

    if plan.grid["shard"] == 1 and plan.world_size > 1:
        candidate = attempt("shard the model (strategy=fsdp)", shard=True)
    elif plan.grid["replicate"] > 1:
        candidate = attempt(f"shard over all {plan.world_size:,} processes (data_parallel_replicate=1)", replicate=1)
    if (
        not candidate.fits
        and candidate.grid["shard"] * candidate.grid["tensor"] > 1
        and not facts_of(candidate.strategy).recomputes_activations
    ):
        with suppress(ValueError):  # the model has no repeated blocks
            candidate = attempt("recompute activations (activation_checkpointing_policy=True)", recompute=True)
    if not candidate.fits and candidate.micro_batch > 1:
        candidate = _shrink_micro_batch(candidate, attempt, plan)
    if candidate.fits:
        return f"to make it fit, {join_words(words, 'and')}, which needs {format_size(candidate.reserved)} per process"
    states = sum(candidate.states.values())
    even = f"even if you {join_words(words, 'and')}" if words else ""
    if states > candidate.gpu.memory:
        return (
            f"parameters and optimizer state alone need {format_size(states)} per process{even and f', {even}'}. Use "
            "more processes."
        )
    tried = f": {even}, it needs {format_size(candidate.reserved)} per process" if words else ""
    smaller = "a smaller micro-batch, " if candidate.micro_batch > 1 else ""
    return (
        f"no simple change makes it fit{tried}. Use {smaller}shorter samples, more processes or tensor parallelism "
        "(tensor_parallel_size=...)."
    )


def _shrink_micro_batch(candidate: Plan, attempt: Callable[..., Plan], plan: Plan) -> Plan:
    fixed = sum(candidate.states.values())
    room = candidate.gpu.memory / candidate.calibration.reserved - fixed
    sample_bytes = max(1, (candidate.peak - fixed) // candidate.micro_batch)
    samples = 1
    while samples * 2 < candidate.micro_batch and samples * 2 * sample_bytes <= room:
        samples *= 2
    times = max(1, round(plan.micro_batch * plan.accumulate / samples))
    return attempt(f"use micro-batches of {samples} with {times} accumulated", micro_batch=samples, accumulate=times)


def _suggest_mixed_precision(plan: Plan, again: Again) -> list[str]:
    if plan.precision.name != "32-true":
        return []
    name = "16-mixed" if plan.gpu.name == "v100" else "bf16-mixed"  # Volta has no bfloat16
    return _describe_gain(plan, again(precision=name), f"mixed precision (precision={name})")


def _suggest_hybrid_sharding(plan: Plan, again: Again) -> list[str]:
    inside = max(1, plan.gpu.per_machine // plan.grid["tensor"])
    replicas, left = divmod(plan.world_size // plan.grid["tensor"], inside)
    if replicas < 2 or left or inside < 2 or plan.grid["replicate"] > 1:
        return []
    other = again(replicate=replicas)
    return _describe_gain(plan, other, f"hybrid sharding (data_parallel_replicate={replicas}: shards of {inside})")


def _suggest_half_gathering(plan: Plan, again: Again) -> list[str]:
    if plan.precision.compute is None or not facts_of(plan.strategy).gathers_in_storage_dtype:
        return []
    other = again(gather=plan.precision.compute)
    short = str(plan.precision.compute).removeprefix("torch.")
    return _describe_gain(plan, other, f"gathering in {short} (gather_dtype=torch.{short})")


def _describe_gain(plan: Plan, other: Plan, words: str) -> list[str]:
    gain = plan.band[1] / other.band[1] - 1
    if gain < _WORTH:
        return []
    size = format_size(other.reserved)
    memory = f", using {size} per process" if other.fits else f", but would not fit: it needs {size} per process"
    faster = f"{gain:.0%} faster" if gain < 1 else f"{1 + gain:.1f} times as fast"
    return [f"{words} would be {faster}{memory}"]


def format_size(number: float) -> str:
    """Format a number of bytes with a binary unit, such as ``"1.5 GiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if number < 1023.5 or unit == "TiB":
            break
        number /= 1024
    return f"{number:.0f} B" if unit == "B" else f"{number:,.{1 if number < 99.95 else 0}f} {unit}"


_LABEL = 12
_NAMES = {ACTIVATIONS: "activations", PARAMETERS: "parameters and buffers", "gathered": "communication buffers"}

CHECKED = (
    "step times against torchtitan's published H100 runs: Llama 8B on 8 GPUs (fitted), on 64 and 128, 70B on 256; "
    "see docs/plan.md for how far off each was. Counts and bytes against real processes."
)
UNCHECKED = "No step like this one was among them, so the band is wide."
FURTHER = "No such runs are published for more than 512 GPUs, so the time is an extrapolation and the band is wider."


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Length and learning rate of a run. None means unknown.

    Attributes:
        steps: Number of optimizer steps of the run.
        samples: Number of samples per epoch.
        per_epoch: Number of optimizer steps per epoch.
        rate: Description of the learning rate; empty if unknown.
    """

    steps: int | None = None
    samples: int | None = None
    per_epoch: int | None = None
    rate: str = ""


def screen(
    plan: Plan, name: str, schedule: Schedule, hints: Sequence[str] = (), *, gpu_from: str = "", width: int = 100
) -> str:
    """Return the report of a plan as text. ``gpu_from`` states how the GPU was determined."""
    machines = -(-plan.world_size // plan.gpu.per_machine)
    hardware = f"{plan.world_size:,} x {plan.gpu.name}" + (f" ({machines:,} machines)" if machines > 1 else "")
    compiled = ", compiled" if plan.compiled else ""
    rows: list[tuple[str, str]] = [
        *([("gpu", f"{plan.gpu.name}, {gpu_from}")] if gpu_from else []),
        ("processes", _describe_processes(plan)),
        ("batch", _describe_batch(plan)),
        ("steps", _describe_steps(plan, schedule)),
    ]
    if schedule.rate:
        rows.append(("schedule", schedule.rate))
    frozen = plan.parameters - plan.trainable
    rows += [
        ("parameters", f"{plan.parameters:,}" + (f", {frozen:,} of them frozen" if frozen else ", all trained")),
        ("memory", _describe_fit(plan)),
        ("", _describe_memory(plan)),
        ("checkpoint", _describe_checkpoint(plan)),
        ("exchange", _describe_exchange(plan)),
        ("step", _describe_time(plan)),
        ("", _describe_bound(plan)),
    ]
    if schedule.steps is not None:
        low_time, _, high_time = (seconds * schedule.steps for seconds in plan.band)
        rows.append(("run", f"{format_duration(low_time)} to {format_duration(high_time)} of training"))
    rows += [("advice", hint) for hint in hints]
    rows.append(("checked", " ".join(_describe_checks(plan))))
    head = f"plan of {name} on {hardware}, {plan.strategy.name}, {plan.precision.name}{compiled}"
    return "\n".join([head, "", *(line for label, text in rows for line in _format_row(label, text, width))])


def _format_row(label: str, text: str, width: int) -> list[str]:
    lines = textwrap.wrap(text, width - _LABEL, break_long_words=False, break_on_hyphens=False)
    return [f"{label if at == 0 else '':<{_LABEL}}{line}" for at, line in enumerate(lines)]


def _describe_checks(plan: Plan) -> list[str]:
    alike = plan.checked and not plan.host_bound
    return [CHECKED, *([] if alike else [UNCHECKED]), *([FURTHER] if plan.world_size > 512 else [])]


def _describe_processes(plan: Plan) -> str:
    if plan.world_size == 1:
        return "1: nothing is exchanged"
    grid = plan.grid
    shared = "" if grid["tensor"] == 1 else f" x {grid['tensor']:,} processes per sample"
    replicas = f"{grid['replicate']:,} replica" + ("" if grid["replicate"] == 1 else "s")
    return f"{plan.world_size:,} = {replicas} x {grid['shard']:,} shard" + ("" if grid["shard"] == 1 else "s") + shared


def _describe_batch(plan: Plan) -> str:
    groups = plan.world_size // plan.grid["tensor"]
    whose = "processes" if plan.grid["tensor"] == 1 else f"groups of {plan.grid['tensor']} processes"
    if groups == 1:
        whose = "process" if plan.grid["tensor"] == 1 else whose.replace("groups", "group")
    return (
        f"{plan.samples:,} samples = {plan.micro_batch:,} per micro-batch x {plan.accumulate:,} accumulated x "
        f"{groups:,} {whose}"
    )


def _describe_steps(plan: Plan, schedule: Schedule) -> str:
    epoch_text = "" if schedule.per_epoch is None else f"{schedule.per_epoch:,} per epoch"
    if schedule.samples is not None and schedule.samples < plan.samples:
        epoch_text += f", which has only {schedule.samples:,} samples"
    if schedule.steps is None:
        unknown = "number unknown: set --max-steps, or --samples and --max-epochs"
        return f"{epoch_text}; {unknown}" if epoch_text else unknown
    return f"{schedule.steps:,} in all" + (epoch_text and f", {epoch_text}")


def _describe_checkpoint(plan: Plan) -> str:
    shards = plan.grid["shard"] * plan.grid["tensor"]
    return f"{format_size(plan.checkpoint)}" + (
        f" in {shards:,} shards of {format_size(plan.checkpoint / shards)}" if shards > 1 else ""
    )


def _describe_fit(plan: Plan) -> str:
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    return (
        f"{verdict}: {format_size(plan.peak)} of {format_size(plan.gpu.memory)} per process at the peak, about "
        f"{format_size(plan.reserved)} with the allocator's overhead"
    )


def _describe_memory(plan: Plan) -> str:
    parts = [(kind, plan.memory[kind]) for kind in CATEGORIES if plan.memory.get(kind, 0) >= plan.peak / 1000]
    return "peak: " + ", ".join(f"{_NAMES.get(kind, kind)} {format_size(number)}" for kind, number in parts)


def _describe_exchange(plan: Plan) -> str:
    if not plan.traffic.count:
        return "nothing"
    kinds = sorted(plan.traffic.size, key=lambda kind: -plan.traffic.size[kind])
    parts = [f"{plan.traffic.count[kind]:,} {kind} ({format_size(plan.traffic.size[kind])} in total)" for kind in kinds]
    return "per step and process: " + ", ".join(parts)


def _describe_time(plan: Plan) -> str:
    low, likely, high = plan.band
    share = plan.flops / likely / plan.gpu.half
    peak = "less than 1%" if share < 0.01 else f"{share:.0%}"
    return (
        f"{format_duration(low)} to {format_duration(high)}, {format_rounded(plan.samples / high)} to "
        f"{format_rounded(plan.samples / low)} samples per second; {peak} of the peak FLOPS, including "
        "recomputation"
    )


def _describe_bound(plan: Plan) -> str:
    if plan.host_bound:
        low, _, high = (seconds / plan.launched * 1e6 for seconds in plan.host)
        return (
            f"bound by the host, which launches {plan.launched:,} operations in {format_rounded(low)} to "
            f"{format_rounded(high)} us each (an estimate); the GPU needs {format_duration(plan.seconds)} for them"
        )
    shares = sorted(((seconds / plan.seconds, category) for category, seconds in plan.spent.items()), reverse=True)
    return ", ".join(f"{share:.0%} {category}" for share, category in shares if share >= 0.005)


def format_rounded(number: float) -> str:
    """Format a number with up to three significant digits, such as ``"0.0123"`` or ``"10,900"``."""
    if number and abs(number) < 1e-3:
        return f"{number:.3g}"
    return f"{float(f'{number:.3g}'):,.6f}".rstrip("0").rstrip(".")


def format_duration(seconds: float) -> str:
    """Format a duration, given in seconds, with a suitable unit, such as ``"2.5 min"``."""
    # Each unit is used up to the value that would round to the first of the next one.
    for limit, unit, unit_seconds in (
        (0.9995e-3, "us", 1e-6),
        (0.9995, "ms", 1e-3),
        (119.5, "s", 1),
        (7170, "min", 60),
    ):
        if seconds < limit:
            return f"{format_rounded(seconds / unit_seconds)} {unit}"
    return f"{format_rounded(seconds / 3600)} h" if seconds < 172000 else f"{format_rounded(seconds / 86400)} days"
