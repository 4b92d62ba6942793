"""`PruningCallback`, which prunes the trials of an Optuna study."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..callbacks import Callback, checks_at_epoch_end, read_new_value, validates_at_epoch_ends
from ..common.optional import require
from ..common.validation import check_monitor

if TYPE_CHECKING:
    from optuna.trial import BaseTrial

    from ..trainer import TaskModule, Trainer


class PruningCallback(Callback):
    """Callback that reports a logged value to an Optuna trial, and raises ``optuna.TrialPruned`` if Optuna prunes it.

    Only rank zero accesses the study's storage. All ranks raise the exception after the same step. The checkpoints of a
    pruned trial are kept.

    If validation is disabled or runs once at the end of every epoch, the value is reported after each epoch. Otherwise,
    it is reported after each validation. The reported step is the epoch's index if validation is disabled or runs only
    at the end of epochs. Otherwise, it is the index of the report.

    Args:
        trial: The trial, or Optuna's ``TorchDistributedTrial`` that wraps it. Ranks other than zero may pass None.
        monitor: Name of the logged value to report, such as ``"val_loss"``.

    Attributes:
        pruned: The reason why the trial was pruned; None if it was not.

    Raises:
        ModuleNotFoundError: If Optuna is not installed.
        TypeError, ValueError: If an argument is invalid or, during training, if the value was never logged.

    Examples:
        >>> import optuna
        >>> import torch
        >>> import treadle as tl
        >>> from treadle.compat.demos.boring_classes import BoringModel
        >>> from treadle.integrations import PruningCallback
        >>> class Model(BoringModel):
        ...     def __init__(self, lr):
        ...         super().__init__()
        ...         self.lr = lr
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=self.lr)
        ...     def on_validation_epoch_end(self):
        ...         self.log("val_norm", self.layer.weight.norm())
        >>> def objective(trial):
        ...     trainer = tl.Trainer(
        ...         max_epochs=2,
        ...         limit_train_batches=2,
        ...         limit_val_batches=1,
        ...         accelerator="cpu",
        ...         devices=1,
        ...         logger=False,
        ...         enable_checkpointing=False,
        ...         enable_progress_bar=False,
        ...         callbacks=PruningCallback(trial, "val_norm"),
        ...     )
        ...     trainer.fit(Model(trial.suggest_float("lr", 1e-3, 1e-1, log=True)))
        ...     return trainer.callback_metrics["val_norm"].item()
        >>> study = optuna.create_study(pruner=optuna.pruners.MedianPruner())
        >>> study.optimize(objective, n_trials=3)
        >>> len(study.trials)
        3
    """

    after_task = 3  # the checkpoint of the same epoch is saved before the error is raised
    exchanges = True

    _first_epoch = 0

    def __init__(self, trial: BaseTrial | None, monitor: str) -> None:
        require("PruningCallback", "optuna", extra="sweep")
        # Optuna's wrapper for several processes turns each call into a collective; it wraps rank zero's trial.
        self._trial: Any = getattr(trial, "_delegate", trial)
        self.monitor = check_monitor(monitor)
        self.pruned: str | None = None
        self._validations = 0

    @property
    def state_key(self) -> str:
        """See `Callback.state_key`."""
        return f"PruningCallback(monitor={self.monitor!r})"

    def state_dict(self) -> dict[str, Any]:
        """Return the callback's state, which is the number of reports."""
        return {"validations": self._validations}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the number of reports."""
        self._validations = state_dict["validations"]

    def setup(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """Reset the callback before ``fit``, and raise an error if rank zero does not have the trial."""
        if stage == "fit":
            self._validations, self.pruned = 0, None
            with trainer.accelerator.world.failing_together():
                if trainer.is_global_zero and self._trial is None:
                    raise ValueError(
                        "PruningCallback(trial=None, ...) is allowed only on ranks other than zero. Pass the trial on "
                        "rank zero."
                    )

    def on_validation_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Report the value, unless values are reported at the end of the epoch."""
        if trainer.stage == "fit" and not trainer.sanity_checking and not checks_at_epoch_end(trainer):
            self._report(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Report the value, unless values are reported after each validation."""
        if trainer.progress.epoch_is_over and checks_at_epoch_end(trainer):
            self._report(trainer)

    def _report(self, trainer: Trainer) -> None:
        value = read_new_value(trainer, self.monitor, type(self).__name__)
        if value is None:
            return
        several = trainer.has_validation and not validates_at_epoch_ends(trainer)
        number = self._first_epoch + (self._validations if several else trainer.current_epoch)
        self._validations += 1
        world = trainer.accelerator.world
        prunes = False
        with world.failing_together():
            if world.is_main:
                prunes = self._ask_pruner(trainer, value, number)
        self._note(trainer, value, number)
        if world.broadcast(prunes):
            unit = "validation" if several else "epoch"
            self.pruned = f"pruned at {unit} {number}: {self.monitor} was {value:.4g}"
            self._prune(trainer)

    def _ask_pruner(self, trainer: Trainer, value: float, number: int) -> bool:
        """Report a value to the trial, and return whether to prune the trial. Only called on rank zero."""
        self._trial.report(value, number)
        return bool(self._trial.should_prune())

    def _note(self, trainer: Trainer, value: float, number: int) -> None:
        """Do nothing. Subclasses may override this hook, which is called on all ranks after each report."""

    def _prune(self, trainer: Trainer) -> None:
        from optuna import TrialPruned

        raise TrialPruned(self.pruned)

    def check_pruned(self) -> None:
        """Raise ``TrialPruned`` if the trial was pruned.

        `Trainer.fit` already raises this exception. The method exists for compatibility with Optuna's callback.
        """
        if self.pruned is not None:
            from optuna import TrialPruned

            raise TrialPruned(self.pruned)


PyTorchLightningPruningCallback = PruningCallback
"""Alias of `PruningCallback`, under the name that Optuna's integration with Lightning uses."""
