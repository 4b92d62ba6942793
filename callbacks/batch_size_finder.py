"""`BatchSizeFinder`: searches for the largest batch size that fits into memory."""

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
    """Callback that, before a stage begins, searches for the largest batch size that fits into memory.

    Each trial runs a few steps on copies of the task and the data module. In the copies, the attribute named by
    ``batch_arg_name`` is set to the batch size of the trial. The batch size is the number of samples per process. A
    batch of this size must fit into memory on every process. The RNG state is restored afterwards. A run that is
    resumed from a checkpoint does not search again.

    With a `BudgetBatchSampler`, the batch size is its budget. The first budget fits the largest sample.

    Args:
        mode: ``"power"`` doubles the size until memory runs out or a limit is reached. ``"binsearch"`` then also
            bisects between the largest size that fits and the smallest that does not. Default: ``"power"``.
        steps_per_trial: In ``fit``, number of optimizer steps in each trial. The trial also runs this number of batches
            from each validation dataloader. In other stages, number of batches from each dataloader. Default: 3.
        init_val: The first size. If it does not fit, smaller sizes are tried. Default: 2.
        max_trials: Maximum number of sizes to try; 0 uses ``init_val`` without a trial. Default: 25.
        batch_arg_name: Name of the attribute that contains the batch size, in the task, the data module or the hparams
            of either. Default: ``"batch_size"``.
        margin: With ``"binsearch"``, fraction by which the largest size that fits is reduced if a larger size ran out
            of memory. Default: 0.05.
        max_val: The largest size to try. Default: 8192; for a budget, the cost of all samples in one batch.
        keep_global_batch: In ``fit``, set ``accumulate_grad_batches`` so that the number of samples per optimizer step
            does not change. Default: False.

    Attributes:
        optimal_batch_size: Result of the latest search, or the result that a resumed run restored; None before the
            search.
        accumulate: Number of micro-batches per optimizer step that the search chose for ``keep_global_batch``; None if
            it did not choose one.

    Raises:
        ValueError, TypeError: If an argument is invalid. At the start of a stage, if the search cannot run.
        MemoryError: At the start of a stage, if none of the sizes that were tried fits.

    Examples:
        >>> from treadle.callbacks import BatchSizeFinder
        >>> finder = BatchSizeFinder(mode="binsearch", margin=0.0)
        >>> finder.search(lambda size: 1000 if size <= 100 else None, limit=1000)  # sizes up to 100 fit
        100
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
        max_val: int | None = None,
        *,
        keep_global_batch: bool = False,
    ) -> None:
        self.mode = choose("mode", mode.lower() if isinstance(mode, str) else mode, MODES)
        self.steps_per_trial = check_int("steps_per_trial", steps_per_trial, 1)
        self.init_val = check_int("init_val", init_val, 1)
        self.max_trials = check_int("max_trials", max_trials, 0)
        self.batch_arg_name = batch_arg_name
        if not check_number("margin", margin, 0.0) < 1:
            raise ValueError(f"margin={margin!r} must be at least 0.0 and less than 1.0.")
        self.margin = margin
        self.max_val = None if max_val is None else check_int("max_val", max_val, 1)
        if max_val is not None and init_val > max_val:
            raise ValueError(
                f"init_val={init_val} is more than max_val={max_val}, the largest size to try. Lower init_val or raise "
                "max_val."
            )
        self.keep_global_batch = check_bool("keep_global_batch", keep_global_batch)
        self.optimal_batch_size: int | None = None
        self.accumulate: int | None = None

    def setup(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """Raise a ValueError if another callback that sets the accumulation conflicts with ``keep_global_batch``."""
        for callback in trainer.callbacks:
            if stage == "fit" and self.keep_global_batch and isinstance(callback, GradientAccumulationScheduler):
                raise ValueError(
                    f"{type(self).__name__}(keep_global_batch=True) and {type(callback).__name__} both set the number "
                    "of micro-batches per optimizer step. Remove one of them."
                )

    def search(self, fits: Callable[[int], int | None], limit: int, least: int = 1) -> int:
        """Search for the largest size that fits, and return it. With ``"binsearch"``, ``margin`` may reduce the result.

        Args:
            fits: Function that tries a size and returns None if memory ran out, otherwise the largest size that the
                data allows.
            limit: The largest size to try.
            least: The smallest size to try. Default: 1.

        Raises:
            MemoryError: If none of the sizes that were tried fits.
        """
        best, worst, size = 0, 0, max(least, min(self.init_val, limit))  # the first fits, the second does not
        if not self.max_trials:
            return size
        for _ in range(self.max_trials):
            most = fits(size)
            if most is None:
                worst = size
                announce(f"BatchSizeFinder: out of memory with a batch size of {size}")
            else:
                limit = min(limit, most)
                best = min(size, limit)
                announce(f"BatchSizeFinder: a batch size of {size} fits")
            if best >= limit or worst == least or (worst and best and self._is_done(best, worst)):
                break
            size = max(least, self._choose_next_size(best, worst, limit))
        if not best:
            advice = "Use a smaller model or input." if worst == least else "Lower init_val or raise max_trials."
            raise MemoryError(
                f"no batch size fits into memory: even {self.batch_arg_name}={worst}, the smallest that was tried, "
                f"failed. {advice}"
            )
        if worst and self.mode == "binsearch":
            return max(least, int(best * (1 - self.margin)))
        return best

    def _is_done(self, best: int, worst: int) -> bool:
        return worst - best <= 1 if self.mode == "binsearch" else worst <= 2 * best

    def _choose_next_size(self, best: int, worst: int, limit: int) -> int:
        if not worst:
            return min(2 * best, limit)
        if best and self.mode == "binsearch":
            return (best + worst) // 2
        return min(2 * best, limit) if best else worst // 2

    def on_fit_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Search, if a subclass overrides this hook and calls it. Otherwise, the search precedes this hook."""
        if self.starts_search:
            self.scale_batch_size(trainer, pl_module)

    @property
    def starts_search(self) -> bool:
        """True if a subclass overrides `on_fit_start`, so that the search does not precede ``fit``."""
        return type(self).on_fit_start is not BatchSizeFinder.on_fit_start

    def scale_batch_size(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Search beside the model that is being trained, and create the training dataloader again.

        Call it in ``on_train_epoch_start`` of a run with a single process. After an epoch's first batch, and so in an
        epoch that is resumed there, this does nothing.

        Args:
            trainer: The Trainer.
            pl_module: The task.

        Raises:
            ValueError: If there are several processes, or the search cannot run.
        """
        trainer._search_again(self)

    def state_dict(self) -> dict[str, Any]:
        """Return a dict with the result of the search; empty before the search."""
        if self.optimal_batch_size is None:
            return {}
        return {"batch_size": self.optimal_batch_size, "accumulate": self.accumulate}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        if not state_dict:  # saved before the search
            return
        self.optimal_batch_size, self.accumulate = state_dict["batch_size"], state_dict["accumulate"]
