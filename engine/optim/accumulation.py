"""One optimizer step: gradient accumulation over its micro-batches, and the wrapper of the optimizer that takes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import attrgetter
from typing import Any
from weakref import proxy, ref

import torch
from torch import Tensor, nn
from torch.autograd import _profiler_enabled
from torch.optim import SGD, Optimizer

from ...common.messages import warn
from ...common.validation import check_int
from ...strategies import FixedTree, PartialSums, Strategy, World
from ...strategies.distributed import name_phase
from ..configuration import GradientAccumulationPlugin
from ..data import Cursor, Micro
from ..modules import refuse_batch_norm
from ..running_loaders import get_running_loader
from .agreement import Agreement
from .loss_scaling import LossScale, scale_gradients
from .optimizer_state import choose_fused, copy_plain_options, list_parameters, refuse_unequal_kernels

_NO_CONTEXT = nullcontext()
_get_wrapped = attrgetter("optimizer")  # with map, no Python call per optimizer and step


class _Group:
    """Micro-batches of the current optimizer step of the models that are passed to the same `Accumulation.accumulate`.

    Attributes:
        models: The models; empty if `accumulate` was called without models, or not at all.
        position: Number of micro-batches so far, if no loader forms the group.
        items: Sum of the weights of these micro-batches, relative to the first one.
        unit: Number of samples of the first micro-batch over all processes; 1 if every micro-batch weighs the same.
        divisor: Sum of the relative weights by which the losses are divided.
        weight: Sum of this process's weights that were passed to `backward`; None without weights.
        unweighted: Whether some micro-batch had no such weight.
        total: Sum of ``weight`` over all processes, once the gradients have been divided by it.
        entered: Number of the batch for which a user-defined loop called `accumulate` last; see `Cursor`.
        loss_at_entry: The last loss before that call.
        entries: Number of batches of the loader's group for which it was called; 0 after the last one.
        number: In a `FixedTree`, the index of the current micro-batch within the step.
        added: In a `FixedTree`, whether this micro-batch has had a backward pass.
    """

    def __init__(self, models: tuple[nn.Module, ...]) -> None:
        self.models = models
        self.number, self.added = -1, False
        self.entered, self.entries = -1, 0
        self.loss_at_entry: Any = None
        self.forget()

    def forget(self) -> None:
        """Start a new group."""
        self.position, self.items, self.unit, self.divisor = 0, 0.0, 1.0, 1.0
        self.weight: float | Tensor | None = None
        self.total: float | Tensor | None = None
        self.unweighted = False

    def add(self, samples: float, divisor: float) -> float:
        """Count a micro-batch with ``samples`` over all processes, and return its share of the mean over the group.

        ``divisor`` is the number of micro-batches in a full group.
        """
        if not self.position:
            self.items, self.unit, self.divisor = 0.0, samples or 1.0, divisor
        self.position += 1
        weight = samples / self.unit
        self.items += weight
        return weight / self.divisor


class Accumulation:
    """Accumulator of the gradients of the micro-batches that form one optimizer step.

    Several methods implement the method of `Accelerator` with the same name. ``models`` and ``optimizers`` are lists
    that the Accelerator appends to.

    Attributes:
        sync_gradients: Whether the current micro-batch is the last of its group, after which the optimizer steps.
        synced_by_loop: Whether a user-defined loop sets ``sync_gradients``, and so weighs its losses itself, too.
        optimizer_step_was_skipped: Whether the last call of an optimizer's ``step`` at the end of a group skipped the
            step. A step that is skipped on the device alone does not count, because the host does not know of it.
        groups_end_with_loader: Whether the end of a loader ends a group.
        delays_sync: Whether gradients are only reduced in the last backward pass of a group.
        group: State of the group that the last call of `accumulate` belongs to.
        counts_calls: Whether each call of `accumulate` is a micro-batch, as a loop has called it again for a batch.
        always_agree: Whether the processes exchange votes in every step; see `Agreement`.
        guard: Function that is called with the optimizer before each step and returns whether the step may be taken.
        unreduced: In manual optimization, the parameters whose gradients no backward pass has reduced.
        adapt_closure: Function that is called with the wrapped optimizer and a closure before each step with a closure,
            and returns the closure to use. None to use the closure as it is.
        check_models: Function that is called once with models that are passed to `accumulate`.
        plan_group: Function that returns the number of micro-batches of a group, given its index since the start of
            the loader's iteration; None if all groups have the same number.
        missing: Number of samples in those batches of the group that were None. `exchange_votes` adds up the numbers of
            all processes.
        sums: The held gradients of this process's micro-batches, if they are added in a `FixedTree`; otherwise None.
    """

    def __init__(
        self,
        plugin: GradientAccumulationPlugin,
        world: World,
        strategy: Strategy,
        scaler: torch.amp.GradScaler | None,
        cursor: Cursor,
        models: list[nn.Module],
        optimizers: list[PreparedOptimizer],
    ) -> None:
        self.world = world
        self.strategy = strategy
        self.cursor = cursor
        self.models = models
        self.optimizers = optimizers
        self.scaler = scaler
        self.agreement = Agreement(world, strategy, cursor)
        self.always_agree = False
        self.watches_gradients = False
        self.guard: Callable[[PreparedOptimizer], bool] | None = None
        self.plan_group: Callable[[int], int] | None = None
        self.check_models: Callable[[tuple[nn.Module, ...]], None] | None = None
        self.groups_end_with_loader = plugin.sync_with_dataloader
        self.counts_calls = False
        self.sync_gradients = True
        self.synced_by_loop = False
        self.optimizer_step_was_skipped = False
        self.autocasts = strategy.precision.compute is not None
        self.missing = 0
        self.unreduced = strategy.unreduced
        self.sums: PartialSums | None = None
        self._ranks = world.size  # by which the strategy divides the sum of the processes' gradients
        self.adapt_closure: Callable[[Optimizer, Callable[[], Any]], Callable[[], Any]] | None = None
        this = proxy(self)  # the strategy holds replicas, which are freed as soon as nothing else uses them
        strategy.backward_note = lambda: this.agreement.taint()
        self._micro_batches = plugin.num_steps
        self._watches_backward = strategy.delays_sync
        self.delays_sync = strategy.delays_sync and not plugin.sync_each_batch
        self.group = _Group(())
        self._groups: dict[tuple[nn.Module, ...], _Group] = {}
        self._factor: float | None = None  # of the losses of the current micro-batch; None: the loader's, or 1 / k
        self._correction = 1.0  # of the gradients after the next backward pass
        self._skip_correction = 1.0  # the same, if a loop has skipped micro-batches of the loader's group
        self._resumed_steps = 0
        self._entered: Micro | None = None  # the last micro-batch that a user-defined loop used
        self._entered_number = 0  # its number, because equal groups share their facts
        self._entered_scale = 0.0  # the sum of the scales of the micro-batches used in this group
        self._factor_number = -1  # the number of the batch that has this factor
        self._counted = 1.0  # the same factor if the batch were equally large on all processes
        self._enters_first = False  # a user-defined loop calls `accumulate` before it takes the batch
        self._latest_loss: ref[Tensor] | None = None

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """Gradient scaler for mixed float16 precision; None if the loss is not scaled."""
        return self._scaler

    @scaler.setter
    def scaler(self, value: torch.amp.GradScaler | None) -> None:
        self._scaler = value
        self.loss_scale = None if value is None or not value.is_enabled() else LossScale(value, self.strategy)

    # -- groups and steps ----------------------------------------------------------------------------------------

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches per optimizer step."""
        return self._micro_batches

    @micro_batches.setter
    def micro_batches(self, value: int) -> None:
        check_int("gradient_accumulation_steps", value, 1)
        if self.sums is not None and value != self._micro_batches:
            raise ValueError(
                f"gradient_accumulation_steps={value} can't be set with step_micro_batches, which determines it. "
                "Remove one of them."
            )
        self._micro_batches = value

    def add_in_tree(self, tree: FixedTree) -> None:
        """Add the gradients of each step's micro-batches in a tree that does not depend on the number of processes."""
        self.sums, self._ranks, self._micro_batches = self.strategy.add_in_tree(tree), 1, tree.most
        self.delays_sync = self.strategy.delays_sync

    def loader_group_size(self, number: int) -> int:
        """Return the number of micro-batches of a full group of a prepared loader.

        ``number`` is the index of the group since the start of the loader's iteration.
        """
        if not self.groups_end_with_loader or self.counts_calls:
            return 1
        return self._micro_batches if self.plan_group is None else self.plan_group(number)

    @property
    def steps(self) -> int:
        """Number of optimizer steps taken, including those before a resume; with several optimizers, the maximum."""
        return self._resumed_steps + max((optimizer.steps_taken for optimizer in self.optimizers), default=0)

    @steps.setter
    def steps(self, value: int) -> None:
        self._resumed_steps = 0
        self._resumed_steps = value - self.steps

    def steps_of(self, optimizer: PreparedOptimizer) -> int:
        """Return the number of steps of one optimizer in this process, plus the run's steps before a resume."""
        return self._resumed_steps + optimizer.steps_taken

    @property
    def position(self) -> int:
        """Number of micro-batches in the current, unfinished group, if no prepared loader forms the groups."""
        return max((group.position for group in list(self._groups.values())), default=0)

    @property
    def entered(self) -> bool:
        """True once `accumulate` has been called."""
        return bool(self._groups)

    def forget_group(self) -> None:
        """Discard the position in the current groups and their sums of weights, and start new groups."""
        for group in (self.group, *self._groups.values()):
            group.forget()
        self.missing = 0
        self.unreduced.clear()
        if self.sums is not None:
            self.sums.clear()
        self._entered, self._factor, self._correction, self._skip_correction = None, None, 1.0, 1.0

    def reset(self) -> None:
        """Discard the current group, the step count and the votes, before a new run."""
        self.group = _Group(())
        self._groups.clear()
        self.counts_calls = False
        self.forget_group()
        self.agreement.reset()
        if self.loss_scale is not None:
            self.loss_scale.forget()
        self.strategy.stop_reducing()
        self.steps = 0

    # -- one micro-batch -----------------------------------------------------------------------------------------

    def accumulate(self, *models: nn.Module) -> AbstractContextManager[Any]:
        """Begin a micro-batch of ``models``: set whether its backward pass reduces gradients. The context is empty."""
        group = self.group = self._groups.get(models) or self._open_group(models)
        if group.total is not None:
            self.forget_weights()
        micro = self.cursor.micro
        if micro is not None and self.groups_end_with_loader and not self.counts_calls:
            last = micro.last
            self._factor, self._correction = None, self._skip_correction
        else:
            last = self._count(group, micro)
        self.sync_gradients = last
        if self.sums is not None:
            self._begin_leaf(group, self.sums)
        if self.delays_sync:
            for model in models:
                self.strategy.set_gradient_sync(model, last)
        return _NO_CONTEXT

    def _begin_leaf(self, group: _Group, sums: PartialSums) -> None:
        """Begin a micro-batch in a `FixedTree`."""
        micro = self.cursor.micro
        if micro is None or self.counts_calls or (micro.number and micro.number != group.number + 1):
            raise ValueError(
                "step_micro_batches needs each batch of a prepared DataLoader once, because the micro-batches of a "
                "step are added by their numbers. Pass every batch to accumulate once, or remove step_micro_batches."
            )
        if not micro.number:
            refuse_batch_norm(group.models or self.models)
            for optimizer in self.optimizers:
                refuse_unequal_kernels(optimizer.optimizer)
        sums.begin(self._iter_trained_parameters(group), micro.number, micro.last, not micro.samples)
        group.number, group.added = micro.number, False

    def _open_group(self, models: tuple[nn.Module, ...]) -> _Group:
        if self.check_models is not None:
            self.check_models(models)
        return self._groups.setdefault(models, _Group(models))

    def _count(self, group: _Group, micro: Micro | None) -> bool:
        """Count a micro-batch of a group that no loader forms, and return whether it is the last one.

        Micro-batches weigh as many samples as the prepared loader put into them. Without a loader, or if a batch counts
        several times, all weigh the same. The sum of the weights is known only at the end, so the losses are divided by
        that of a full group, and the gradients are corrected after the last backward pass if necessary.
        """
        everyone = 1.0 if micro is None or self.counts_calls else micro.everyone
        running = get_running_loader() if micro is None and self.groups_end_with_loader else None
        at_end = running is not None and running.end_of_dataloader
        self._counted = group.add(everyone, self._micro_batches)
        self._weigh_counted(micro)
        last, self._correction = at_end or group.position >= self._micro_batches, 1.0
        if last:
            self._correction = group.divisor / (group.items or group.divisor)
            group.position = 0
        return last

    def _weigh_counted(self, micro: Micro | None) -> None:
        share = 1.0 if micro is None else self.world.size * micro.samples / (micro.everyone or 1)
        self._factor, self._factor_number = self._counted * share, self.cursor.number

    def note_entered(self, models: tuple[nn.Module, ...]) -> None:
        """Record that a user-defined loop processes the current micro-batch.

        If the loop has skipped micro-batches of the group, the gradients become those of the mean over the samples of
        the processed micro-batches. If it enters a batch again with the same models after a backward pass, or takes the
        batch only after this call, each call is a micro-batch of its own from then on.
        """
        micro, previous, number = self.cursor.micro, self._entered, self.cursor.number
        self._enters_first = self._enters_first if self.counts_calls else micro is None
        if micro is None:
            return
        group = self._groups.get(models) or self._open_group(models)
        if group.entered != number:
            group.entries = 0 if micro.last else group.entries + 1
        elif group.loss_at_entry is not self._latest_loss and not self.counts_calls:
            self._start_counting(micro)
        group.entered, group.loss_at_entry = number, self._latest_loss
        if not self.groups_end_with_loader or (micro is previous and number == self._entered_number):
            return
        if previous is None or previous.last or (micro.number != previous.number + 1 and not self._has_gradients()):
            self._entered_scale = 0.0
        self._entered, self._entered_number, self._skip_correction = micro, number, 1.0
        self._entered_scale += micro.scale
        if micro.last and self._entered_scale != micro.group_scale and self._entered_scale:
            self._skip_correction = micro.group_scale / self._entered_scale

    def _start_counting(self, micro: Micro) -> None:
        self.counts_calls = True
        for group in self._groups.values():
            group.unit = 1.0
            if self.groups_end_with_loader:  # the calls so far keep the weights that the loader has given them
                group.position, group.items = group.entries, float(group.entries)
                group.divisor = micro.group_samples / micro.everyone if micro.everyone else 1.0
        if micro.last and self.groups_end_with_loader and self._micro_batches > 1:
            warn(
                f"accumulate was called again for a batch that had ended a group of gradient_accumulation_steps="
                f"{self._micro_batches} batches. From now on, each call counts as a micro-batch, and every "
                f"{self._micro_batches} calls are a step. To count calls from the start, use "
                "GradientAccumulationPlugin(sync_with_dataloader=False)."
            )

    def _has_gradients(self) -> bool:
        # Rarely evaluated.
        return any(p.grad is not None and bool(p.grad.any()) for p in self._iter_trained_parameters())

    @name_phase("backward")
    def backward(
        self,
        loss: Tensor,
        *args: Any,
        weight: float | Tensor | None = None,
        by: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Scale the loss so that the group's gradients become those of its mean loss, and run the backward pass.

        ``loss`` is the mean loss of the micro-batch, as a 0-d tensor. ``weight`` is the number of items over which it
        is the mean. By default, a micro-batch is weighted by its number of samples, or by 1 without a prepared loader.
        ``by(loss, ...)`` is called instead of ``loss.backward(...)``.
        """
        self._latest_loss = ref(loss)
        group, micro = self.group, self.cursor.micro
        if self._enters_first and micro is not None and self._factor_number != self.cursor.number:
            self.counts_calls = True  # `accumulate` knew only the batch before
            self._weigh_counted(micro)
        if self.sums is not None:
            self._check_sum(group, weight)
        scale: Any
        if weight is not None or group.weight is not None:
            scale = self._add_weight(group, weight)
            loss = loss * scale
        else:
            group.unweighted = not self.sync_gradients
            if not self._groups and micro is not None and (self._micro_batches > 1 or self.synced_by_loop):
                self._note_taken(micro)
            follows_loader = micro is not None and self._factor is None and self.groups_end_with_loader
            scale = micro.scale if follows_loader else self._scale_of(micro)  # type: ignore[union-attr]
            if scale != 1.0:
                loss = loss * scale
        if self.loss_scale is not None:
            loss = self.loss_scale.scale(loss)
        votes = self.sync_gradients and (self.always_agree or group.weight is not None)
        if votes and (not self.watches_gradients or self.strategy.votes_in_backward):
            self.agreement.vote(group.weight, self.missing)
        run_backward: Callable[..., Any] = loss.backward if by is None else partial(by, loss)
        backward_marks = self.strategy.before_backward() if self._watches_backward and self.sync_gradients else None
        try:
            run_backward(*args, **kwargs)
        except BaseException as error:  # of any class: a hook's, or Ctrl-C in a notebook, after which the loop goes on
            explained = self.strategy.explain(error)
            if explained is error:
                raise
            raise explained from error
        if backward_marks:
            self.strategy.after_backward(backward_marks)
        if self.loss_scale is not None:
            self.loss_scale.check_backward()
        if self.sums is not None:
            self.sums.end(self._iter_trained_parameters(group))
        if self.sync_gradients:
            if group.weight is not None:
                self.finish_gradients()
            elif self._correction != 1.0:
                scale_gradients(self._iter_trained_parameters(group), self._correction)
                self._factor, self._factor_number = scale * self._correction, self.cursor.number
                self._correction = 1.0

    def _note_taken(self, micro: Micro) -> None:
        """Weigh all losses the same in a loop without `accumulate` that weighs them, or that takes batches ahead."""
        if self.synced_by_loop or (micro.number and (self._entered is None or self._entered.last)):
            self._factor = 1.0 / self._micro_batches
        self._entered, self._factor_number = micro, self.cursor.number

    def _check_sum(self, group: _Group, weight: float | Tensor | None) -> None:
        if group.added or self.cursor.micro is None or group.number != self.cursor.micro.number:
            raise ValueError(
                "step_micro_batches needs one backward pass per micro-batch, within accelerator.accumulate(model), "
                "because gradients of further ones would not be added in the same order on other numbers of processes. "
                "Enter accumulate(model) once for each batch, and add the losses of a batch."
            )
        if weight is not None and int(weight) != weight:
            raise ValueError(
                f"weight={float(weight)} must be a whole number with step_micro_batches, such as a number of tokens, "
                "because the sum of others depends on the number of processes. Round it, or put it into the loss."
            )
        group.added = True

    def _add_weight(self, group: _Group, weight: float | Tensor | None) -> float | Tensor:
        """Add the weight of a micro-batch to its group, and return it; 0 for a placeholder without samples."""
        if weight is None or group.unweighted:
            this, earlier = ("no weight", "a weight") if weight is None else (f"weight={weight}", "no weight")
            raise ValueError(
                f"backward got {this}, but earlier micro-batches of this accumulation group had {earlier}. Pass "
                "weight=... for every micro-batch of a group, or for none."
            )
        if self.cursor.micro is not None and not self.cursor.micro.samples:
            weight = 0.0
        if group.total is not None:
            self._undo_division(group)
        group.weight = weight if group.weight is None else group.weight + weight
        return weight

    def _scale_of(self, micro: Micro | None) -> float:
        """Return the factor of the loss of a micro-batch without a weight."""
        if self._factor is not None and self._factor_number == self.cursor.number:
            return self._factor
        if micro is None:
            return 1.0 / self._micro_batches
        return micro.scale if self.groups_end_with_loader else micro.scale / self._micro_batches

    def _undo_division(self, group: _Group) -> None:
        """Multiply gradients by the total weight again, before another backward pass of the same micro-batch."""
        parameters = [p for p in self._iter_trained_parameters(group) if p.grad is not None]
        if parameters and group.total is not None:
            scale_gradients(parameters, group.total, self._ranks)
        else:
            group.weight = None
        group.total = None

    def get_latest_loss(self) -> Tensor | None:
        """Return the loss of the last backward pass; None before the first one, or if this loss has been freed."""
        return None if self._latest_loss is None else self._latest_loss()

    # -- before the optimizer steps ------------------------------------------------------------------------------

    def finish_gradients(self) -> None:
        """Divide the group's gradients by the total weight over all processes, if that has not been done yet."""
        if self.group.weight is not None and self.group.total is None:
            self.exchange_votes(later=self.always_agree or self.watches_gradients)

    def use_weights(self) -> None:
        """Finish the gradients before an optimizer step, and discard the weights."""
        self.finish_gradients()
        self.forget_weights()

    def forget_weights(self) -> None:
        """Discard the weights of the current group, whose gradients were applied or discarded."""
        self.group.weight = self.group.total = None

    def reduce_gradients(self, optimizer: Optimizer | None = None) -> None:
        """Average the gradients that no backward pass has reduced, in manual optimization. None for all optimizers."""
        for chosen in self.optimizers if optimizer is None else (optimizer,):
            self.strategy.reduce_gradients(p for group in chosen.param_groups for p in group["params"])

    def drop_gradients(self) -> None:
        """Discard the gradients of the current group, whose remaining micro-batches are not processed."""
        self.forget_group()
        self.agreement.forget_losses()
        for model in self.models:
            self.strategy.drop_gradients(model)
        for optimizer in self.optimizers:
            optimizer.optimizer.zero_grad()

    def unscale_gradients(self, optimizer: Optimizer | None = None) -> None:
        """Divide gradients by the group's total weight and by the float16 loss scale, unless this was already done.

        In manual optimization, gradients that have not been reduced over the processes are reduced too.
        ``optimizer=None`` stands for all prepared optimizers.
        """
        if self.group.weight is not None:
            self.finish_gradients()
        if self.unreduced:
            self.reduce_gradients(optimizer)
        if self.loss_scale is not None:
            chosen = self.optimizers if optimizer is None else [optimizer]
            self.loss_scale.unscale(o.optimizer if isinstance(o, PreparedOptimizer) else o for o in chosen)

    def share_overflows(self) -> None:
        """Unscale the gradients of all optimizers, and let an overflow in one of them skip the steps of all."""
        if self.loss_scale is not None:
            self.loss_scale.share_overflows(list(map(_get_wrapped, self.optimizers)))

    def agree_on_steps(self, *, finite: bool, at_once: bool) -> None:
        """Enable the exchange of all processes' votes in every step, and remove the `guard`.

        Args:
            finite: Whether to check that losses and, except with a loss scaler, gradients are finite.
            at_once: Whether to read the votes in the same step on accelerators too, although this waits for the device.
        """
        on_cpu = self.world.device.type == "cpu"
        self.always_agree = self.world.size > 1 or not on_cpu
        self.guard = None
        self.watches_gradients = finite and self.scaler is None  # the loss scaler checks them itself
        self.agreement.reset()
        self.agreement.watch_finite = finite
        self.agreement.immediate = at_once or on_cpu

    def exchange_votes(self, *, later: bool = False) -> Agreement:
        """Exchange votes, divide gradients that are weighted sums by the total weight, and return the agreement.

        If `watches_gradients` is set, first check whether the gradients are finite. With ``later``, the votes are not
        read before the next call.
        """
        agreement, group = self.agreement, self.group
        if not agreement.collected:
            if self.watches_gradients:
                agreement.watch_gradients(tuple(map(_get_wrapped, self.optimizers)))
            if not agreement.has_voted and not agreement.alone:
                agreement.vote(group.weight, self.missing)
        total = agreement.collect() if later else agreement.count()
        if agreement.missing and agreement.immediate and not later:  # otherwise they are those of the previous step
            self.missing = agreement.missing
        if group.weight is not None and group.total is None:
            group.total = group.weight if total is None else total
            scale_gradients(self._iter_trained_parameters(group), self._ranks, group.total)
        return agreement

    def close_gap(self, samples: int) -> bool:
        """Weight the gradients as if the group had only contained the batches that were not None.

        Args:
            samples: Number of samples in the group, over all processes, with those of the batches that were None.

        Returns:
            False if no sample is left, so that no step can be taken.
        """
        remaining, self.missing = samples - self.missing, 0
        if self.group.weight is not None:  # weights do not include these samples
            # On accelerators, only ranks with such batches wait for the total. If it is zero, these are all ranks.
            return bool((self.group.weight if self.group.total is None else self.group.total) > 0)
        if remaining:
            scale_gradients(self._iter_trained_parameters(), samples, remaining)
        return remaining > 0

    def _iter_trained_parameters(self, group: _Group | None = None) -> Iterable[Tensor]:
        """Iterate over the parameters of all models, except models that `accumulate` only puts into other groups."""
        if self.models:
            grouped = {model for models in self._groups for model in models if group is not None}
            models = [m for m in self.models if m not in grouped or m in group.models]  # type: ignore[union-attr]
            return (p for model in models for p in self.strategy.unwrap(model).parameters())
        return (p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"])


class PreparedOptimizer(Optimizer):
    """Wrapper of the user's optimizer, whose ``step`` and ``zero_grad`` take effect only at the end of a group.

    A group consists of the micro-batches whose gradients are accumulated. A pickle or deep copy contains the wrapped
    optimizer with copies of its parameters, not the wrapper.

    Args:
        optimizer: The optimizer to wrap.
        accumulation: The Accelerator's gradient accumulation, which determines when a group ends.
        all_optimizers: All prepared optimizers of the Accelerator, including this one.

    Attributes:
        built: The options with which the script built the optimizer.
        effective_options: The options that checkpoints record, which a resume may change.
        steps_taken: Number of steps taken in this process, without those counted in ``skipped``.
        skipped: Number of steps that `step` skipped because of a float16 overflow, or because a loss or gradient was
            not finite.
        fused_by_choice: Whether Treadle enabled fused kernels for the wrapped optimizer.
        guarded: False if the latest step was taken before the host had read the check of its gradients, and the device
            could not skip it.
    """

    def __init__(
        self, optimizer: Optimizer, accumulation: Accumulation, all_optimizers: list[PreparedOptimizer]
    ) -> None:
        self.accumulation = accumulation
        self.replace(optimizer)
        self.steps_taken = 0
        self.skipped = 0
        self.guarded = True
        self._all_optimizers = all_optimizers

    def replace(self, optimizer: Optimizer) -> None:
        """Replace the wrapped optimizer, and keep the step count.

        Args:
            optimizer: The new optimizer.
        """
        self.optimizer = optimizer
        in_tree = self.accumulation.sums is not None
        self.fused_by_choice = not in_tree and choose_fused(optimizer, self.accumulation.world.device)
        self.built = self.effective_options = copy_plain_options(optimizer)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Parameter groups of the wrapped optimizer."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """State of the wrapped optimizer."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Default options of the wrapped optimizer."""
        return self.optimizer.defaults

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """Gradient scaler of the Accelerator; None if the loss is not scaled."""
        return self.accumulation.scaler

    @scaler.setter
    def scaler(self, value: torch.amp.GradScaler | None) -> None:
        if value is not self.accumulation.scaler:
            raise ValueError(
                "a prepared optimizer's scaler cannot be set, because all prepared optimizers share one scaler. Set "
                "accelerator.scaler."
            )

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:  # type: ignore[override]
        """Step if a group of micro-batches is complete, unless a check finds that its gradients are not finite.

        Args:
            closure: Closure to pass to the wrapped optimizer's ``step``, or None.
            kwargs: Further keyword arguments of the wrapped optimizer's ``step``.

        Returns:
            The return value of the wrapped optimizer's ``step``; None if that was not called.

        Raises:
            ValueError: With ``on_nonfinite="raise"``, if a loss or gradient is not finite. Also if gradients could not
                be reduced.
            ReplicasDiffer: In debug mode, if the replicas differ after the step.
        """
        accumulation = self.accumulation
        if not accumulation.sync_gradients:
            return None
        if closure is not None and accumulation.adapt_closure is not None:
            closure = accumulation.adapt_closure(self.optimizer, closure)
        args = () if closure is None else (closure,)  # by position, because its name differs between optimizers
        if accumulation.group.weight is not None:
            accumulation.use_weights()
        if accumulation.unreduced:
            accumulation.reduce_gradients(self)
        skipped = accumulation.guard is not None and not accumulation.guard(self)
        if skipped:
            result = None
        elif accumulation.loss_scale is not None:
            result, skipped = accumulation.loss_scale.step(self.optimizer, *args, **kwargs)
        elif (not_finite := accumulation.agreement.not_finite) is not None:
            result = self._step_if_finite(not_finite, *args, **kwargs)
        else:
            result = self.optimizer.step(*args, **kwargs)
        if accumulation.autocasts:
            torch.clear_autocast_cache()  # of the weights as they were, if the step is within an autocast context
        accumulation.optimizer_step_was_skipped = skipped
        self.steps_taken += not skipped
        self.skipped += skipped
        return result

    def _step_if_finite(self, not_finite: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer, except that torch's fused kernels change nothing if ``not_finite`` is 1 on the device.

        Other implementations take the step in any case.
        """
        optimizer: Any = self.optimizer
        self.guarded = can_skip_on_device(optimizer, not_finite)
        if not self.guarded:
            return optimizer.step(*args, **kwargs)
        optimizer.found_inf = not_finite
        try:
            return optimizer.step(*args, **kwargs)
        finally:
            del optimizer.found_inf

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients if a group of micro-batches is complete.

        Args:
            set_to_none: Set gradients to None rather than to zero. Default: True.
        """
        accumulation = self.accumulation
        if not accumulation.sync_gradients:
            return
        if accumulation.group.weight is not None:
            accumulation.forget_weights()
        optimizer = self.optimizer
        has_own = type(optimizer).zero_grad is not Optimizer.zero_grad or "zero_grad" in vars(optimizer)
        if has_own or not set_to_none or _profiler_enabled():
            optimizer.zero_grad(**({} if set_to_none else {"set_to_none": False}))  # an own method may not take it
            return
        # Equivalent to torch's method, without the label for a profiler: 0.2 us instead of 6 us for four parameters.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    @contextmanager
    def toggle_model(self, sync_grad: bool = True) -> Iterator[None]:
        """Return a context that disables the gradients of parameters that only other prepared optimizers have.

        Args:
            sync_grad: Whether backward passes in the context average gradients over the processes. False accumulates
                them on each process. Default: True.
        """
        trained = set(map(id, list_parameters(self)))
        parameters = [parameter for other in self._all_optimizers for parameter in list_parameters(other)]
        toggled = [parameter for parameter in parameters if id(parameter) not in trained and parameter.requires_grad]
        for parameter in toggled:
            parameter.requires_grad = False
        try:
            with nullcontext() if sync_grad else self.accumulation.strategy.block_backward_sync():
                yield
        finally:
            for parameter in toggled:
                parameter.requires_grad = True

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped optimizer."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state into the wrapped optimizer.

        Args:
            state_dict: A state of the wrapped optimizer's class.
        """
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the wrapped optimizer.

        Args:
            param_group: The parameter group, as in ``torch.optim.Optimizer.add_param_group``.
        """
        self.optimizer.add_param_group(param_group)

    def __getattr__(self, name: str) -> Any:
        # The hooks and attributes of a user-defined optimizer.
        if name == "optimizer" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __repr__(self) -> str:
        return repr(self.optimizer)

    def __reduce__(self) -> Any:
        # A copy has parameters of its own, which no Accelerator reduces or saves, so it is the user's optimizer only.
        return _return_copy, (self.optimizer,)


def _return_copy(optimizer: Optimizer) -> Optimizer:
    return optimizer


def can_skip_on_device(optimizer: Any, not_finite: Tensor) -> bool:
    """Return whether a step changes nothing if the flag ``not_finite`` on the device is its ``found_inf``.

    This excludes the first step of SGD with momentum, because SGD would treat its momentum as initialized after a
    skipped step (torch 2.13).
    """
    device, groups = not_finite.device.type, optimizer.param_groups
    return (
        getattr(optimizer, "_step_supports_amp_scaling", False)
        and not (isinstance(optimizer, SGD) and not optimizer.state and any(g["momentum"] for g in groups))
        and all(group.get("fused") and all(p.device.type == device for p in group["params"][:1]) for group in groups)
    )
