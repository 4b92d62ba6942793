"""Steps with NaN or infinity: their samples, the parameter at which these values probably arose, and what happens.

`GradientGuard` checks the steps of a user-defined loop, and the `Agreement` of all ranks those of the Trainer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ...common.messages import announce, format_count, named_ranks
from ...strategies import Strategy
from ...strategies.distributed import strip_compile_prefix
from ..data import batch_indices
from .agreement import Agreement

if TYPE_CHECKING:
    from .accumulation import Accumulation, PreparedOptimizer

SPOILED = (
    " This step was already applied to the weights in memory. Resume from a checkpoint. torch's fused optimizers, "
    "such as AdamW(..., fused=True), skip such a step."
)
"""Text added to an error that is raised one step later, if the optimizer could not skip the step on the device."""
_MOST_SAMPLES = _MOST_RANKS = 8
"""Largest number of samples, and of ranks, that a message lists."""


@dataclass
class Evidence:
    """Information that one rank has about a step with values that are not finite.

    Attributes:
        batches: The numbers of the micro-batches whose loss is not finite on this rank.
        gradients: Sort keys of the parameters whose gradients are not finite; see `order_by_backward`.
        samples: A description of the samples in ``batches`` or, if ``batches`` is empty, in the step; ``""`` if they
            are unknown.
        has_bad_input: Whether the last micro-batch is known to contain values that are not finite.
    """

    batches: list[int] = field(default_factory=list)
    gradients: list[tuple[float, int, str]] = field(default_factory=list)
    samples: str = ""
    has_bad_input: bool = False


class Findings(NamedTuple):
    """Combined evidence of all ranks, as parts of a message.

    Attributes:
        problem: A phrase that names the ranks whose loss, or the parameter whose gradient, is not finite.
        batches: The numbers of the affected micro-batches, as text.
        samples: Sentences about the ranks' samples, each preceded by a space.
        losses: True if a loss is not finite; False if only a gradient is not finite.
    """

    problem: str
    batches: str
    samples: str
    losses: bool


def collect(
    check: Agreement, accumulation: Accumulation, found: Evidence, loader: Any, batch: Any, number: int, exchange: bool
) -> dict[int, Evidence]:
    """Complete this rank's evidence about the step that ``check`` has read last.

    Args:
        check: The check that has found values that are not finite.
        accumulation: The accumulation of the run.
        found: The losses of this rank that are not finite. If there are none, its gradients are examined.
        loader: The loader of the step; None if it is unknown.
        batch: See `describe_group`.
        number: See `describe_group`.
        exchange: Whether the ranks exchange their evidence. Then call this function on all ranks.

    Returns:
        The evidence by rank: of all ranks, or only of this one.
    """
    if not found.batches:
        found.gradients = locate_gradients(check.find_bad_parameters(), accumulation)
        if check.immediate and loader is not None:  # otherwise the dataloader is one step ahead
            found.samples, found.has_bad_input = describe_group(loader, batch, number)
    world = accumulation.world
    return dict(enumerate(world.gather_objects(found))) if exchange else {world.rank: found}


def combine(evidence: Mapping[int, Evidence], first: int, last: int) -> Findings:
    """Combine the evidence of every rank into the parts of a message.

    ``first`` and ``last`` are the numbers of the step's first and last micro-batches.
    """
    bad_ranks = {rank: ", ".join(map(str, known.batches)) for rank, known in evidence.items() if known.batches}
    if bad_ranks:
        distinct = set(bad_ranks.values())
        is_same_batch = len(distinct) == 1
        batches = (
            distinct.pop() if is_same_batch else "; ".join(f"{bad} on rank {rank}" for rank, bad in bad_ranks.items())
        )
        samples = list_samples({rank: evidence[rank] for rank in bad_ranks})
        return Findings(f"the loss is not finite on {named_ranks(list(bad_ranks))}", batches, samples, True)
    origin, order = describe_origin(evidence)
    bad_inputs = {rank: known for rank, known in evidence.items() if known.has_bad_input}
    samples = list_samples(bad_inputs or evidence)
    if len(evidence) > 1 and not bad_inputs:
        samples += " The gradients are already reduced over ranks. Use callbacks=[NonFiniteWatch()] to find the rank."
    batches = str(last) if first == last else f"{first} to {last}"
    return Findings(f"every loss is finite, but {origin} is not{order}", batches, samples, False)


def describe_origin(evidence: Mapping[int, Evidence]) -> tuple[str, str]:
    """Return two texts on the non-finite gradient that is closest to the origin of NaN or infinity.

    The first names the gradient. The second states its position among the non-finite gradients; "" if it is the only
    one.
    """
    keys = sorted(key for known in evidence.values() for key in known.gradients)
    names = list(dict.fromkeys(name for *_, name in keys))
    if not names:  # the parameter belongs to no prepared model
        return "a gradient", ""
    order = (
        "first of {} such gradients in the order of the backward pass"
        if keys[0][0] < math.inf
        else "last of {} such gradients in the model"
    )
    return f"the gradient of {names[0]}", f", the {order.format(len(names))}," if len(names) > 1 else ""


def list_samples(evidence: Mapping[int, Evidence]) -> str:
    """Return the known samples as text: one sentence for each rank, up to a limit, each preceded by a space."""
    known = [f" On rank {rank}: {known.samples}." for rank, known in evidence.items() if known.samples]
    left_out = format_count(len(known) - _MOST_RANKS, "more rank")
    more = f" {left_out} had other samples." if len(known) > _MOST_RANKS else ""
    return "".join(known[:_MOST_RANKS]) + more


def order_by_backward(
    bad: Iterable[Tensor], model: nn.Module, loss: Tensor | None, strategy: Strategy
) -> list[tuple[float, int, str]]:
    """Sort the parameters whose gradients are not finite by the order in which backward computes these gradients.

    In the backward pass, NaN propagates from the loss to the inputs, so the first parameter is closest to the origin of
    the NaN. The order comes from the autograd graph of ``loss``. Parameters that the graph does not contain follow in
    the reverse order of ``named_parameters``.

    Returns:
        A sorted list with a key for each of these parameters that belongs to the model. The last item of the key is the
        parameter's name.
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
    """Return, by leaf id, autograd's sequence number of the first operation that used each leaf."""
    first_uses: dict[int, int] = {}
    for leaf, node in iter_leaves(loss):
        number = node._sequence_nr()
        first_uses[id(leaf)] = min(number, first_uses.get(id(leaf), number))
    return first_uses


def iter_leaves(loss: Tensor) -> Iterator[tuple[Tensor, Any]]:
    """Yield each tensor in the autograd graph of ``loss`` that gets a gradient, with each operation that uses it."""
    nodes = [] if loss.grad_fn is None else [loss.grad_fn]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        for following, _ in node.next_functions:
            leaf = getattr(following, "variable", None)
            if leaf is not None:
                yield leaf, node
            elif following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)


def describe_batch(batch: Any, indices: Sequence[Any] | None) -> tuple[str, bool]:
    """Wait for the device, and describe the samples in a batch and its first tensor with values that are not finite.

    Returns:
        A text such as ``"samples 12, 13 of the dataset; batch['x'] contains NaN in sample 13"``, and whether there is
        such a tensor.
    """
    parts = [f"{_name_samples(indices)} of the dataset"] if indices else []
    bad = [(path, tensor) for path, tensor in iterate_tensors(batch, "batch") if not torch.isfinite(tensor).all()]
    for path, tensor in bad[:1]:
        kind = "NaN" if torch.isnan(tensor).any() else "infinity"
        where = ""
        if indices is not None and tensor.ndim and len(tensor) == len(indices):
            rows = (~torch.isfinite(tensor)).reshape(len(tensor), -1).any(1).nonzero().flatten().tolist()
            where = f" in {_name_samples([indices[row] for row in rows])}"
        parts.append(f"{path} contains {kind}{where}")
    return "; ".join(parts), bool(bad)


def describe_group(loader: Any, batch: Any, number: int) -> tuple[str, bool]:
    """Describe the samples of a group of micro-batches; see `describe_batch`.

    ``batch`` is the last micro-batch of the group, or None if it is not in memory. ``number`` is its index in the
    group.
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


def iterate_tensors(value: Any, path: str, depth: int = 8) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in a nested value, each with an expression for it, such as ``batch['labels']``."""
    if isinstance(value, Tensor):
        yield path, value.detach()
    elif depth and isinstance(value, Mapping | list | tuple):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from iterate_tensors(item, f"{path}[{key!r}]", depth - 1)


def locate_gradients(bad: Iterable[Tensor], accumulation: Accumulation) -> list[tuple[float, int, str]]:
    """Return the sort keys of parameters with bad gradients; see `order_by_backward`. Several models are numbered."""
    bad, keys = list(bad), []
    for number, model in enumerate(accumulation.models):
        of_model = order_by_backward(bad, model, accumulation.get_latest_loss(), accumulation.strategy)
        if len(accumulation.models) > 1:
            owner = type(accumulation.strategy.unwrap(model)).__name__
            of_model = [(position, index, f"{name} (model {number}, {owner})") for position, index, name in of_model]
        keys += of_model
    return keys


def refuse_or_skip(policy: str, problem: str, samples: str, notes: str, owner: str, losses: bool = False) -> None:
    """Raise a ValueError for a step if the policy is ``"raise"``, or announce that the step is skipped.

    ``samples`` and ``notes`` are sentences, each preceded by a space. ``owner`` is the class that has ``on_nonfinite``.
    ``losses`` tells whether a loss is not finite.
    """
    if policy == "raise":
        raise ValueError(
            f"{problem}.{samples}{notes} Check the data, lower the learning rate, or clip the gradients. "
            f"{owner}(on_nonfinite='skip') skips such steps."
            + " If only the loss is NaN and its gradients are finite, 'ignore' takes such steps."
            * losses
        )
    announce(f"{problem}, which is skipped.{samples}")


class GradientGuard:
    """Guard that checks whether gradients are finite before a prepared optimizer steps; see `Accumulation.guard`.

    Replicas have the same gradients after the reduction, so they make the same decision without an exchange.

    The ``policy`` is ``"raise"`` or ``"skip"``. On accelerators, ``"raise"`` takes effect one step later, so that the
    host does not wait for the device. The step itself is skipped on the device if the optimizer supports this.
    """

    def __init__(self, policy: str, loaders: Sequence[Any], *, on_host: bool) -> None:
        self.policy = policy
        self.immediate = on_host or policy == "skip"
        self._loaders = loaders
        self._checks: WeakKeyDictionary[PreparedOptimizer, Agreement] = WeakKeyDictionary()

    def __call__(self, optimizer: PreparedOptimizer) -> bool:
        """Return whether the optimizer may step. If it may not, its gradients are discarded.

        Raises:
            ValueError: If the policy is ``"raise"`` and a gradient of this step, or on accelerators of the optimizer's
                previous step, is not finite.
        """
        accumulation = optimizer.accumulation
        if accumulation.loss_scale is not None:  # the loss scaler skips such steps
            return True
        check = self._checks.get(optimizer) or self._start_checks(optimizer)
        if check.on_host and not accumulation.strategy.sharded:
            finite = check.check_on_host((optimizer.optimizer,))
        else:
            finite = check.check_step(optimizer.optimizer, optimizer.steps_taken)
            accumulation.agreement.not_finite = check.not_finite
        if not finite:
            self._refuse(optimizer, check)
        return finite

    def _start_checks(self, optimizer: PreparedOptimizer) -> Agreement:
        accumulation = optimizer.accumulation
        check = Agreement(accumulation.world, accumulation.strategy, accumulation.cursor)
        check.watch_finite, check.immediate = True, self.immediate
        self._checks[optimizer] = check
        return check

    def read_pending(self) -> None:
        """Wait for the device, and read the pending check of each optimizer's latest step.

        Raises:
            ValueError: If a gradient of one of these steps was not finite.
        """
        for optimizer, check in list(self._checks.items()):
            check.read_pending()
            if not check.finite:
                self._refuse(optimizer, check)

    def _refuse(self, optimizer: PreparedOptimizer, check: Agreement) -> None:
        """Raise an error, or announce the skipped step and discard its gradients, according to the policy."""
        accumulation, micro = optimizer.accumulation, optimizer.accumulation.cursor.micro
        late = 0 if check.immediate else optimizer.steps_taken - check.place  # steps since the one that is not finite
        step = accumulation.steps_of(optimizer) - late + 1
        loader = next((loader for loader in self._loaders if micro is not None and loader.is_at(micro)), None)
        number = 0 if micro is None else micro.number
        by_rank = collect(check, accumulation, Evidence(), loader, None, number, exchange=accumulation.strategy.sharded)
        for other in self._checks.values():
            other.reset()
        origin, order = describe_origin(by_rank)
        problem = f"{origin} is not finite{order} in optimizer step {step}"
        samples = list_samples(by_rank)
        notes = "" if self.immediate or optimizer.guarded else SPOILED
        if accumulation.world.size > 1:
            tool = " The gradients are already reduced over ranks. torch.autograd.detect_anomaly() finds the rank."
            notes = tool + notes
        refuse_or_skip(self.policy, problem, samples, notes, "Accelerator")
        optimizer.optimizer.zero_grad()
