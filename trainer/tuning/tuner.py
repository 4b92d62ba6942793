"""`Tuner`: the searches alone, without a run after them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...callbacks import BatchSizeFinder, Callback, LearningRateFinder, _LRFinder
from ...common.validation import choose
from ...engine import isolated_random_state
from ..core import DataModule, TaskModule
from ..loop import KIND_OF_STAGE, Stage

if TYPE_CHECKING:
    from ..trainer import Trainer


class Tuner:
    """Finds a learning rate or a batch size for a task, as the callbacks `LearningRateFinder` and `BatchSizeFinder` do.

    Args:
        trainer: Whose settings, processes and precision are used.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def lr_find(
        self,
        model: TaskModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        method: str = "fit",
        min_lr: float = 1e-8,
        max_lr: float = 1.0,
        num_training: int = 100,
        mode: str = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
    ) -> _LRFinder | None:
        """Search for a learning rate; see `LearningRateFinder`.

        Args:
            model: The task.
            train_dataloaders: The training loader, or a data module.
            val_dataloaders: The validation loader, or several.
            dataloaders: Not for ``fit``.
            datamodule: Instead of loaders.
            method: ``"fit"``, which alone has a learning rate.
            min_lr, max_lr, num_training, mode, early_stop_threshold, update_attr, attr_name: See `LearningRateFinder`.

        Returns:
            What was found; None with ``fast_dev_run``.

        Raises:
            ValueError: If the Trainer has a `LearningRateFinder` already, or for arguments that do not fit.
        """
        if method != "fit":
            raise ValueError(f"lr_find(method={method!r}): only 'fit' has a learning rate.")
        finder = LearningRateFinder(min_lr, max_lr, num_training, mode, early_stop_threshold, update_attr, attr_name)
        loaders_by_kind = _map_loaders(method, train_dataloaders, val_dataloaders, dataloaders)
        self._search(finder, method, model, loaders_by_kind, datamodule)
        return finder.optimal_lr

    def scale_batch_size(
        self,
        model: TaskModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        method: str = "fit",
        mode: str = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
        *,
        keep_global_batch: bool = False,
    ) -> int | None:
        """Search for the largest batch that fits into memory; see `BatchSizeFinder`.

        Args:
            model: The task.
            train_dataloaders: A data module. Loaders can't be made anew, and are an error.
            val_dataloaders: The validation loader, or several.
            dataloaders: A data module, of another ``method`` than ``"fit"``.
            datamodule: Where loaders come from that are not the task's.
            method: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
            mode, steps_per_trial, init_val, max_trials, batch_arg_name, margin, max_val, keep_global_batch: See
                `BatchSizeFinder`.

        Returns:
            The size; None with ``fast_dev_run``.

        Raises:
            ValueError: If the Trainer has a `BatchSizeFinder` already, or for arguments that do not fit.
        """
        choose("method", method, KIND_OF_STAGE)
        finder = BatchSizeFinder(
            mode,
            steps_per_trial,
            init_val,
            max_trials,
            batch_arg_name,
            margin,
            max_val,
            keep_global_batch=keep_global_batch,
        )
        loaders_by_kind = _map_loaders(method, train_dataloaders, val_dataloaders, dataloaders)
        self._search(finder, method, model, loaders_by_kind, datamodule)
        return finder.optimal_batch_size

    def _search(
        self, finder: Callback, method: str, model: TaskModule, loaders_by_kind: dict[str, Any], data: Any
    ) -> None:
        trainer, kind = self.trainer, type(finder)
        if any(isinstance(callback, kind) for callback in trainer.callbacks):
            raise ValueError(
                f"the Trainer has a {kind.__name__} among its callbacks, which would search again: drop it, or call "
                f"trainer.{method}, which searches by itself."
            )
        before = trainer.callbacks
        finders = (LearningRateFinder, BatchSizeFinder)
        trainer.callbacks = [finder, *(callback for callback in before if not isinstance(callback, finders))]
        try:
            with isolated_random_state():
                Stage(trainer, method, model, loaders_by_kind, data).run(None)
        finally:
            trainer.callbacks = before


def _map_loaders(method: str, train: Any, val: Any, other: Any) -> dict[str, Any]:
    """What was passed, by kind."""
    if method == "fit":
        if other is not None:
            raise ValueError("with method='fit' pass train_dataloaders and val_dataloaders, not dataloaders.")
        return {"train": train, "val": val}
    if train is not None or val is not None:
        raise ValueError(f"with method={method!r} pass dataloaders, not train_dataloaders or val_dataloaders.")
    return {KIND_OF_STAGE[method]: other}
