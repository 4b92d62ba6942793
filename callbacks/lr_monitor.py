"""Log the learning rate beside the losses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..strategies import choose
from .callback import Callback

if TYPE_CHECKING:
    from ..trainer import TaskModule, Trainer


class LearningRateMonitor(Callback):
    """Send each optimizer's learning rate to the loggers.

    Args:
        logging_interval: ``"step"`` (every ``log_every_n_steps``), ``"epoch"``, or None for each scheduler's own.
        log_momentum: momentum (or beta1) too.
        log_weight_decay: weight decay too.

    Raises:
        ValueError: in ``fit``, where there is no logger to send it to.
    """

    def __init__(
        self, logging_interval: str | None = None, log_momentum: bool = False, log_weight_decay: bool = False
    ) -> None:
        if logging_interval is not None:
            choose("logging_interval", logging_interval, ("step", "epoch"))
        self.logging_interval = logging_interval
        self.log_momentum = log_momentum
        self.log_weight_decay = log_weight_decay
        self.lrs: dict[str, list[float]] = {}

    def on_train_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Begin anew."""
        if not trainer.loggers:
            raise ValueError("LearningRateMonitor has no logger to write to: drop it, or Trainer(logger=False).")
        self.lrs = {}

    def on_step_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Log where it is due."""
        every = trainer.log_every_n_steps
        if self.logging_interval != "epoch" and every and trainer.progress.step % every == 0:
            self._log(trainer, "step")

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Log where it is due."""
        if self.logging_interval != "step":
            self._log(trainer, "epoch")

    def _log(self, trainer: Trainer, interval: str) -> None:
        row: dict[str, float] = {}
        for number, optimizer in enumerate(trainer.optimizers):
            configs = [c for c in trainer.lr_scheduler_configs if getattr(c.scheduler, "optimizer", None) is optimizer]
            own = configs[0].interval if configs else "step"
            if self.logging_interval is None and own != interval:
                continue
            name = (configs[0].name if configs else None) or f"lr-{type(optimizer).__name__}"
            name += f"-{number}" if len(trainer.optimizers) > 1 else ""
            groups = optimizer.param_groups
            for index, group in enumerate(groups):
                suffix = f"/pg{index + 1}" if len(groups) > 1 else ""
                row[f"{name}{suffix}"] = float(group["lr"])
                if self.log_momentum:
                    row[f"{name}{suffix}-momentum"] = float(group.get("momentum", group.get("betas", (0.0,))[0]))
                if self.log_weight_decay:
                    row[f"{name}{suffix}-weight_decay"] = float(group.get("weight_decay", 0.0))
        for key, value in row.items():
            self.lrs.setdefault(key, []).append(value)
        if row:
            trainer.logbook.write_row(row, trainer.progress.step, trainer.progress.epoch)
