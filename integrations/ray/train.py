"""`RayTrainReportCallback`, which reports metrics and checkpoints to Ray Train."""

from __future__ import annotations

import os
import shutil
import tempfile
from typing import TYPE_CHECKING, Any

from ...common.optional import is_installed, require
from ...common.validation import check_int
from .reported import ReportedCheckpoint, collect_metrics

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem
    from ray.train import Checkpoint, CheckpointUploadMode

    from ...trainer import TaskModule, Trainer

_PREFIX = "checkpoint_step="
# Scheme of Treadle's URLs and the package that writes there, by pyarrow's name of a storage.
_WRITABLE = {"local": ("", "pyarrow"), "s3": ("s3://", "s3fs"), "gcs": ("gs://", "gcsfs")}


class RayTrainReportCallback(ReportedCheckpoint):
    """Callback that reports metrics and a checkpoint to Ray Train at the end of each training epoch.

    Create it in the function that ``ray.train.torch.TorchTrainer`` runs on each worker. If Ray restarts failed workers
    (see its ``FailureConfig``), ``trainer.fit(..., ckpt_path="auto")`` resumes from the last reported checkpoint. Ray's
    ``CheckpointConfig`` decides which checkpoints are kept. Ray's checkpoint contains Treadle's checkpoint as
    ``checkpoint.ckpt``.

    By default, all ranks write their shards directly to Ray's storage if it is a shared file system, S3 (with the extra
    ``s3``) or Google Cloud Storage (with the extra ``gs``). A checkpoint is reported once it is complete.

    Args:
        checkpoint_upload_mode: A ``ray.train.CheckpointUploadMode``. With SYNC or ASYNC, Treadle saves the checkpoint
            to a temporary folder, and Ray copies it to the storage. All workers must then be on one machine. Default:
            None, which writes directly to the storage types listed above and selects SYNC for any other storage.
        validation: True or a ``ray.train.ValidationTaskConfig`` lets Ray validate each checkpoint; see
            ``ray.train.report``. Default: False.
        every_n_train_steps: Number of optimizer steps between additional reports within an epoch. Default: None, which
            disables them.

    Raises:
        ModuleNotFoundError: If Ray or pyarrow is not installed.
        RuntimeError: If the process is not a Ray Train worker, or if ``num_workers=0`` disables Ray's storage.
        ValueError: If ``every_n_train_steps`` is not a positive integer, or if ``checkpoint_upload_mode`` is NO_UPLOAD
            and Treadle cannot write to the storage.

    Example:
        >>> from treadle.integrations import RayTrainReportCallback
        >>> def train_function():
        ...     trainer = Trainer(max_epochs=10, callbacks=[RayTrainReportCallback()])
        ...     trainer.fit(task, loader, ckpt_path="auto")
        >>> TorchTrainer(train_function, scaling_config=ScalingConfig(num_workers=2)).fit()  # doctest: +SKIP

        The last line is skipped because it starts a Ray cluster.
    """

    CHECKPOINT_NAME = "checkpoint.ckpt"

    def __init__(
        self,
        checkpoint_upload_mode: Any = None,
        validation: Any = False,
        *,
        every_n_train_steps: int | None = None,
    ) -> None:
        require("RayTrainReportCallback", "ray", "pyarrow", extra="ray")
        super().__init__(self.CHECKPOINT_NAME)
        self.checkpoint_upload_mode = checkpoint_upload_mode
        self.validation = validation
        self.every_n_train_steps = (
            0 if every_n_train_steps is None else check_int("every_n_train_steps", every_n_train_steps, 1)
        )
        self._storage = _get_storage()
        self._reported_step = 0
        if getattr(checkpoint_upload_mode, "name", None) == "NO_UPLOAD" and self._shared_root is None:
            kind = self._storage.storage_filesystem.type_name
            package = _WRITABLE.get(kind, ("", ""))[1]
            problem, fix = (
                (f" without {package}", f"Install {package}") if package else ("", "Remove checkpoint_upload_mode")
            )
            raise ValueError(
                "checkpoint_upload_mode=NO_UPLOAD writes directly to Ray's storage, but Treadle cannot write to "
                f"{kind!r}{problem}. {fix}."
            )

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
        from ray.train import CheckpointUploadMode

        scheme, package = _WRITABLE.get(self._storage.storage_filesystem.type_name, ("", ""))
        if self.checkpoint_upload_mode not in (None, CheckpointUploadMode.NO_UPLOAD) or not is_installed(package):
            return None
        return f"{scheme}{self._storage.experiment_fs_path}"

    def _get_checkpoint(self) -> Checkpoint | None:
        import ray.train

        return ray.train.get_checkpoint()

    def _report(self, trainer: Trainer) -> None:
        from pyarrow.fs import LocalFileSystem
        from ray.train import CheckpointUploadMode

        self._reported_step = trainer.global_step  # a step that float16 skips afterwards does not report again
        metrics, storage = collect_metrics(trainer), self._storage
        is_main, world = trainer.is_global_zero, trainer.accelerator.world
        name = world.broadcast(self._choose_name(trainer) if is_main else "")
        if self._shared_root is not None:
            trainer.save_checkpoint(f"{self._shared_root}/{name}/{self.CHECKPOINT_NAME}")
            place = (storage.build_checkpoint_path_from_name(name), storage.storage_filesystem)
            self._hand_over(metrics, place, name, CheckpointUploadMode.NO_UPLOAD)
            return
        mode = self.checkpoint_upload_mode or CheckpointUploadMode.SYNC
        # In the folder of Ray's session, because a worker that is killed here may leave files behind.
        session = storage.local_working_directory
        folder = world.broadcast(tempfile.mkdtemp(prefix="treadle-", dir=session) if is_main else "")
        try:
            trainer.save_checkpoint(os.path.join(folder, self.CHECKPOINT_NAME))
            self._hand_over(metrics, (folder, LocalFileSystem()) if is_main else None, name, mode)
        finally:
            if is_main and mode is not CheckpointUploadMode.ASYNC:  # in that mode Ray removes it
                shutil.rmtree(folder, ignore_errors=True)

    def _hand_over(
        self, metrics: dict[str, float], place: tuple[str, FileSystem] | None, name: str, mode: CheckpointUploadMode
    ) -> None:
        """Report metrics and a checkpoint.

        ``place`` is the checkpoint's path and file system, or None if this process reports no checkpoint.

        Ray waits for the reports of all ranks.
        """
        import ray.train

        ray.train.report(
            metrics,
            checkpoint=None if place is None else ray.train.Checkpoint(*place),
            checkpoint_dir_name=name,
            checkpoint_upload_mode=mode,
            validation=self.validation if place is not None else False,
        )

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
