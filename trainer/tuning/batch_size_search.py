"""Search for a batch size that fits into memory."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ...callbacks import BatchSizeFinder
from ...common.messages import announce
from ...engine.optim import attempt
from ...strategies.distributed import Attempts
from ..loop import KIND_OF_STAGE, EvaluationLoop, check_step, validate
from .sandbox import Trial, check_attribute, get_attribute, rehearsal, set_attribute, train

if TYPE_CHECKING:
    from ...engine import Loader
    from ..trainer import Trainer


class BatchSizeSearch:
    """Search for the largest batch that fits on all processes. The result is written to the finder."""

    def __init__(self, trainer: Trainer, finder: BatchSizeFinder) -> None:
        self.trainer = trainer
        self.finder = finder
        self._loader_sizes: dict[int, int | None] = {}  # batch sizes so far, by the attribute's value

    def run(self) -> None:
        """Find the batch size and set it.

        Raises:
            ValueError: If the settings do not fit the task or the dataloaders, or a copy of the task cannot be run.
            MemoryError: If none of the sizes that were tried fits.
        """
        trainer, finder, kind = self.trainer, self.finder, KIND_OF_STAGE[str(self.trainer.stage)]
        name = finder.batch_arg_name
        check_attribute(trainer, finder, name, "batch_arg_name")
        assert trainer.sources is not None
        if trainer.sources.passed_loaders.get(kind) is not None:
            raise ValueError(
                "BatchSizeFinder rebuilds dataloaders with other batch sizes, but a dataloader was passed to "
                f"{trainer.stage}. Define {kind}_dataloader() with batch_size=self.{name} in the task or a data module "
                "instead."
            )
        limit, samples = finder.max_val, None
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
            return most if done else None

        size = finder.search(fits, limit)
        if samples is not None:
            size = next(divisor for divisor in range(size, 0, -1) if samples % divisor == 0)
            finder.accumulate = samples // size
        finder.optimal_batch_size = size
        self.apply()

    def apply(self) -> None:
        """Set the batch size that the search found or that was restored from a checkpoint."""
        trainer, finder = self.trainer, self.finder
        if trainer.stage == "fit" and finder.accumulate is not None:
            trainer.accelerator.gradient_accumulation_steps = finder.accumulate
        assert finder.optimal_batch_size is not None
        set_attribute(trainer, finder.batch_arg_name, finder.optimal_batch_size)
        more = "" if finder.accumulate is None else f", accumulate_grad_batches={finder.accumulate}"
        announce(f"BatchSizeFinder: {finder.batch_arg_name}={finder.optimal_batch_size}{more}")

    def _count_samples_per_step(self) -> int:
        """Return the samples per optimizer step on this process: batch size times accumulated micro-batches."""
        name, task = self.finder.batch_arg_name, self.trainer.task
        size = get_attribute(self.trainer, name)
        assert task is not None
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

    def _try(self, size: int) -> int:
        """Run a few steps with batches of ``size``; return the largest batch size that the data allows per process."""
        with rehearsal(self.trainer, **{self.finder.batch_arg_name: size}) as inner:
            assert inner.sources is not None
            inner.sources.limits = dict.fromkeys(inner.sources.limits, 1.0)
            loader = self._train(inner) if inner.stage == "fit" else self._evaluate(inner)
            self._check_use(loader, size)
            return self._count_most_samples(loader)

    def _train(self, inner: Trainer) -> Loader:
        accelerator, steps = inner.accelerator, self.finder.steps_per_trial
        assert inner.sources is not None
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
        assert task is not None
        assert inner.hooks is not None
        assert inner.sources is not None
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
        sizes[size] = getattr(loader.source, "batch_size", None)
        first = next(iter(sizes))
        if len(sizes) == 2 and sizes[size] is not None and sizes[size] == sizes[first]:
            method = f"{KIND_OF_STAGE[str(self.trainer.stage)]}_dataloader"
            raise ValueError(
                f"the batch size of the dataloader stayed {sizes[size]} when self.{name} changed from {first} to "
                f"{size}. Create the dataloader in {method} with DataLoader(..., batch_size=self.{name})."
            )

    def _count_most_samples(self, loader: Loader) -> int:
        """Return the largest batch size that the data allows for one process; a huge number if unknown."""
        dataset = getattr(loader.source, "dataset", None)
        try:
            count = len(dataset)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return 2**62
        return max(1, count // self.trainer.accelerator.data_world.size)
