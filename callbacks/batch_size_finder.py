"""`BatchSizeFinder`: the largest batch that fits into memory, found by trying before a stage begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..common.messages import announce
from ..common.validation import check_bool, check_int, check_number, choose
from .callback import Callback
from .gradient_accumulation_scheduler import GradientAccumulationScheduler

if TYPE_CHECKING:
    from ..trainer import TaskModule, Trainer

MODES = ("power", "binsearch")


class BatchSizeFinder(Callback):
    """Finds the largest batch that fits into memory before ``fit``, ``validate``, ``test`` or ``predict``, and sets it.

    For each size that is tried, a copy of the task gets its attribute set and makes its loader anew; a few steps run on
    it, then both are dropped and what the run draws from is put back. So of the search only its result is left. All
    processes try the same sizes, and a size fits if it fits on all of them; ``batch_size`` is that of one process.

    A run that goes on from a checkpoint has the batch size it began with, and does not search again.

    Args:
        mode: ``"power"`` doubles the size until memory runs out; ``"binsearch"`` then halves the distance between the
            largest that fitted and the smallest that did not.
        steps_per_trial: Optimizer steps (or batches, of an evaluation) with each size. The first step makes the
            optimizer's state, so the second one is the first that needs all of the memory.
        init_val: The size to begin with; if memory runs out already there, smaller ones follow.
        max_trials: How many sizes to try at most.
        batch_arg_name: The attribute with the batch size, of the task, its hparams or the data module.
        margin: With ``"binsearch"``, the share that is taken off what was found where memory ran out beyond it.
        max_val: The largest size to try. Nothing beyond the samples of a process is tried either.
        keep_global_batch: In ``fit``, raise ``accumulate_grad_batches`` as the batch shrinks, so that an optimizer step
            has the samples it had with the attribute and the flag as they were given. The size is then the largest
            divisor of these that fits.

    Attributes:
        optimal_batch_size: What was found; None before.

    Raises:
        ValueError: For a value that can't be; before the search, for ``keep_global_batch`` where a
            `GradientAccumulationScheduler` says how many batches a step takes.
        TypeError: For a value of another kind.
    """

    searches = True
    exchanges = True

    def __init__(
        self,
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
        *,
        keep_global_batch: bool = False,
    ) -> None:
        self.mode = choose("mode", mode.lower() if isinstance(mode, str) else mode, MODES)
        self.steps_per_trial = check_int("steps_per_trial", steps_per_trial, 1)
        self.init_val = check_int("init_val", init_val, 1)
        self.max_trials = check_int("max_trials", max_trials, 1)
        self.batch_arg_name = batch_arg_name
        if not check_number("margin", margin, 0.0) < 1:
            raise ValueError(f"margin={margin!r} must be a share from 0.0 to less than 1.0.")
        self.margin = margin
        self.max_val = check_int("max_val", max_val, 1)
        if init_val > max_val:
            raise ValueError(f"init_val={init_val} is more than max_val={max_val}, the largest size to try.")
        self.keep_global_batch = check_bool("keep_global_batch", keep_global_batch)
        self.optimal_batch_size: int | None = None
        self.accumulate: int | None = None

    def setup(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """See that nobody else decides how many batches a step takes."""
        scheduled = any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks)
        if stage == "fit" and self.keep_global_batch and scheduled:
            raise ValueError(
                "BatchSizeFinder(keep_global_batch=True) and GradientAccumulationScheduler both say how many batches a "
                "step takes: leave out one of them."
            )

    def search(self, fits: Callable[[int], int | None], limit: int) -> int:
        """Find the size.

        Args:
            fits: Tries a size: None if memory ran out; else the most that the data has for one batch.
            limit: Nothing above it is tried.

        Raises:
            MemoryError: If no size that was tried fits.
        """
        best, worst, size = 0, 0, min(self.init_val, limit)  # fits; does not fit
        for _ in range(self.max_trials):
            most = fits(size)
            if most is None:
                worst = size
                announce(f"BatchSizeFinder: memory runs out with {size}")
            else:
                limit = min(limit, most)
                best = min(size, limit)
                announce(f"BatchSizeFinder: {size} fits")
            if best >= limit or worst == 1 or (worst and best and self._is_done(best, worst)):
                break
            size = self._choose_next_size(best, worst, limit)
        if not best:
            raise MemoryError(f"no batch size fits into memory: not even {worst}, the smallest that was tried.")
        if worst and self.mode == "binsearch":
            return max(1, int(best * (1 - self.margin)))
        return best

    def _is_done(self, best: int, worst: int) -> bool:
        return worst - best <= 1 if self.mode == "binsearch" else worst <= 2 * best

    def _choose_next_size(self, best: int, worst: int, limit: int) -> int:
        if not worst:
            return min(2 * best, limit)
        if best and self.mode == "binsearch":
            return (best + worst) // 2
        return min(2 * best, limit) if best else worst // 2

    def scale_batch_size(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Refused: a search within a stage would have to begin its loaders anew.

        Raises:
            RuntimeError: Always, with what to do instead.
        """
        raise RuntimeError(
            f"{type(self).__name__}.scale_batch_size: the search runs by itself before a stage, not within it. To "
            "search again, end this stage, call treadle.tuner.Tuner(trainer).scale_batch_size(task), and begin another."
        )

    def state_dict(self) -> dict[str, Any]:
        """What was found, if the search has run."""
        if self.optimal_batch_size is None:
            return {}
        return {"batch_size": self.optimal_batch_size, "accumulate": self.accumulate}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take it back."""
        self.optimal_batch_size, self.accumulate = state_dict["batch_size"], state_dict["accumulate"]
