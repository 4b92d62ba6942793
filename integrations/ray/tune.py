"""`TuneReportCheckpointCallback`, which reports metrics and checkpoints to Ray Tune."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from ...common.messages import nearest, warn
from ...common.optional import require
from ...common.validation import check_bool, check_text
from .reported import ReportedCheckpoint, collect_metrics

if TYPE_CHECKING:
    from ray.tune import Checkpoint

    from ...trainer import TaskModule, Trainer

_MOMENTS = ("validation_end", "train_epoch_end", "train_batch_end", "train_end")


class TuneReportCheckpointCallback(ReportedCheckpoint):
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


    Example:
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

    def _get_checkpoint(self) -> Checkpoint | None:
        from ray.tune import get_checkpoint

        return get_checkpoint()

    def _report_if_due(self, trainer: Trainer) -> None:
        from ray.tune import Checkpoint, report

        metrics = self._select(collect_metrics(trainer)) if self._due else {}
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
