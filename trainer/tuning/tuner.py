"""`Tuner`: learning rate and batch size searches that are not followed by a run."""

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
    """Tuner that searches for a learning rate or a batch size, as `LearningRateFinder` and `BatchSizeFinder` do.

    Args:
        trainer: Trainer whose settings, processes and precision the searches use.

    Examples:
        >>> import treadle as tl
        >>> from treadle.compat.demos.boring_classes import BoringModel
        >>> from treadle.tuner import Tuner
        >>> trainer = tl.Trainer(max_steps=1, accelerator="cpu", devices=1, barebones=True)
        >>> finder = Tuner(trainer).lr_find(BoringModel(), num_training=20, update_attr=False)
        >>> len(finder.results["lr"]) > 0
        True
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def lr_find(
        self,
        model: TaskModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        method: str = "fit",
        *args: Any,
        **kwargs: Any,
    ) -> _LRFinder | None:
        """Search for a learning rate; see `LearningRateFinder`.

        Args:
            model: Task to find a learning rate for.
            train_dataloaders: The training dataloader, or a data module. Default: see `Trainer.fit`.
            val_dataloaders: The validation dataloader, or several. The search does not use them.
            dataloaders: Must be None; pass ``train_dataloaders`` instead.
            datamodule: Data module to use instead of dataloaders.
            method: Must be ``"fit"``. Default: ``"fit"``.
            args: Arguments of `LearningRateFinder`, in its order.
            kwargs: Arguments of `LearningRateFinder`. ``num_training`` stands for ``num_training_steps``.

        Returns:
            Result of the search: an object with ``results``, ``suggestion()`` and ``plot()``. None if the Trainer's
            ``fast_dev_run`` is set.

        Raises:
            ValueError: If an argument is invalid, or the search cannot train a copy of the task.
            TypeError: If an argument has the wrong type.
        """
        if method != "fit":
            raise ValueError(f"method={method!r} of lr_find must be 'fit', the only method that uses a learning rate.")
        if "num_training" in kwargs:
            kwargs["num_training_steps"] = kwargs.pop("num_training")
        finder = LearningRateFinder(*args, **kwargs)
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
        *args: Any,
        **kwargs: Any,
    ) -> int | None:
        """Search for the largest batch that fits into memory; see `BatchSizeFinder`.

        Args:
            model: Task to find a batch size for.
            train_dataloaders: A data module. Passing a dataloader raises an error, because it cannot be rebuilt with
                another batch size.
            val_dataloaders: The validation dataloader, or several.
            dataloaders: A data module, for a ``method`` other than ``"fit"``.
            datamodule: Data module to use instead of dataloaders.
            method: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``. Default: ``"fit"``.
            args: Arguments of `BatchSizeFinder`, in its order.
            kwargs: Arguments of `BatchSizeFinder`.

        Returns:
            The batch size; None if the Trainer's ``fast_dev_run`` is set.

        Raises:
            ValueError: If an argument is invalid, or the search cannot run a copy of the task.
            TypeError: If an argument has the wrong type.
            MemoryError: If none of the sizes that were tried fits.
        """
        choose("method", method, KIND_OF_STAGE)
        finder = BatchSizeFinder(*args, **kwargs)
        loaders_by_kind = _map_loaders(method, train_dataloaders, val_dataloaders, dataloaders)
        self._search(finder, method, model, loaders_by_kind, datamodule)
        return finder.optimal_batch_size

    def _search(
        self, finder: Callback, method: str, model: TaskModule, loaders_by_kind: dict[str, Any], data: Any
    ) -> None:
        """Run the search as a stage that ends before its first step."""
        trainer, kind = self._trainer, type(finder)
        if any(isinstance(callback, kind) for callback in trainer.callbacks):
            raise ValueError(
                f"the Trainer already has a {kind.__name__} in its callbacks. Remove the callback, or call "
                f"trainer.{method}, which runs its search."
            )
        callbacks = trainer.callbacks
        finders = (LearningRateFinder, BatchSizeFinder)
        trainer.callbacks = [finder, *(callback for callback in callbacks if not isinstance(callback, finders))]
        try:
            with isolated_random_state():
                Stage(trainer, method, model, loaders_by_kind, data).run(None)
        finally:
            trainer.callbacks = callbacks


def _map_loaders(method: str, train: Any, val: Any, other: Any) -> dict[str, Any]:
    if method == "fit":
        if other is not None:
            raise ValueError(
                "dataloaders=... does not apply to method='fit'. Pass train_dataloaders and val_dataloaders."
            )
        return {"train": train, "val": val}
    if train is not None or val is not None:
        raise ValueError(
            f"train_dataloaders=... and val_dataloaders=... do not apply to method={method!r}. Pass dataloaders."
        )
    return {KIND_OF_STAGE[method]: other}
