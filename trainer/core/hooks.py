"""The hooks of a task: the same names and moments as a callback's, told from the inside."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer


class TaskHooks:
    """Override the hooks you need; the others cost nothing. `docs/hooks.md` has the order."""

    prepare_data_per_node: bool = True
    """Whether ``prepare_data`` runs on one process of each machine, or on one of all."""

    allow_zero_length_dataloader_with_multiple_devices: bool = False
    """Accepted for Lightning's users: a process without a share of the data always takes part, with weight zero."""

    def prepare_data(self) -> None:
        """Download or build data on disk: runs on one process per machine, before ``setup``."""

    def setup(self, stage: str) -> None:
        """A stage (``fit``, ``validate``, ``test``, ``predict``) begins, on every process."""

    def teardown(self, stage: str) -> None:
        """A stage is over, by success or failure."""

    def configure_model(self) -> None:
        """Build what ``__init__`` left out, in place and, where the strategy shards, never whole; see `init_module`.

        May be called more than once: return at once if it is there already.
        """

    def configure_callbacks(self) -> Any:
        """Callbacks that belong to this task; they replace the Trainer's of the same class."""
        return []

    def on_fit_start(self) -> None:
        """Model and optimizers are in place."""

    def on_fit_end(self) -> None:
        """Training is over."""

    def on_exception(self, exception: BaseException) -> None:
        """Something raised, on this process at least. No collectives here: the others may not come."""

    def on_sanity_check_start(self) -> None:
        """The few validation batches before training begin."""

    def on_sanity_check_end(self) -> None:
        """The few validation batches before training are over."""

    def on_train_start(self) -> None:
        """The first epoch is about to begin."""

    def on_train_end(self) -> None:
        """The last epoch is over."""

    def on_train_epoch_start(self) -> None:
        """An epoch begins."""

    def on_train_epoch_end(self) -> None:
        """An epoch is over, its validation and its schedulers too."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """A micro-batch is on the device; return -1, on every rank, to end the epoch here."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """A micro-batch is done; after its group's last one, the optimizer has stepped."""

    def on_before_backward(self, loss: Any) -> None:
        """The loss is known, its gradient not yet."""

    def on_after_backward(self) -> None:
        """Gradients of this micro-batch are added."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """The group's gradient is complete and unscaled, but not clipped."""

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        """The optimizer has stepped; its gradients are about to be dropped."""

    def on_step_end(self) -> None:
        """An optimizer step is wholly over: validated if due, schedulers stepped."""

    def on_validation_start(self) -> None:
        """Validation begins."""

    def on_validation_end(self) -> None:
        """Validation is over."""

    def on_validation_epoch_start(self) -> None:
        """The validation loaders are about to be run through."""

    def on_validation_epoch_end(self) -> None:
        """The validation loaders have been run through."""

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """A validation batch is on the device."""

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """A validation batch is done."""

    def on_test_start(self) -> None:
        """Testing begins."""

    def on_test_end(self) -> None:
        """Testing is over."""

    def on_test_epoch_start(self) -> None:
        """The test loaders are about to be run through."""

    def on_test_epoch_end(self) -> None:
        """The test loaders have been run through."""

    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """A test batch is on the device."""

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """A test batch is done."""

    def on_predict_start(self) -> None:
        """Prediction begins."""

    def on_predict_end(self) -> None:
        """Prediction is over."""

    def on_predict_epoch_start(self) -> None:
        """The predict loaders are about to be run through."""

    def on_predict_epoch_end(self) -> None:
        """The predict loaders have been run through."""

    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """A predict batch is on the device."""

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """A predict batch is done."""

    # How evaluation sets and takes back modes. Overriding one replaces what the loop does; `super()` gives Lightning's
    # behavior. Without overrides each part returns to the mode it was in.

    def on_validation_model_zero_grad(self) -> None:
        """Within ``fit``, validation is about to begin; the gradients were dropped after the step."""

    def on_validation_model_eval(self) -> None:
        """Set the modes for validation."""
        self._set_mode(training=False)

    def on_validation_model_train(self) -> None:
        """Take the modes back after validation."""
        self._set_mode(training=True)

    def on_test_model_eval(self) -> None:
        """Set the modes for testing."""
        self._set_mode(training=False)

    def on_test_model_train(self) -> None:
        """Take the modes back after testing."""
        self._set_mode(training=True)

    def on_predict_model_eval(self) -> None:
        """Set the modes for prediction."""
        self._set_mode(training=False)

    def _set_mode(self, *, training: bool) -> None:
        """Put every part in one mode; a task is a module too."""
        self.train(training)  # type: ignore[attr-defined]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """A checkpoint is being made; add plain data or tensors under names of your own."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """A checkpoint is being restored; take back what `on_save_checkpoint` added."""
