"""Callbacks for Trainers in Ray workers. They report to Ray and resume from its checkpoints."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

from ..callbacks import Checkpoint
from ..common.messages import nearest, warn
from ..common.optional import is_installed, require
from ..common.validation import check_bool, check_int, check_text

if TYPE_CHECKING:
    import ray.train
    import ray.tune
    from pyarrow.fs import FileSystem
    from ray.train import CheckpointUploadMode

    from ..trainer import TaskModule, Trainer

__all__ = ["RayTrainReportCallback", "TuneReportCheckpointCallback"]

_PREFIX = "checkpoint_step="
# Scheme of Treadle's URLs and the package that writes there, by pyarrow's name of a storage.
_WRITABLE = {"local": ("", "pyarrow"), "s3": ("s3://", "s3fs"), "gcs": ("gs://", "gcsfs")}
_MOMENTS = ("validation_end", "train_epoch_end", "train_batch_end", "train_end")


class _ReportedCheckpoint(Checkpoint):
    """Base class of callbacks that pass checkpoints to Ray and resume from the one that Ray returns.

    Args:
        filename: Name of Treadle's checkpoint inside Ray's checkpoint.
    """

    after_task = 2
    exchanges = True
    keeper = "Ray"

    def __init__(self, filename: str) -> None:
        super().__init__()
        self._filename = filename
        self._in_use = ExitStack()

    def resume_path(self) -> str | None:
        """Return the path of the checkpoint to resume from, or None."""
        self._in_use.close()
        checkpoint = self._get_checkpoint()
        if checkpoint is None:
            return None
        return os.path.join(self._in_use.enter_context(checkpoint.as_directory()), self._filename)

    def on_train_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Delete a downloaded checkpoint, because the run has been restored."""
        self._in_use.close()

    def teardown(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """Delete a downloaded checkpoint."""
        self._in_use.close()

    def _get_checkpoint(self) -> Any:
        """Return the ``ray.train.Checkpoint`` to resume from, or None."""
        raise NotImplementedError


def _collect_metrics(trainer: Trainer) -> dict[str, float]:
    """Return all logged values as floats, with the epoch's index as ``epoch`` and the optimizer step as ``step``."""
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return values | {"epoch": trainer.current_epoch, "step": trainer.global_step}


class RayTrainReportCallback(_ReportedCheckpoint):
    """Callback that reports metrics and a checkpoint to Ray Train at the end of each training epoch.

    Create it in the function that ``ray.train.torch.TorchTrainer`` runs on each worker. If Ray restarts failed workers
    (see its ``FailureConfig``), ``trainer.fit(..., ckpt_path="auto")`` resumes from the last reported checkpoint. Ray's
    ``CheckpointConfig`` decides which checkpoints are kept. Ray's checkpoint contains Treadle's checkpoint as
    ``checkpoint.ckpt``.

    All ranks write their shards directly to Ray's storage if it is a shared file system, S3 (with the extra ``s3``) or
    Google Cloud Storage (with the extra ``gs``). A checkpoint is reported once it is complete. For any other storage,
    the checkpoint is saved to a temporary folder and Ray copies it, so all workers must be on one machine.

    Args:
        every_n_train_steps: Number of optimizer steps between additional reports within an epoch. Default: None, which
            disables them.

    Raises:
        ModuleNotFoundError: If Ray or pyarrow is not installed.
        RuntimeError: If the process is not a Ray Train worker, or if ``num_workers=0`` disables Ray's storage.
        ValueError: If ``every_n_train_steps`` is not a positive integer.

    Examples:
        >>> from treadle.integrations import RayTrainReportCallback
        >>> def train_function():
        ...     trainer = Trainer(max_epochs=10, callbacks=[RayTrainReportCallback()])
        ...     trainer.fit(task, loader, ckpt_path="auto")
        >>> TorchTrainer(train_function, scaling_config=ScalingConfig(num_workers=2)).fit()  # doctest: +SKIP

        The last line is skipped because it starts a Ray cluster.
    """

    CHECKPOINT_NAME = "checkpoint.ckpt"

    def __init__(self, *, every_n_train_steps: int | None = None) -> None:
        require("RayTrainReportCallback", "ray", "pyarrow", extra="ray")
        super().__init__(self.CHECKPOINT_NAME)
        self.every_n_train_steps = (
            0 if every_n_train_steps is None else check_int("every_n_train_steps", every_n_train_steps, 1)
        )
        self._storage = _get_storage()
        self._reported_step = 0

    @property
    def state_key(self) -> str:
        """See `Callback.state_key`."""
        return f"RayTrainReportCallback(every_n_train_steps={self.every_n_train_steps})"

    def on_train_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Remove checkpoints that workers saved to Ray's storage but did not report."""
        super().on_train_start(trainer, pl_module)
        self._reported_step = trainer.global_step
        if trainer.is_global_zero:
            _remove_unreported(self._storage)

    def on_step_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Report metrics and a checkpoint every ``every_n_train_steps`` steps, except after an epoch's last step."""
        every, step = self.every_n_train_steps, trainer.global_step
        if every and step % every == 0 and not trainer.progress.epoch_is_trained and step != self._reported_step:
            self._report(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Report metrics and a checkpoint."""
        self._report(trainer)

    @property
    def _shared_root(self) -> str | None:
        """Path or URL of the run's folder in Ray's storage, if all ranks write there directly; otherwise None."""
        scheme, package = _WRITABLE.get(self._storage.storage_filesystem.type_name, ("", ""))
        return f"{scheme}{self._storage.experiment_fs_path}" if is_installed(package) else None

    def _get_checkpoint(self) -> ray.train.Checkpoint | None:
        import ray.train

        return ray.train.get_checkpoint()

    def _report(self, trainer: Trainer) -> None:
        from pyarrow.fs import LocalFileSystem
        from ray.train import CheckpointUploadMode

        self._reported_step = trainer.global_step  # a step that float16 skips afterwards does not report again
        metrics, storage = _collect_metrics(trainer), self._storage
        is_main, world = trainer.is_global_zero, trainer.accelerator.world
        name = world.broadcast(self._choose_name(trainer) if is_main else "")
        if self._shared_root is not None:
            trainer.save_checkpoint(f"{self._shared_root}/{name}/{self.CHECKPOINT_NAME}")
            place = (storage.build_checkpoint_path_from_name(name), storage.storage_filesystem)
            self._hand_over(metrics, place, name, CheckpointUploadMode.NO_UPLOAD)
            return
        # In the folder of Ray's session, because a worker that is killed here may leave files behind.
        session = storage.local_working_directory
        folder = world.broadcast(tempfile.mkdtemp(prefix="treadle-", dir=session) if is_main else "")
        try:
            trainer.save_checkpoint(os.path.join(folder, self.CHECKPOINT_NAME))
            self._hand_over(metrics, (folder, LocalFileSystem()) if is_main else None, name, CheckpointUploadMode.SYNC)
        finally:
            if is_main:
                shutil.rmtree(folder, ignore_errors=True)

    def _hand_over(
        self, metrics: dict[str, float], place: tuple[str, FileSystem] | None, name: str, mode: CheckpointUploadMode
    ) -> None:
        """Report metrics and a checkpoint.

        ``place`` is the checkpoint's path and file system, or None if this process reports no checkpoint.

        Ray waits for the reports of all ranks.
        """
        import ray.train

        checkpoint = None if place is None else ray.train.Checkpoint(*place)
        ray.train.report(metrics, checkpoint, checkpoint_dir_name=name, checkpoint_upload_mode=mode)

    def _choose_name(self, trainer: Trainer) -> str:
        from pyarrow.fs import FileType

        storage = self._storage
        name, version = f"{_PREFIX}{trainer.global_step:08d}", 1
        while (
            storage.storage_filesystem.get_file_info(storage.build_checkpoint_path_from_name(name)).type
            is not FileType.NotFound
        ):
            name, version = f"{_PREFIX}{trainer.global_step:08d}-v{version}", version + 1
        return name


def _get_storage() -> Any:
    import ray.train

    try:
        return ray.train.get_context().get_storage()
    except NotImplementedError as error:
        raise RuntimeError(
            "RayTrainReportCallback needs Ray's storage, which num_workers=0 disables. Set num_workers=1 in "
            "the ScalingConfig."
        ) from error
    except (RuntimeError, DeprecationWarning) as error:  # DeprecationWarning in a trial of Ray Tune
        raise RuntimeError(
            "RayTrainReportCallback was created outside of a Ray Train worker. Create it in the function passed "
            "to ray.train.torch.TorchTrainer as train_loop_per_worker. In a Ray Tune trial, use "
            "TuneReportCheckpointCallback."
        ) from error


def _remove_unreported(storage: Any) -> None:
    """Remove the checkpoints in Ray's storage that earlier workers saved but did not report."""
    import ray.train
    from pyarrow.fs import FileSelector
    from ray.train import CheckpointConsistencyMode

    known = ray.train.get_all_reported_checkpoints(consistency_mode=CheckpointConsistencyMode.COMMITTED)
    reported = {os.path.basename(entry.checkpoint.path) for entry in known}
    for entry in storage.storage_filesystem.get_file_info(FileSelector(storage.experiment_fs_path)):
        if entry.base_name.startswith(_PREFIX) and entry.base_name not in reported:
            storage.storage_filesystem.delete_dir(entry.path)


class TuneReportCheckpointCallback(_ReportedCheckpoint):
    """Callback that reports metrics and a checkpoint to Ray Tune, by default after each validation.

    Use it in a function that ``ray.tune.Tuner`` runs as a trial. Tune's scheduler receives each report and may stop the
    trial. Population-based training continues a trial from the checkpoint of another trial. ``trainer.fit(...,
    ckpt_path="auto", schedule="script")`` then resumes from that checkpoint with the learning rate of the new
    configuration.

    Reports for ``"validation_end"`` and ``"train_batch_end"`` are made at the end of the optimizer step. For the
    last step of an epoch, they are made at the end of the epoch instead. Training can therefore resume exactly from
    their checkpoints.

    Args:
        metrics: Name or names of the logged values to report, or a dict that maps reported names to logged names.
            Default: all logged values, plus ``epoch`` and ``step``.
        filename: Name of Treadle's checkpoint inside Ray's checkpoint. Default: ``"checkpoint"``.
        save_checkpoints: Whether each report includes a checkpoint. Default: True.
        on: Events that trigger a report: one or more of ``"validation_end"`` (default), ``"train_epoch_end"``,
            ``"train_batch_end"`` (each optimizer step) and ``"train_end"``.

    Raises:
        ModuleNotFoundError: If Ray or pyarrow is not installed.
        ValueError, TypeError: If an argument is invalid.
        RuntimeError: When a stage begins, if the process does not run a Ray Tune trial.


    Examples:
        >>> from treadle.integrations import TuneReportCheckpointCallback
        >>> report = TuneReportCheckpointCallback({"loss": "val_loss"}, on="train_epoch_end")
        >>> report.state_key
        "TuneReportCheckpointCallback(filename='checkpoint', on=['train_epoch_end'])"
        >>> def trial(config):
        ...     trainer = Trainer(max_epochs=10, callbacks=[report])
        ...     trainer.fit(Task(config["lr"]), loader, val_loader)
        >>> tune.Tuner(trial, param_space={"lr": tune.loguniform(1e-4, 1e-1)}).fit()  # doctest: +SKIP

        The last line is skipped because it starts a Ray cluster.
    """

    def __init__(
        self,
        metrics: str | Sequence[str] | Mapping[str, str] | None = None,
        filename: str = "checkpoint",
        save_checkpoints: bool = True,
        on: str | Sequence[str] = "validation_end",
    ) -> None:
        require("TuneReportCheckpointCallback", "ray", "pyarrow", extra="ray")
        super().__init__(check_text("filename", filename))
        names = [metrics] if isinstance(metrics, str) else metrics or ()
        self._metrics = dict(names) if isinstance(names, Mapping) else {name: name for name in names}
        self._saves = check_bool("save_checkpoints", save_checkpoints)
        self._on = {on} if isinstance(on, str) else set(on)
        for moment in sorted(self._on - set(_MOMENTS)):
            known = ", ".join(map(repr, _MOMENTS))
            raise ValueError(f"on={moment!r} must be one of {known}.{nearest(moment, _MOMENTS)}")
        self._due = False

    @property
    def state_key(self) -> str:
        """See `Callback.state_key`."""
        return f"TuneReportCheckpointCallback(filename={self._filename!r}, on={sorted(self._on)})"

    def setup(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """Check that this process runs a Ray Tune trial."""
        from ray.tune import get_context

        if get_context().get_trial_id() is None:
            raise RuntimeError(
                "TuneReportCheckpointCallback was used outside of a Ray Tune trial. Call fit in the function "
                "passed to ray.tune.Tuner. In a Ray Train worker, use RayTrainReportCallback."
            )
        self._due = False

    def on_validation_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Request a report if ``on`` contains ``"validation_end"``."""
        if trainer.stage == "fit" and not trainer.sanity_checking:
            self._due |= "validation_end" in self._on

    def on_step_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Report if ``on`` contains ``"train_batch_end"`` or a report is pending, except after an epoch's last step."""
        self._due |= "train_batch_end" in self._on
        if not trainer.progress.epoch_is_trained:
            self._report_if_due(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Report if ``on`` contains ``"train_epoch_end"``, or if an earlier report is pending."""
        self._due |= "train_epoch_end" in self._on
        self._report_if_due(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Report if ``on`` contains ``"train_end"``, or if an earlier report is pending."""
        self._due |= "train_end" in self._on
        self._report_if_due(trainer)

    def _get_checkpoint(self) -> ray.tune.Checkpoint | None:
        from ray.tune import get_checkpoint

        return get_checkpoint()

    def _report_if_due(self, trainer: Trainer) -> None:
        from ray.tune import Checkpoint, report

        metrics = self._select(_collect_metrics(trainer)) if self._due else {}
        self._due = False
        if not metrics:
            return
        # Ray copies the checkpoint into its storage before it registers it.
        with tempfile.TemporaryDirectory(prefix="treadle-ray-") if self._saves else nullcontext("") as folder:
            if self._saves:
                trainer.save_checkpoint(os.path.join(folder, self._filename))
            report(metrics, checkpoint=Checkpoint.from_directory(folder) if self._saves else None)

    def _select(self, values: dict[str, float]) -> dict[str, float]:
        if not self._metrics:
            return values
        for name in sorted(set(self._metrics.values()) - set(values)):
            warn(f"{name!r} is not reported, because it has not been logged yet.{nearest(name, values)}")
        return {name: values[logged] for name, logged in self._metrics.items() if logged in values}
