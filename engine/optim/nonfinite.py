"""Say where NaN or infinity began: in which samples, and in which part of the model. For the step that failed only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...strategies import Strategy
from ..data import batch_indices
from ..parameter_names import strip_compile_prefix

SPOILED = (
    " The weights in memory have taken that step: go on from a checkpoint. torch's fused optimizers leave it out, such "
    "as AdamW(..., fused=True)."
)
"""Of other optimizers, where the device tells of it one step later."""
_MOST_SAMPLES = _MOST_RANKS = 8
"""The most that a message lists."""


@dataclass
class Evidence:
    """What one rank knows of a step in which something is not finite.

    Attributes:
        batches: the micro-batches whose loss is not finite on this rank.
        gradients: parameters whose gradients are not finite, as `order_by_backward` returns them.
        samples: which samples the rank has computed on.
        has_bad_input: something in them is not finite.
    """

    batches: list[int] = field(default_factory=list)
    gradients: list[tuple[float, int, str]] = field(default_factory=list)
    samples: str = ""
    has_bad_input: bool = False


class Findings(NamedTuple):
    """What all ranks together know of it.

    Attributes:
        problem: which rank's loss, or which parameter's gradient.
        batches: in which micro-batches.
        samples: a sentence for each rank about its samples, with a space before it.
        losses: a loss is not finite, rather than a gradient alone.
    """

    problem: str
    batches: str
    samples: str
    losses: bool


def combine(evidence: Mapping[int, Evidence], first: int, last: int) -> Findings:
    """Combine the evidence of every rank into what a message says.

    Args:
        evidence: by rank.
        first, last: the step's micro-batches.
    """
    bad_ranks = {rank: ", ".join(map(str, known.batches)) for rank, known in evidence.items() if known.batches}
    if bad_ranks:
        ranks, distinct = ", ".join(map(str, bad_ranks)), set(bad_ranks.values())
        one = len(distinct) == 1
        batches = distinct.pop() if one else "; ".join(f"{bad} on rank {rank}" for rank, bad in bad_ranks.items())
        samples = list_samples({rank: evidence[rank] for rank in bad_ranks})
        return Findings(f"the loss is not finite on rank {ranks}", batches, samples, True)
    origin, order = describe_origin(evidence)
    bad_inputs = {rank: known for rank, known in evidence.items() if known.has_bad_input}
    samples = list_samples(bad_inputs or evidence)
    if len(evidence) > 1 and not bad_inputs:
        samples += " The reduced gradients do not tell which rank it was: callbacks=[NonFiniteWatch()] finds it."
    batches = str(last) if first == last else f"{first} to {last}"
    return Findings(f"every loss is finite, but {origin} is not{order}", batches, samples, False)


def describe_origin(evidence: Mapping[int, Evidence]) -> tuple[str, str]:
    """Return the gradient next to the origin in words, and where it stands among those that are not finite."""
    keys = sorted(key for known in evidence.values() for key in known.gradients)
    names = list(dict.fromkeys(name for *_, name in keys))
    if not names:  # a parameter of no prepared model
        return "a gradient", ""
    order = "first of {} in the order of backward" if keys[0][0] < math.inf else "last of {} in the model"
    return f"the gradient of {names[0]}", f", the {order.format(len(names))}," if len(names) > 1 else ""


def list_samples(evidence: Mapping[int, Evidence]) -> str:
    """Return a sentence for each rank about its samples, each with a space before it."""
    known = [f" On rank {rank}: {known.samples}." for rank, known in evidence.items() if known.samples]
    more = f" {len(known) - _MOST_RANKS} more ranks had others." if len(known) > _MOST_RANKS else ""
    return "".join(known[:_MOST_RANKS]) + more


def order_by_backward(
    bad: Iterable[Tensor], model: nn.Module, loss: Tensor | None, strategy: Strategy
) -> list[tuple[float, int, str]]:
    """Sort the parameters whose gradients are not finite by the time at which backward computes them.

    Whatever is wrong travels from the loss to the inputs, so the first one is next to where it began. The graph of a
    loss tells the order, also after backward has freed what the graph had saved. A parameter that is used several times
    counts where its gradient is complete: its first use. Those that the graph doesn't name (of a part that is compiled
    or recomputed in backward) follow, from the end of the model on.

    Args:
        bad: the parameters.
        model: the wrapped model.
        loss: a loss of the step, or of another one with the same model; None where none is left.
        strategy: how the model lies on the processes.

    Returns:
        For each of them that is the model's own a key to sort by, which ends with its name.
    """
    bad_ids = set(map(id, bad))
    uses = {} if loss is None else _find_first_uses(loss)
    positions = {id(parameter): uses.get(id(leaf)) for leaf, parameter in strategy.graph_leaves(model)} if uses else {}
    keys = []
    for number, (name, parameter) in enumerate(strategy.unwrap(model).named_parameters()):
        if id(parameter) in bad_ids:
            use = positions.get(id(parameter))
            keys.append((math.inf if use is None else -use, -number, strip_compile_prefix(name)))
    return sorted(keys)


def _find_first_uses(loss: Tensor) -> dict[int, int]:
    """The number of the operation that used each leaf first, by the leaf's id; autograd counts operations upwards."""
    first_uses: dict[int, int] = {}
    nodes = [] if loss.grad_fn is None else [loss.grad_fn]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        for following, _ in node.next_functions:
            leaf = getattr(following, "variable", None)
            if leaf is not None:
                number = node._sequence_nr()
                first_uses[id(leaf)] = min(number, first_uses.get(id(leaf), number))
            elif following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return first_uses


def describe_batch(batch: Any, indices: Sequence[Any] | None) -> tuple[str, bool]:
    """Say which samples a batch holds, and which of its numbers are not finite; waits for the device.

    Args:
        batch: what the loader yielded, of one micro-batch.
        indices: of the samples of its whole group in the dataset; None for a stream.

    Returns:
        Such as ``"samples 12, 13 of the dataset; batch['x'] holds NaN in sample 13"``, and whether it holds any such
        number.
    """
    parts = [f"{_name_samples(indices)} of the dataset"] if indices else []
    bad = [(path, tensor) for path, tensor in _iterate_tensors(batch, "batch") if not torch.isfinite(tensor).all()]
    for path, tensor in bad[:1]:
        what = "NaN" if torch.isnan(tensor).any() else "infinity"
        where = ""
        if indices is not None and tensor.ndim and len(tensor) == len(indices):
            rows = (~torch.isfinite(tensor)).reshape(len(tensor), -1).any(1).nonzero().flatten().tolist()
            where = f" in {_name_samples([indices[row] for row in rows])}"
        parts.append(f"{path} holds {what}{where}")
    return "; ".join(parts), bool(bad)


def describe_group(loader: Any, batch: Any, number: int) -> tuple[str, bool]:
    """As `describe_batch`, of a whole group of micro-batches, of which the last one alone is left.

    Args:
        loader: the prepared loader.
        batch: the last micro-batch; None where it is not known.
        number: its place in the group, from 0.
    """
    indices = batch_indices(loader)
    text, is_bad = describe_batch(batch, indices)
    if not number or not indices:
        return text, is_bad
    group_indices = [index for n in range(number + 1) for index in batch_indices(loader, n) or ()]
    bad_input = text.partition("; ")[2]
    return f"{_name_samples(group_indices)} of the dataset{'; the last ' if bad_input else ''}{bad_input}", is_bad


def _name_samples(indices: Sequence[Any]) -> str:
    more = f" and {len(indices) - _MOST_SAMPLES:,} more" if len(indices) > _MOST_SAMPLES else ""
    return f"sample{'s' * (len(indices) != 1)} {', '.join(map(str, indices[:_MOST_SAMPLES]))}{more}"


def _iterate_tensors(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex():
            yield path, value.detach()
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _iterate_tensors(item, f"{path}[{key!r}]")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _iterate_tensors(item, f"{path}[{number}]")
