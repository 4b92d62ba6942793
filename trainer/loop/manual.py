"""Steps of tasks with manual optimization."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ...common.messages import warn
from ...engine.data import Micro
from ...engine.optim import PreparedOptimizer, can_skip_on_device, list_parameters
from ...strategies.distributed import local, name_phase
from ..core import overrides
from .automatic import Steps
from .closure import needs_closure
from .progress import Phase
from .step_output import for_hooks, warn_of_none

_AUTOMATIC = ("optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "lr_scheduler_step")


class ManualSteps(Steps):
    """Loop body for tasks whose ``training_step`` steps the optimizers.

    Hooks of torch see the steps of every optimizer of the task's parameters, whether `TaskModule.optimizers` returned
    it, it is unwrapped, or the task created it without returning it. Until an optimizer has stepped, a batch in which
    the parameters change counts as a step, too, because the task updates them itself. If ``configure_optimizers``
    returns no optimizer, so does each batch.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _refuse_flags(self.trainer)
        name = type(self.task).__name__
        if idle := [hook for hook in _AUTOMATIC if overrides(self.task, hook)]:
            hooks = ", ".join(f"{name}.{hook}" for hook in idle)
            verb = "is" if len(idle) == 1 else "are"
            warn(f"{hooks} {verb} never called with automatic_optimization=False. Move the code to training_step.")
        self.step = self.accelerator.local_method(self.task, "training_step")
        self.strategy = self.accelerator.strategy
        self.parameters = dict.fromkeys(p for optimizer in self.optimizers for p in list_parameters(optimizer))
        self.strategy.reduce_gradients(self.parameters)  # includes tensors that are no parameters of the task
        self.batch: Any = None  # the batch of the current training_step
        self.in_batch = False
        self.stepped = False  # whether an optimizer stepped in the current batch
        self.has_stepped = False  # whether one stepped in this fit
        self.skipped = False
        self.counts = self._sum_counts()
        self.initial_values: list[float] | None = None  # of the parameters, until an optimizer has stepped
        self.checked: Optimizer | None = None  # the optimizer that its wrapper is about to step
        self.stepping: dict[Optimizer, bool] = {}  # those within a step, and whether it was called without the wrapper
        self.votes = self.accumulation.always_agree
        self.accumulation.always_agree = False  # the ranks agree once after the step, not in each backward pass
        self.voting = self.may_leave()
        self.tainted: set[Optimizer] = set()  # the optimizers whose next step is skipped
        self.watches_gradients = self.accumulation.watches_gradients
        self.accumulation.watches_gradients = False  # checked before each optimizer's step instead
        self.accumulation.guard = self._may_step
        self.accumulation.adapt_closure = self._adapt_closure
        self._handles = [
            register_optimizer_step_pre_hook(self._on_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    def close(self) -> None:
        """Remove the hooks from the optimizers, which a user may keep for another run."""
        self.accumulation.guard = self.accumulation.adapt_closure = None
        for handle in self._handles:
            handle.remove()

    def use(self, model: Any) -> None:
        """Replace the wrapped task; see `Steps.use`."""
        self.model = model

    @name_phase("forward", loop=True)
    def take(self, group: Iterable[Any]) -> None:
        """Process a group, which is a single batch; see `Steps.take`."""
        hooks, progress = self.hooks, self.progress
        for batch in group if self.alone else self.metrics.counted(group, self.cursor, self.task):
            progress.phase = Phase.IN_STEP
            index = progress.batch
            micro = self.cursor.micro
            if batch is None:
                self._skip_none(micro, index)  # type: ignore[arg-type]
                continue
            self.metrics.weight = micro.samples  # type: ignore[union-attr]
            for hook in hooks.on_train_batch_start:
                if hook(batch, index) == -1:
                    self.ends_epoch = True
            if self.voting:
                self.vote_to_leave(index)  # before training_step, which steps the optimizers
            if self.ends_epoch:
                progress.phase = Phase.BETWEEN_STEPS
                return
            self.agreement.next_place = progress.step + 1, progress.epoch, index
            if not torch.is_grad_enabled():  # see `Steps.take`
                torch.set_grad_enabled(True)
            with self._counting(batch):
                output = self.step(batch, index) if self.takes_index else self.step(batch)
                progress.batch, progress.batches = index + 1, progress.batches + 1
                self.strategy.check_updates()
                self._agree()
                self.batch = None
                stepped = self._count_step()
                progress.samples += micro.group_samples  # type: ignore[union-attr]
                if hooks.on_train_batch_end:
                    outputs = for_hooks(output)
                    for hook in hooks.on_train_batch_end:
                        hook(outputs, batch, index)
                if self.stepped and not stepped:  # in one of these hooks
                    self._count_step()

    @contextmanager
    def _counting(self, batch: Any) -> Iterator[None]:
        """Watch the parameters and the steps of optimizers while a batch is processed."""
        self.batch, self.in_batch, self.stepped, self.skipped, self.checked = batch, True, False, False, None
        self.counts = self._sum_counts()
        self.accumulation.sync_gradients = True
        self.strategy.backward_weight = self.cursor.micro.scale  # type: ignore[union-attr]
        self.stepping.clear()
        self.initial_values = None if self.has_stepped else self._fingerprint()
        try:
            yield
        finally:
            self.in_batch = False
            self.strategy.backward_weight = 1.0

    def _count_step(self) -> bool:
        """Count the batch as a step if parameters were updated, and return whether they were."""
        progress, previous_counts, self.counts = self.progress, self.counts, self._sum_counts()
        self.stepped |= self.counts[0] != previous_counts[0]  # an optimizer whose class has no hooks
        self.skipped |= self.counts[1] != previous_counts[1]
        self.has_stepped |= self.stepped  # by an optimizer
        if not (self.stepped or self.skipped) and self.initial_values is not None:
            is_updated = self._is_updated_by_hand()
            if is_updated:
                self.strategy.check_updates(self._list_trained())
            self.stepped = is_updated or not self.optimizers
        progress.step += self.stepped
        progress.skipped += self.skipped and not self.stepped
        progress.phase = Phase.STEP_TAKEN if self.stepped else Phase.ENDING_STEP
        return self.stepped

    def _is_updated_by_hand(self) -> bool:
        initial, current = self.initial_values, self._fingerprint()
        if initial is None:
            return False
        is_updated = initial != current
        if not (self.accelerator.world.any(is_updated) if self.strategy.sharded else is_updated):  # in any shard
            return False
        if self.agreement.watch_finite and all(map(isfinite, initial)) and not all(map(isfinite, current)):
            raise ValueError(
                f"{type(self.task).__name__} updated parameters without an optimizer in step {self.progress.step + 1}, "
                "and they are not finite any more. Such an update can neither be checked before nor be skipped. Check "
                "the data and the learning rate, or step an optimizer."
            )
        return True

    def _sum_counts(self) -> tuple[int, int]:
        return sum(o.steps_taken for o in self.optimizers), sum(o.skipped for o in self.optimizers)

    def _fingerprint(self) -> list[float]:
        """Return the versions and norms of the parameters. Updates through ``parameter.data`` change no versions."""
        trained = [local(p.detach()) for p in self._list_trained()]
        norms = [norm.to(trained[0].device) for norm in torch._foreach_norm(trained)] if trained else []
        return [*(p._version for p in trained), *(torch.stack(norms).tolist() if norms else ())]

    def _list_trained(self) -> list[Tensor]:
        return [p for p in self.parameters or self.task.parameters() if p.requires_grad and not is_lazy(p)]

    def _skip_none(self, micro: Micro, index: int) -> None:
        """Skip a batch that is None."""
        progress = self.progress
        if not self.alone:
            raise ValueError(
                f"batch {index} is None on rank {self.accelerator.process_index}, but with manual optimization, the "
                "optimizers of all ranks step together. Let collate_fn return at least one sample."
            )
        warn_of_none(self.accelerator.process_index)
        progress.batch, progress.batches = index + 1, progress.batches + 1
        progress.samples += micro.group_samples
        progress.phase = Phase.ENDING_STEP
        for hook in self.hooks.on_train_batch_end:
            hook(None, None, index)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass of ``manual_backward``."""
        for hook in self.hooks.on_before_backward:
            hook(loss)
        if not self.agreement.record_loss(loss):
            self.note_batch(self.batch)
        self.checked = None
        weight, self.strategy.backward_weight = self.strategy.backward_weight, 1.0  # the loss itself is weighted
        micro = self.cursor.micro
        if not self.in_batch:
            self.cursor.micro = None  # the last batch, which has nothing to do with this loss
        try:
            self.accumulation.backward(loss, *args, by=self.custom_backward, **kwargs)
        finally:
            self.strategy.backward_weight, self.cursor.micro = weight, micro
        if self.accumulation.autocasts:
            torch.clear_autocast_cache()  # of weights that may change before the next forward pass
        for hook in self.hooks.on_after_backward:
            hook()

    def _agree(self) -> None:
        """Agree across ranks, after a batch, on whether its losses are finite and whether to stop."""
        agreement = self.agreement
        if self.votes:
            agreement.stop_vote = self.wants_to_stop()
            agreement.vote(None)
            self.accumulation.exchange_votes()
        if not agreement.finite:
            self.refuse(batch=self.batch)
        agreement.micro_batches = 0

    # -- steps of optimizers -------------------------------------------------------------------------------------

    def _may_step(self, prepared: PreparedOptimizer) -> bool:
        """Return whether an optimizer may step, with the same result on every rank; see `Accumulation.guard`."""
        may_step = self._check(prepared.optimizer)
        self.checked = prepared.optimizer if may_step else None
        return may_step

    def _check(self, optimizer: Optimizer) -> bool:
        """Average gradients that are each rank's own, and return whether the losses and gradients are finite."""
        agreement = self.agreement
        self.accumulation.reduce_gradients(optimizer)
        if not agreement.watch_finite:
            return True
        if optimizer in self.tainted:  # announced after the micro-batch whose loss was not finite
            agreement.forget_losses()
            self.leave_out(False, optimizer)
            return False
        if self.watches_gradients:
            agreement.watch_gradients((optimizer,))
        if not agreement.finite_so_far(self.strategy.agreed_note):
            self.refuse(optimizer, batch=self.batch)
            return False
        return True

    def leave_out(self, losses: bool, optimizer: Optimizer | None = None) -> None:
        """Skip a step; see `Steps.leave_out`. After a loss that is not finite, every optimizer skips a step."""
        self.strategy.agreed_note = None
        if optimizer is None and not self.stepped:
            self._is_updated_by_hand()
        if losses or optimizer is None:
            self.tainted.update(prepared.optimizer for prepared in self.optimizers)
        if optimizer is not None:
            self.tainted.discard(optimizer)
            optimizer.zero_grad()

    def _owns(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer has parameters of the task, some of which may be newer than this object."""
        parameters = list_parameters(optimizer)
        known = self.parameters.keys()
        if known.isdisjoint(parameters) and not set(self.task.parameters()).isdisjoint(parameters):
            self.parameters.update(dict.fromkeys(parameters))
        return not known.isdisjoint(parameters)

    def _on_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Prepare a step of any optimizer, and do what its wrapper has not done; see `PreparedOptimizer.step`."""
        is_wrapped, self.checked = optimizer is self.checked, None
        if not (is_wrapped or self._owns(optimizer)):
            return None
        outermost = not self.stepping or optimizer in self.stepping  # a step that raised an error remains there
        self.stepping[optimizer] = not is_wrapped
        arguments = None if is_wrapped else self._prepare_step(optimizer, args, kwargs)
        if outermost and optimizer in self.stepping:
            for hook in self.hooks.on_before_optimizer_step:
                hook(optimizer)
        return arguments

    def _prepare_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Return the arguments of a step that was called without the wrapper; those of an empty step to skip it."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is not None:
            closure = self._adapt_closure(optimizer, closure)
            args, kwargs = (optimizer, closure, *args[2:]), {k: v for k, v in kwargs.items() if k != "closure"}
        loss_scale = self.accumulation.loss_scale
        if not self._check(optimizer) or (loss_scale is not None and loss_scale.has_overflowed(optimizer)):
            if isinstance(closure, partial):
                raise ValueError(
                    f"the gradients of {type(optimizer).__name__} are not finite, and a step that evaluates a closure "
                    "can be skipped only through the optimizer that self.optimizers() returns. Step that optimizer."
                )
            del self.stepping[optimizer]
            self.skipped = True
            optimizer.zero_grad()
            # torch's hooks can not skip a step, but they may replace the object on which it runs.
            empty: Any = object.__new__(type(optimizer))
            vars(empty).update(vars(optimizer), param_groups=[])
            return (empty,), {}
        not_finite = self.agreement.not_finite  # as the check has set it
        is_guarded = not_finite is None or can_skip_on_device(optimizer, not_finite)
        if not_finite is not None and is_guarded:
            optimizer.found_inf = not_finite  # type: ignore[attr-defined]
        for prepared in self.optimizers:
            if prepared.optimizer is optimizer:
                prepared.guarded = is_guarded
        return None if closure is None else (args, kwargs)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        is_unwrapped = self.stepping.pop(optimizer, None)
        if is_unwrapped is None:
            return
        self.has_stepped = True
        if self.in_batch:
            self.stepped = True
        elif not self.trainer.evaluating:
            self.progress.step += 1  # in a hook between batches
        if is_unwrapped:
            vars(optimizer).pop("found_inf", None)
            if self.accumulation.autocasts:
                torch.clear_autocast_cache()
            for prepared in self.optimizers:
                prepared.steps_taken += prepared.optimizer is optimizer

    def _adapt_closure(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return the closure to use in a step; see `Accumulation.adapt_closure`."""
        if not type(optimizer).__module__.startswith("torch.optim.") or needs_closure(optimizer):
            return partial(self._evaluate, optimizer, closure)
        with torch.enable_grad():  # these evaluate a closure once, before the update, so the result can be checked
            loss = closure()
        return lambda: loss

    def _evaluate(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        """Evaluate a closure within a step. Return the mean loss of all ranks, so that they make the same decisions."""
        loss_scale = self.accumulation.loss_scale
        with nullcontext() if loss_scale is None else loss_scale.refusing_backward():
            loss = closure()
        if not self._check(optimizer):
            raise ValueError(
                f"{type(optimizer).__name__} steps with a closure and cannot run with on_nonfinite='skip', because it "
                "cannot skip part of a step. Use 'raise'."
            )
        if loss is None or self.alone:
            return loss
        total = torch.as_tensor(loss, device=self.task.device).detach() * self.strategy.backward_weight
        return self.accelerator.world.all_reduce(total, "mean")


def _refuse_flags(trainer: Any) -> None:
    """Raise a ValueError for flags that have no effect with manual optimization."""
    clip, count = trainer.gradient_clip_val, trainer.accumulate_grad_batches
    accumulate = (
        f"call self.manual_backward(loss / {count}) for each batch, and step the optimizer if (batch_idx + 1) % "
        f"{count} == 0 or self.trainer.is_last_batch,"
    )
    conflicts = {
        "gradient_clip_val": (clip, None, f"call self.clip_gradients(optimizer, {clip}) before optimizer.step()"),
        "accumulate_grad_batches": (count, 1, accumulate),
    }
    for flag, (value, default, fix) in conflicts.items():
        if value != default:
            raise ValueError(
                f"{flag}={value} has no effect with automatic_optimization=False. Remove {flag}, and {fix} in "
                "training_step."
            )
