"""The search for a batch size that fits into memory."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ...callbacks import BatchSizeFinder
from ...common.messages import announce
from ...engine.optim import attempt
from ...strategies.distributed import Attempts
from ..loop import KIND_OF_STAGE, EvaluationLoop, check_step, validate
from .sandbox import rehearsal
from .trial_steps import take_trial_steps
from .tuned_attribute import check_attribute, get_attribute, set_attribute

if TYPE_CHECKING:
    from ...engine import Loader
    from ..trainer import Trainer


class BatchSizeSearch:
    """Search for the largest batch that fits on all processes.

    Args:
        trainer: Whose stage is about to begin.
        finder: What is searched for, and how; gets the result.
    """

    def __init__(self, trainer: Trainer, finder: BatchSizeFinder) -> None:
        self.trainer = trainer
        self.finder = finder
        self._loader_sizes: dict[int, int | None] = {}  # of the loaders made so far, by the attribute's value

    def run(self) -> None:
        """Find the size, and set it.

        Raises:
            ValueError: For an attribute that nothing has or uses, or for loaders that can't be made anew.
            MemoryError: If no size that was tried fits.
        """
        trainer, finder, kind = self.trainer, self.finder, KIND_OF_STAGE[str(self.trainer.stage)]
        name = finder.batch_arg_name
        check_attribute(trainer, finder, name, "batch_arg_name")
        assert trainer.sources is not None
        if trainer.sources.passed_loaders.get(kind) is not None:
            raise ValueError(
                f"BatchSizeFinder makes loaders of other sizes, and can't make a loader anew that {trainer.stage} was "
                f"given. Give the task or a data module a {kind}_dataloader() that uses self.{name}."
            )
        limit, samples = finder.max_val, None
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
        """Set the size that was found, now or before a resume."""
        trainer, finder = self.trainer, self.finder
        if trainer.stage == "fit" and finder.accumulate is not None:
            trainer.accelerator.gradient_accumulation_steps = finder.accumulate
        assert finder.optimal_batch_size is not None
        set_attribute(trainer, finder.batch_arg_name, finder.optimal_batch_size)
        more = "" if finder.accumulate is None else f", accumulate_grad_batches={finder.accumulate}"
        announce(f"BatchSizeFinder: {finder.batch_arg_name}={finder.optimal_batch_size}{more}")

    def _count_samples_per_step(self) -> int:
        """Return the samples of an optimizer step, of this process, as the attribute and the flag say."""
        name, task = self.finder.batch_arg_name, self.trainer.task
        size = get_attribute(self.trainer, name)
        assert task is not None
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(
                f"keep_global_batch=True keeps what {name} says, and that is {size!r}: set a whole number."
            )
        if not task.automatic_optimization:
            raise ValueError(
                f"keep_global_batch=True raises accumulate_grad_batches, and {type(task).__name__} steps its "
                "optimizers itself (automatic_optimization=False): leave it out, and accumulate in training_step."
            )
        return size * self.trainer.accelerator.gradient_accumulation_steps

    def _try(self, size: int) -> int:
        """Run a few steps with batches of ``size``; returns the most samples that the data has for one process."""
        with rehearsal(self.trainer, **{self.finder.batch_arg_name: size}) as inner:
            assert inner.sources is not None
            inner.sources.limits = dict.fromkeys(inner.sources.limits, 1.0)
            loader = self._train(inner) if inner.stage == "fit" else self._evaluate(inner)
            self._check_use(loader, size)
            return self._count_most_samples(loader)

    def _train(self, inner: Trainer) -> Loader:
        """Train and validate for a few steps; returns the training loader."""
        accelerator, steps = inner.accelerator, self.finder.steps_per_trial
        assert inner.sources is not None
        # What is accumulated lies beside the second micro-batch; those after it need no more.
        accumulates = accelerator.gradient_accumulation_steps > 1 or self.finder.keep_global_batch
        accelerator.gradient_accumulation_steps = 2 if accumulates else 1
        for _ in take_trial_steps(inner, steps):
            pass
        if inner.has_validation:
            validate(inner, steps)
        return inner.sources.train

    def _evaluate(self, inner: Trainer) -> Loader:
        """Run another stage than ``fit`` for a few batches; returns its first loader."""
        stage, task = str(inner.stage), inner.task
        assert task is not None
        assert inner.hooks is not None
        assert inner.sources is not None
        loaders = inner.sources.evaluation(KIND_OF_STAGE[stage])
        if not loaders:
            raise ValueError(
                f"{stage} needs a loader: give the task or a data module a {KIND_OF_STAGE[stage]}_dataloader."
            )
        check_step(task, stage)
        inner.accelerator.prepare_model(task, evaluation_mode=True)
        for loader in loaders:
            loader.limit = self.finder.steps_per_trial if loader.limit is None else loader.limit
        EvaluationLoop(inner, task, inner.hooks, loaders, stage, within_fit=False).run()
        return loaders[0]

    def _check_use(self, loader: Loader, size: int) -> None:
        """Raise a ValueError if the attribute makes no difference to the loaders."""
        name, sizes = self.finder.batch_arg_name, self._loader_sizes
        sizes[size] = getattr(loader.source, "batch_size", None)
        first = next(iter(sizes))
        if len(sizes) == 2 and sizes[size] is not None and sizes[size] == sizes[first]:
            raise ValueError(
                f"with {name}={first} and with {name}={size} the loader has batch_size={sizes[size]}: its method does "
                f"not use the attribute. Write DataLoader(..., batch_size=self.{name}) there."
            )

    def _count_most_samples(self, loader: Loader) -> int:
        """Return how many samples the data has for one batch of one process; a huge number where that is unknown."""
        dataset = getattr(loader.source, "dataset", None)
        try:
            count = len(dataset)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            return 2**62
        return max(1, count // self.trainer.accelerator.data_world.size)
