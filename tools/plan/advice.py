"""Suggestions that make a planned run fit into memory or run faster."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ...common.messages import join_words
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
