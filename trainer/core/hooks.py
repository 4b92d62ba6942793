"""Hooks that a task can override."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from .datamodule import DataHooks


class TaskHooks(DataHooks):
    """Hooks of a task. `docs/hooks.md` lists their order."""

    def configure_model(self) -> None:
        """Build layers that ``__init__`` did not build.

        The hook may be called more than once, so return immediately if the layers exist. See also
        `Accelerator.init_module`.
        """

    def configure_callbacks(self) -> Any:
        """Return callbacks that belong to this task. They replace the Trainer's callbacks of the same class.

        Returns:
            A `Callback`, several, or None.
        """
        return []

    def on_fit_start(self) -> None:
        """Run after the model and the optimizers are set up."""

    def on_fit_end(self) -> None:
        """Run at the end of ``fit``, after `on_train_end`, unless an error or a signal ends ``fit``."""

    def on_exception(self, exception: BaseException) -> None:
        """React to an exception on this process. Call no collectives: other ranks may not reach them.

        Args:
            exception: The exception.
        """

    def on_sanity_check_start(self) -> None:
        """Run before the sanity check."""

    def on_sanity_check_end(self) -> None:
        """Run after the sanity check."""

    def on_train_start(self) -> None:
        """Run before training begins or, in a resumed run, continues."""

    def on_train_end(self) -> None:
        """Run at the end of training, unless an error or a signal ends ``fit``."""

    def on_train_epoch_start(self) -> None:
        """Run before each epoch, and before the rest of a resumed epoch."""

    def on_train_epoch_end(self) -> None:
        """Run after each epoch and its validation, also if a limit ends the epoch early."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """Run before each micro-batch, once it is on the device.

        Args:
            batch: The batch.
            batch_idx: Index of the micro-batch in the epoch.

        Returns:
            -1, on every rank, to end the epoch; None to continue.
        """

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Run after each micro-batch; for the last one of an accumulation group, after the optimizer step.

        Args:
            outputs: Result of ``training_step``, usually a dict with the detached ``"loss"``.
            batch: The batch.
            batch_idx: Index of the micro-batch in the epoch.
        """

    def on_before_backward(self, loss: Any) -> None:
        """Run before each backward pass.

        Args:
            loss: Unscaled loss.
        """

    def on_after_backward(self) -> None:
        """Run after each backward pass."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Run before each optimizer step, once its gradients are complete and unscaled, before the Trainer clips them.

        With automatic optimization and an optimizer that needs a closure, the hook runs in each closure call.

        Args:
            optimizer: Optimizer that is about to step.
        """

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        """Run before an optimizer's gradients are reset. Does not run with manual optimization.

        Args:
            optimizer: Optimizer whose gradients are reset.
        """

    def on_step_end(self) -> None:
        """Run after each optimizer step, even a skipped one, and the validation that is due.

        With manual optimization, the hook runs after each batch.
        """

    def on_validation_start(self) -> None:
        """Run before each validation."""

    def on_validation_end(self) -> None:
        """Run after each validation."""

    def on_validation_epoch_start(self) -> None:
        """Run before the first batch of the validation dataloaders."""

    def on_validation_epoch_end(self) -> None:
        """Run after the last batch of the validation dataloaders."""

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Run before each validation batch, once it is on the device.

        Args:
            batch: The batch.
            batch_idx: Index of the batch in its dataloader.
            dataloader_idx: Index of the dataloader.
        """

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Run after each validation batch.

        Args:
            outputs: Result of ``validation_step``.
            batch: The batch.
            batch_idx: Index of the batch in its dataloader.
            dataloader_idx: Index of the dataloader.
        """

    def on_test_start(self) -> None:
        """Run before the test."""

    def on_test_end(self) -> None:
        """Run after the test."""

    def on_test_epoch_start(self) -> None:
        """Run before the first batch of the test dataloaders."""

    def on_test_epoch_end(self) -> None:
        """Run after the last batch of the test dataloaders."""

    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Run before each test batch, once it is on the device.

        Args:
            batch: The batch.
            batch_idx: Index of the batch in its dataloader.
            dataloader_idx: Index of the dataloader.
        """

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Run after each test batch.

        Args:
            outputs: Result of ``test_step``.
            batch: The batch.
            batch_idx: Index of the batch in its dataloader.
            dataloader_idx: Index of the dataloader.
        """

    def on_predict_start(self) -> None:
        """Run before the prediction."""

    def on_predict_end(self) -> None:
        """Run after the prediction."""

    def on_predict_epoch_start(self) -> None:
        """Run before the first batch of the predict dataloaders."""

    def on_predict_epoch_end(self) -> None:
        """Run after the last batch of the predict dataloaders."""

    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Run before each predict batch, once it is on the device.

        Args:
            batch: The batch.
            batch_idx: Index of the batch in its dataloader.
            dataloader_idx: Index of the dataloader.
        """

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Run after each predict batch.

        Args:
            outputs: Result of ``predict_step``.
            batch: The batch.
            batch_idx: Index of the batch in its dataloader.
            dataloader_idx: Index of the dataloader.
        """

    # How evaluation sets and restores modes. Overriding one replaces what the loop does; `super()` has Lightning's
    # behavior. Without overrides each module returns to its earlier mode.

    def on_validation_model_zero_grad(self) -> None:
        """Run before a validation within ``fit``."""

    def on_validation_model_eval(self) -> None:
        """Set evaluation mode for validation."""
        self._set_mode(training=False)

    def on_validation_model_train(self) -> None:
        """Set training mode after validation. Without an override, each module returns to its earlier mode."""
        self._set_mode(training=True)

    def on_test_model_eval(self) -> None:
        """Set evaluation mode for testing."""
        self._set_mode(training=False)

    def on_test_model_train(self) -> None:
        """Set training mode after testing. Without an override, each module returns to its earlier mode."""
        self._set_mode(training=True)

    def on_predict_model_eval(self) -> None:
        """Set evaluation mode for prediction."""
        self._set_mode(training=False)

    def _set_mode(self, *, training: bool) -> None:
        self.train(training)  # type: ignore[attr-defined]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add plain data or tensors to a checkpoint.

        Args:
            checkpoint: Dict to which the hook adds entries. It contains ``"state_dict"``, ``"epoch"``,
                ``"global_step"`` and any ``"hyper_parameters"``.
        """

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the entries that `on_save_checkpoint` added to a checkpoint.

        The hook runs before the model is placed on its device, the weights are loaded and the optimizers are built, so
        it may edit ``checkpoint["state_dict"]`` and replace layers.

        Args:
            checkpoint: Entries of the checkpoint.
        """
