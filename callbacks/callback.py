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
        """Prepare for a stage. Runs on every process.

        Args:
            trainer: The Trainer that runs the stage.
            pl_module: The task.
            stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        """

    def teardown(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """Clean up after a stage, whether it succeeded or failed.

        Args:
            trainer: The Trainer that runs the stage.
            pl_module: The task.
            stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        """

    def on_fit_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Run once model and optimizers are in place.

        Args:
            trainer: The Trainer that runs the stage.
            pl_module: The task.
        """

    def on_fit_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Run after training.

        Args:
            trainer: The Trainer that runs the stage.
            pl_module: The task.
        """

    def on_exception(self, trainer: Trainer, pl_module: TaskModule, exception: BaseException) -> None:
        """React to an exception on this process. Call no collectives: other ranks may not reach them.

        Args:
            trainer: The Trainer that runs the stage.
            pl_module: The task.
            exception: The exception.
        """

    # -- training ------------------------------------------------------------------------------------------------

    def on_sanity_check_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Run before the sanity check, the validation batches that precede training.

        Args:
            trainer: The Trainer that runs the stage.
            pl_module: The task.
        """

    def on_sanity_check_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Run after the sanity check.

        Args:
            trainer: The Trainer that runs the stage.
            pl_module: The task.
        """

    def on_train_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Run before the first epoch.

        Args:
            trainer: The Trainer that runs the stage.
            pl_module: The task.
        """

    def on_train_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Run after the last epoch.

        Args:
            trainer: The Trainer that runs the stage.
            pl_module: The task.
        """

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Run before each epoch.

        Args:
            trainer: The Trainer that runs the stage.
            pl_module: The task.
        """

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Run after each epoch, including its validation and its schedulers' steps.

        Args:
            trainer: The Trainer that runs the stage.
            pl_module: The task.
        """

    def on_train_batch_start(self, trainer: Trainer, pl_module: TaskModule, batch: Any, batch_idx: int) -> None:
        """Run before each micro-batch, which is on the device.

        Args:
            trainer: The Trainer that runs the stage.
            pl_module: The task.
            batch: The batch.
            batch_idx: Index of the batch.
        """

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TaskModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Run after each micro-batch; after the last one of a group, the optimizer has stepped.

        Args:
            trainer: The Trainer that runs the stage.
            pl_module: The task.
            outputs: The step's result.
            batch: The batch.
            batch_idx: Index of the batch.
        """

    def on_before_backward(self, trainer: Trainer, pl_module: TaskModule, loss: Any) -> None:
        """Run after the loss is computed and before its backward pass.

        Args:
            trainer: The Trainer that runs the stage.
            pl_module: The task.
            loss: The loss, scaled for accumulation and the gradient scaler.
        """

    def on_after_backward(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Run after the gradients of a micro-batch are accumulated.

        Args:
            trainer: The Trainer that runs the stage.
            pl_module: The task.
        """

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: TaskModule, optimizer: Optimizer) -> None:
        """Run once the group's gradients are complete and unscaled, before they are clipped.

        Args:
            trainer: The Trainer that runs the stage.
            pl_module: The task.
            optimizer: The optimizer.
        """

    def on_before_zero_grad(self, trainer: Trainer, pl_module: TaskModule, optimizer: Optimizer) -> None:
        """Run after the optimizer step, before its gradients are reset.

        Args:
            trainer: The Trainer that runs the stage.
            pl_module: The task.
            optimizer: The optimizer.
        """

    def on_step_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Run after each optimizer step, including a due validation and the schedulers' steps.

        Checkpoints are saved here.

        Args:
            trainer: The Trainer that runs the stage.
            pl_module: The task.
        """

    # -- evaluation ----------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Run before the validation.

        Args:
            trainer: The Trainer that runs the stage.
            pl_module: The task.
        """

    def on_validation_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Run after the validation, with its values in ``trainer.callback_metrics``.

        Args:
            trainer: The Trainer that runs the stage.
            pl_module: The task.
        """

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Run before the first batch of the validation dataloaders.

        Args:
            trainer: The Trainer that runs the stage.
            pl_module: The task.
        """

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Run after the last batch of the validation dataloaders.

        The last place to log a value of this validation.

        Args:
            trainer: The Trainer that runs the stage.
            pl_module: The task.
        """

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: TaskModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Run before each validation batch, which is on the device.

        Args:
            trainer: The Trainer that runs the stage.
            pl_module: The task.
            batch: The batch.
            batch_idx: Index of the batch.
            dataloader_idx: Index of the dataloader. Default: 0.
        """

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: TaskModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Run after each validation batch.

        Args:
            trainer: The Trainer that runs the stage.
            pl_module: The task.
            outputs: The step's result.
            batch: The batch.
            batch_idx: Index of the batch.
            dataloader_idx: Index of the dataloader. Default: 0.
        """

    def on_test_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Run before the test.

        Args:
            trainer: The Trainer that runs the stage.
            pl_module: The task.
        """

    def on_test_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Run after the test.

        Args:
            trainer: The Trainer that runs the stage.
            pl_module: The task.
        """

    def on_test_epoch_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Run before the first batch of the test dataloaders.

        Args:
            trainer: The Trainer that runs the stage.
            pl_module: The task.
        """

    def on_test_epoch_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Run after the last batch of the test dataloaders.

        Args:
            trainer: The Trainer that runs the stage.
            pl_module: The task.
        """

    def on_test_batch_start(
        self, trainer: Trainer, pl_module: TaskModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Run before each test batch, which is on the device.

        Args:
            trainer: The Trainer that runs the stage.
            pl_module: The task.
            batch: The batch.
            batch_idx: Index of the batch.
            dataloader_idx: Index of the dataloader. Default: 0.
        """

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: TaskModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Run after each test batch.

        Args:
            trainer: The Trainer that runs the stage.
            pl_module: The task.
            outputs: The step's result.
            batch: The batch.
            batch_idx: Index of the batch.
            dataloader_idx: Index of the dataloader. Default: 0.
        """

    def on_predict_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Run before the prediction.

        Args:
            trainer: The Trainer that runs the stage.
            pl_module: The task.
        """

    def on_predict_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Run after the prediction.

        Args:
            trainer: The Trainer that runs the stage.
            pl_module: The task.
        """

    def on_predict_epoch_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Run before the first batch of the predict dataloaders.

        Args:
            trainer: The Trainer that runs the stage.
            pl_module: The task.
        """

    def on_predict_epoch_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Run after the last batch of the predict dataloaders.

        Args:
            trainer: The Trainer that runs the stage.
            pl_module: The task.
        """

    def on_predict_batch_start(
        self, trainer: Trainer, pl_module: TaskModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Run before each predict batch, which is on the device.

        Args:
            trainer: The Trainer that runs the stage.
            pl_module: The task.
            batch: The batch.
            batch_idx: Index of the batch.
            dataloader_idx: Index of the dataloader. Default: 0.
        """

    def on_predict_batch_end(
        self, trainer: Trainer, pl_module: TaskModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Run after each predict batch.

        Args:
            trainer: The Trainer that runs the stage.
            pl_module: The task.
            outputs: The step's result.
            batch: The batch.
            batch_idx: Index of the batch.
            dataloader_idx: Index of the dataloader. Default: 0.
        """

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: Trainer, pl_module: TaskModule, checkpoint: dict[str, Any]) -> None:
        """Add plain data or tensors to a checkpoint, under user-defined names.

        Args:
            trainer: The Trainer that runs the stage.
            pl_module: The task.
            checkpoint: Entries of the checkpoint, by name.
        """

    def on_load_checkpoint(self, trainer: Trainer, pl_module: TaskModule, checkpoint: dict[str, Any]) -> None:
        """Restore what `on_save_checkpoint` added to a checkpoint.

        Args:
            trainer: The Trainer that runs the stage.
            pl_module: The task.
            checkpoint: Entries of the checkpoint, by name.
        """


HOOKS: tuple[str, ...] = tuple(
    name for name in vars(Callback) if name.startswith("on_") or name in ("setup", "teardown")
)
