"""What happens around the loop: the base class of every callback, and the one list of hooks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ..trainer import TaskModule, Trainer


class Callback:
    """Override the hooks you need; the others cost nothing.

    ``trainer/loop/fit_loop.py`` begins with the order of the hooks. Of one hook's name, those are called first whose
    ``after_task`` is 0, in the order given; then the task's own; then the others, which act on what those logged, by
    their ``after_task``. The same on every process.

    Attributes:
        after_task: 0 to be called before the task's own hook; 1 after it, to decide (`EarlyStopping`, `Timer`); 2 to
            keep what was decided (`ModelCheckpoint`); 3 to show it (`TQDMProgressBar`).
        searches: Whether it tries something out before the stage begins (`BatchSizeFinder`, `LearningRateFinder`).
        exchanges: Whether its hooks call collectives, so that every rank must have one (`ModelCheckpoint`). It is
            compared when a stage begins; without it a callback may be on some ranks only.
    """

    after_task: int = 0
    searches: bool = False
    exchanges: bool = False
    _task: TaskModule | None = None

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Log one number, as the task's own ``log`` does, with the same arguments and in the same hooks.

        Raises:
            RuntimeError: Outside of a stage.
        """
        self._get_attached_task().log(name, value, *args, **kwargs)

    def log_dict(self, dictionary: Mapping[str, Any], **kwargs: Any) -> None:
        """`log` every item with the same arguments."""
        self._get_attached_task().log_dict(dictionary, **kwargs)

    def _get_attached_task(self) -> TaskModule:
        if self._task is None:
            raise RuntimeError(f"{type(self).__name__}.log needs a running stage: call it in a hook.")
        return self._task

    @property
    def state_key(self) -> str:
        """The name this callback's state is saved under, and found by when a run goes on.

        By default the class's name. Two callbacks with a state and one name are an error, as one would be lost: put
        into it what tells yours apart, such as an argument.
        """
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """What to save in a checkpoint: plain data and tensors."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""

    def added_layout(self) -> dict[str, Any]:
        """What shows how the tensors that `on_save_checkpoint` adds lie on the processes; see there for the names."""
        return {}

    def leave_validation(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """A signal ends the run within a validation: undo what ``on_validation_start`` did to the model.

        ``on_validation_end`` is not called then. Called on all ranks.
        """

    def return_to_validation(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """The run could not be saved from within the validation, which continues: do it again."""

    # -- the run -------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """A stage (``fit``, ``validate``, ``test``, ``predict``) begins."""

    def teardown(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """A stage is over, by success or failure."""

    def on_fit_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Model and optimizers are in place."""

    def on_fit_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Training is over."""

    def on_exception(self, trainer: Trainer, pl_module: TaskModule, exception: BaseException) -> None:
        """Something raised, on this process at least. No collectives here: the others may not come."""

    # -- training ------------------------------------------------------------------------------------------------

    def on_sanity_check_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """The few validation batches before training begin."""

    def on_sanity_check_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """The few validation batches before training are over."""

    def on_train_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """The first epoch is about to begin."""

    def on_train_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """The last epoch is over."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """An epoch begins."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """An epoch is over, its validation and its schedulers too."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: TaskModule, batch: Any, batch_idx: int) -> None:
        """A micro-batch is on the device."""

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TaskModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A micro-batch is done; after its group's last one, the optimizer has stepped."""

    def on_before_backward(self, trainer: Trainer, pl_module: TaskModule, loss: Any) -> None:
        """The loss is known, its gradient not yet."""

    def on_after_backward(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Gradients of this micro-batch are added."""

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: TaskModule, optimizer: Optimizer) -> None:
        """The group's gradient is complete and unscaled, but not clipped."""

    def on_before_zero_grad(self, trainer: Trainer, pl_module: TaskModule, optimizer: Optimizer) -> None:
        """The optimizer has stepped; its gradients are about to be dropped."""

    def on_step_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """An optimizer step is wholly over: validated if due, schedulers stepped. The place to save from."""

    # -- evaluation ----------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Validation begins."""

    def on_validation_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Validation is over, its values are in ``trainer.callback_metrics``."""

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """The validation loaders are about to be run through."""

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """The validation loaders have been run through; the last place to log a value of this validation."""

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: TaskModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """A validation batch is on the device."""

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: TaskModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """A validation batch is done."""

    def on_test_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Testing begins."""

    def on_test_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Testing is over."""

    def on_test_epoch_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """The test loaders are about to be run through."""

    def on_test_epoch_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """The test loaders have been run through."""

    def on_test_batch_start(
        self, trainer: Trainer, pl_module: TaskModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """A test batch is on the device."""

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: TaskModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """A test batch is done."""

    def on_predict_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Prediction begins."""

    def on_predict_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Prediction is over."""

    def on_predict_epoch_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """The predict loaders are about to be run through."""

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """The predict loaders have been run through."""

    def on_predict_batch_start(
        self, trainer: Trainer, pl_module: TaskModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """A predict batch is on the device."""

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: TaskModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """A predict batch is done."""

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: Trainer, pl_module: TaskModule, checkpoint: dict[str, Any]) -> None:
        """A checkpoint is being made; add plain data or tensors under names of your own."""

    def on_load_checkpoint(self, trainer: Trainer, pl_module: TaskModule, checkpoint: dict[str, Any]) -> None:
        """A checkpoint is being restored; take back what `on_save_checkpoint` added."""


HOOKS: tuple[str, ...] = tuple(
    name for name in vars(Callback) if name.startswith("on_") or name in ("setup", "teardown")
)
