"""Searches for a learning rate and for a batch size that fits into memory, which precede a stage."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from ...callbacks import BatchSizeFinder, Callback, LearningRateFinder, _LRFinder
from ...common.messages import announce, warn
from ...engine.checkpoint import OpenCheckpoint, load_into_memory, open_callback_states
from ...engine.data.sequences import BudgetBatchSampler, OverBudgetError
from ...engine.optim import attempt
from ...strategies.distributed import Attempts
from ..loop import KIND_OF_STAGE, EvaluationLoop, check_step, configure, validate
from .sandbox import Trial, attribute_owners, check_attribute, get_attribute, rehearsal, set_attribute, train

if TYPE_CHECKING:
    from ...engine import Loader
    from ..core import TaskModule
    from ..trainer import Trainer

_MOST_SAMPLES, _NO_LIMIT = 8192, 2**62


def run_searches(trainer: Trainer) -> None:
    """Run the finders among the callbacks: batch sizes first, because a learning rate suits only one batch size.

    The stage is set up, but the model is not built or placed yet. With ``fast_dev_run``, no search runs. In a resumed
    ``fit``, the results are restored from the checkpoint instead.
    """
    searches: list[BatchSizeSearch | LRSearch] = [
        BatchSizeSearch(trainer, callback) for callback in trainer.callbacks if isinstance(callback, BatchSizeFinder)
    ]
    if trainer.stage == "fit":
        searches += [LRSearch(trainer, c) for c in trainer.callbacks if isinstance(c, LearningRateFinder)]
    for search in searches:
        if trainer.fast_dev_run:
            announce(f"{type(search.finder).__name__} does not search with fast_dev_run")
        elif trainer.stage != "fit" or trainer.opened_checkpoint is None:
            if trainer.stage != "fit" or not search.finder.starts_search:
                search.run()
        elif _restore(search.finder, trainer.opened_checkpoint):
            search.apply()


def search_again(trainer: Trainer, finder: LearningRateFinder | BatchSizeFinder) -> None:
    """Search within ``fit``, in a hook before an epoch's first batch, and apply the result to the rest of the run.

    Raises:
        ValueError: If the search cannot run.
    """
    if trainer.opened_checkpoint is not None or trainer.fast_dev_run:  # the result is about to be restored
        return
    if trainer.progress.batch:  # also in an epoch that is resumed, whose settings the checkpoint has restored
        announce(f"{type(finder).__name__} searches only before an epoch's first batch, so the settings stay")
    elif isinstance(finder, BatchSizeFinder):
        if trainer.world_size > 1:
            raise ValueError(
                f"scale_batch_size within a run needs a single process, not {trainer.world_size}: processes that run "
                "out of memory have to connect again. Let the search precede the run, or use devices=1."
            )
        BatchSizeSearch(trainer, finder).run()
        trainer.sources.outdated = True
    elif (rate := LRSearch(trainer, finder).run()) is not None:
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        highest = max(float(group["lr"]) for group in groups)
        for group in groups:
            _set_rate(group, rate * (float(group["lr"]) / highest if highest else 1.0))


def _restore(finder: Callback, opened: OpenCheckpoint) -> bool:
    """Restore a finder's result from a checkpoint and return True; if it has none, warn and return False."""
    state = load_into_memory(open_callback_states(opened)["callbacks"].get(finder.state_key), {}, {})
    if state is None:
        name = type(finder).__name__
        warn(
            f"{opened.path} was saved without {name}, so the run continues with the current settings and without a "
            "search."
        )
        return False
    finder.load_state_dict(state)
    return True


# -- batch size ------------------------------------------------------------------------------------------------------


class BatchSizeSearch:
    """Search for the largest batch that fits on all processes. The result is written to the finder."""

    def __init__(self, trainer: Trainer, finder: BatchSizeFinder) -> None:
        self.trainer = trainer
        self.finder = finder
        self._loader_sizes: dict[int, float | None] = {}  # batch sizes so far, by the attribute's value

    def run(self) -> None:
        """Find the batch size and set it.

        Raises:
            ValueError: If the settings do not fit the task or the dataloaders, or a copy of the task cannot be run.
            MemoryError: If none of the sizes that were tried fits.
        """
        trainer, finder, kind = self.trainer, self.finder, KIND_OF_STAGE[str(self.trainer.stage)]
        name = finder.batch_arg_name
        check_attribute(trainer, finder, name, "batch_arg_name")
        if trainer.sources.passed_loaders.get(kind) is not None:
            raise ValueError(
                "BatchSizeFinder rebuilds dataloaders with other batch sizes, but a dataloader was passed to "
                f"{trainer.stage}. Define {kind}_dataloader() with batch_size=self.{name} in the task or a data module "
                "instead."
            )
        limit, samples = finder.max_val or _NO_LIMIT, None
        finder.accumulate = None  # that of an earlier search
        if finder.keep_global_batch and trainer.stage == "fit":
            samples = self._count_samples_per_step()
            limit = min(limit, samples)
        attempts = Attempts()

        def fits(size: int) -> int | None:
            attempts.begin()
            done, most = attempt(attempts, partial(self._try, size))
            if not done:
                trainer.accelerator.reconnect(attempts.start_over)
                trainer.logbook.data_world = trainer.accelerator.data_world
            elif isinstance(most, OverBudgetError):  # on all ranks
                raise most
            return most if done else None

        try:
            size = finder.search(fits, limit)
        except OverBudgetError as error:  # of the first size, or of one below a size that does not fit
            size = finder.search(fits, limit, math.ceil(error.budget))
        if samples is not None:
            size = next(divisor for divisor in range(size, 0, -1) if samples % divisor == 0)
            finder.accumulate = samples // size
        finder.optimal_batch_size = size
        self.apply()

    def apply(self) -> None:
        """Set the batch size that the search found or that was restored from a checkpoint."""
        trainer, finder = self.trainer, self.finder
        if finder.optimal_batch_size is None:  # a checkpoint of a run that had not searched yet
            return
        if trainer.stage == "fit" and finder.accumulate is not None:
            trainer.accelerator.gradient_accumulation_steps = finder.accumulate
        set_attribute(trainer, finder.batch_arg_name, finder.optimal_batch_size)
        more = "" if finder.accumulate is None else f", accumulate_grad_batches={finder.accumulate}"
        announce(f"BatchSizeFinder: {finder.batch_arg_name}={finder.optimal_batch_size}{more}")

    def _count_samples_per_step(self) -> int:
        """Return the samples per optimizer step on this process: batch size times accumulated micro-batches."""
        name, task = self.finder.batch_arg_name, self.trainer.task
        size = get_attribute(self.trainer, name)
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(
                f"{name}={size!r} must be an integer of at least 1, because keep_global_batch=True starts from "
                f"it. Set self.{name} in __init__."
            )
        if not task.automatic_optimization:
            raise ValueError(
                f"keep_global_batch=True increases accumulate_grad_batches, but {type(task).__name__} has "
                "automatic_optimization=False. Remove keep_global_batch, and accumulate in training_step."
            )
        return size * self.trainer.accelerator.gradient_accumulation_steps

    def _try(self, size: int) -> int | OverBudgetError:
        """Run a few steps with batches of ``size``; return the largest batch size that the data allows per process.

        If ``size`` is a budget that does not fit each sample, return the error.
        """
        with rehearsal(self.trainer, **{self.finder.batch_arg_name: size}) as inner:
            inner.sources.limits = dict.fromkeys(inner.sources.limits, 1.0)
            try:
                loader = self._train(inner) if inner.stage == "fit" else self._evaluate(inner)
            except OverBudgetError as error:
                return error
            self._check_use(loader, size)
            return self._count_most_samples(loader)

    def _train(self, inner: Trainer) -> Loader:
        accelerator, steps = inner.accelerator, self.finder.steps_per_trial
        # Accumulated gradients are in memory alongside the second micro-batch; later ones need no more.
        accumulates = accelerator.gradient_accumulation_steps > 1 or self.finder.keep_global_batch
        accelerator.gradient_accumulation_steps = 2 if accumulates else 1
        train(inner, Trial(steps))
        if inner.has_validation:
            validate(inner, steps)
        return inner.sources.train

    def _evaluate(self, inner: Trainer) -> Loader:
        """Run a stage other than ``fit`` for a few batches, and return its first dataloader."""
        stage, task = str(inner.stage), inner.task
        loaders = inner.sources.evaluation(KIND_OF_STAGE[stage])
        if not loaders:
            raise ValueError(
                f"{stage} has no dataloader. Define {KIND_OF_STAGE[stage]}_dataloader in the task or a data module."
            )
        check_step(task, stage)
        inner.accelerator.prepare_model(task, evaluation_mode=True)
        for loader in loaders:
            loader.limit = self.finder.steps_per_trial if loader.limit is None else loader.limit
        EvaluationLoop(inner, task, inner.hooks, loaders, stage, within_fit=False).run()
        return loaders[0]

    def _check_use(self, loader: Loader, size: int) -> None:
        """Raise a ValueError if another value of the attribute did not change the dataloader's batch size."""
        name, sizes = self.finder.batch_arg_name, self._loader_sizes
        sampler = _get_budget_sampler(loader)
        sizes[size] = getattr(loader.source, "batch_size", None) if sampler is None else sampler.budget
        first = next(iter(sizes))
        if len(sizes) == 2 and sizes[size] is not None and sizes[size] == sizes[first]:
            method = f"{KIND_OF_STAGE[str(self.trainer.stage)]}_dataloader"
            raise ValueError(
                f"the batch size of the dataloader stayed {sizes[size]} when self.{name} changed from {first} to "
                f"{size}. Create the dataloader in {method} with DataLoader(..., batch_size=self.{name})."
            )

    def _count_most_samples(self, loader: Loader) -> int:
        """Return the largest batch size that the data allows for one process; a huge number if unknown.

        For a budget, return that of a batch of all samples.
        """
        if sampler := _get_budget_sampler(loader):
            return math.ceil(sampler.total)
        dataset, most = getattr(loader.source, "dataset", None), self.finder.max_val or _MOST_SAMPLES
        try:
            count = len(dataset)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return most
        return min(most, max(1, count // self.trainer.accelerator.data_world.size))


def _get_budget_sampler(loader: Loader) -> BudgetBatchSampler | None:
    sampler = getattr(loader.source, "batch_sampler", None)
    return sampler if isinstance(sampler, BudgetBatchSampler) else None


# -- learning rate ---------------------------------------------------------------------------------------------------


class LRSearch:
    """Learning rate search that takes steps with rising rates, until all rates are tried or the loss diverges."""

    def __init__(self, trainer: Trainer, finder: LearningRateFinder) -> None:
        self.trainer = trainer
        self.finder = finder

    def run(self) -> float | None:
        """Find a learning rate and set it. Return it, if there is one that is to be set.

        Raises:
            ValueError: If the settings do not fit the task, or a copy of the task cannot be trained.
        """
        trainer, finder = self.trainer, self.finder
        name = self._choose_attribute_name()
        curve = _LRFinder(finder.mode, finder.min_lr, finder.max_lr, finder.num_training_steps)
        with rehearsal(trainer) as inner:
            train(inner, _RangeTest(curve, finder.early_stop_threshold))
            finder.optimal_lr = curve
            if name is not None:
                _check_rate_is_used(inner, name, finder.max_lr)
        return self.apply()

    def apply(self) -> float | None:
        """Set the learning rate that the search found or that was restored from a checkpoint, and return it."""
        if self.finder.optimal_lr is None:  # a checkpoint of a run that had not searched yet
            return None
        rate, name = self.finder.optimal_lr.suggestion(), self._choose_attribute_name()
        if rate is not None and name is not None:
            set_attribute(self.trainer, name, rate)
        self.finder.announce_result(rate, name)
        return None if name is None else rate

    def _choose_attribute_name(self) -> str | None:
        """Return the name of the attribute to set; None if ``update_attr`` is False."""
        trainer, finder = self.trainer, self.finder
        if finder.attr_name:
            check_attribute(trainer, finder, finder.attr_name, "attr_name")
        if not finder.update_attr:
            return None
        usual = (name for name in ("lr", "learning_rate") if attribute_owners(trainer, name))
        name = finder.attr_name or next(usual, None)
        if name is None:
            raise ValueError(
                f"{type(trainer.task).__name__} has neither lr nor learning_rate, which LearningRateFinder sets. Set "
                "self.lr in __init__ and use it in configure_optimizers, or pass attr_name=... or update_attr=False."
            )
        return name


def _check_rate_is_used(inner: Trainer, name: str, rate: float) -> None:
    """Warn if ``configure_optimizers`` sets the same learning rates for two values of the attribute."""
    rates = []
    for value in (rate, 2 * rate):
        set_attribute(inner, name, value)
        optimizers, _ = configure(inner.task)
        rates.append([_get_base_rate(group) for optimizer in optimizers for group in optimizer.param_groups])
    if rates[0] == rates[1]:
        warn(
            f"{type(inner.task).__name__}.configure_optimizers does not use {name}, which LearningRateFinder sets, so "
            f"the result of the search has no effect. Create the optimizer with lr=self.{name}."
        )


class _RangeTest(Trial):
    """Steps with rising rates, and their losses. The ratios between the rates of the parameter groups stay the same.

    The loss of a step is the mean over its micro-batches and all processes, weighted like the gradient. With manual
    optimization, it is the loss that ``training_step`` returns, and the schedulers that the task steps are constant.
    """

    def __init__(self, curve: _LRFinder, threshold: float | None) -> None:
        super().__init__(curve.num_training)
        self._curve, self._threshold = curve, threshold
        self._shares: list[float] = []  # rate of each group relative to the largest
        self._micros: list[Any] = []
        self._sum: Tensor | float = 0.0
        self._weight: Tensor | float = 0.0

    def on_fit_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        if pl_module.automatic_optimization:
            return
        if len(trainer.optimizers) > 1:
            raise ValueError(
                f"LearningRateFinder cannot search with automatic_optimization=False and {len(trainer.optimizers)} "
                f"optimizers: {type(pl_module).__name__} steps them itself, so a loss can't be matched to one learning "
                "rate. Remove the finder."
            )
        for config in trainer.lr_scheduler_configs:
            config.scheduler = LambdaLR(config.scheduler.optimizer, lambda _: 1.0)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        super().on_train_epoch_start(trainer, pl_module)
        self._micros.clear()

    def on_train_batch_start(self, trainer: Trainer, pl_module: TaskModule, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        self._micros.append(trainer.accelerator.cursor.micro)
        self._set_rates(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TaskModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add the loss of a micro-batch, weighted by the weight that the step returned, or else by its samples."""
        if batch is None:
            return
        micro, has_loss = self._micros.pop(0), isinstance(outputs, Mapping) and "loss" in outputs
        if not (has_loss or pl_module.automatic_optimization):
            raise ValueError(
                f"{type(pl_module).__name__}.training_step returned no loss, which LearningRateFinder compares. Return "
                "the loss, or a dict with the loss under 'loss', also with automatic_optimization=False."
            )
        if micro.samples and has_loss:  # otherwise it is a placeholder batch, or training_step returned None
            weight = outputs.get("weight")
            weight = micro.samples if weight is None else weight
            self._sum = self._sum + outputs["loss"].float() * weight
            self._weight = self._weight + weight

    def on_step_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        loss = self._take_loss(trainer)
        self._curve.add(self._curve.rate(self.done), math.nan if loss is None else loss)
        if loss is not None and self._threshold is not None and self._curve.diverges(self._threshold):
            self.end()
        super().on_step_end(trainer, pl_module)

    def _set_rates(self, trainer: Trainer) -> None:
        if not trainer.optimizers:
            raise ValueError(
                f"{type(trainer.task).__name__}.configure_optimizers returned no optimizer, but LearningRateFinder "
                "needs an optimizer. Return an optimizer, or remove the finder."
            )
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        if not self._shares:
            base = [_get_base_rate(group) for group in groups]
            self._shares = [group_rate / max(base) if max(base) > 0 else 1.0 for group_rate in base]
        for group, share in zip(groups, self._shares, strict=True):
            _set_rate(group, self._curve.rate(self.done) * share)

    def _take_loss(self, trainer: Trainer) -> float | None:
        """Return the mean loss since the last call; None if no process had a loss. Call it on all processes."""
        both = torch.tensor([float(self._sum), float(self._weight)], dtype=torch.float64, device="cpu")
        device = trainer.accelerator.device
        both = both.to(device, torch.float32 if device.type == "mps" else torch.float64)
        total, weight = trainer.accelerator.data_world.all_reduce(both).tolist()
        self._sum = self._weight = 0.0
        return total / weight if weight else None


def _set_rate(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def _get_base_rate(group: dict[str, Any]) -> float:
    """Return a parameter group's learning rate before a scheduler changed it. A warmup scheduler may start at 0."""
    return float(group.get("initial_lr", group["lr"]))
