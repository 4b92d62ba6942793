"""Log the learning rate beside the losses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from ..strategies import choose
from .callback import Callback

if TYPE_CHECKING:
    from ..trainer import TaskModule, Trainer


class LearningRateMonitor(Callback):
    """Send each optimizer's learning rate to the loggers: the one a step was, or an epoch is, taken with.

    The name is the scheduler's ``name``, or ``lr-`` and the optimizer's class; a second optimizer of that name gets
    ``-1``, and parameter groups ``/pg1``, ``/pg2`` or their own ``"name"``.

    Args:
        logging_interval: ``"step"`` (every ``log_every_n_steps``), ``"epoch"``, or None for each scheduler's own;
            without one, ``"step"``.
        log_momentum: momentum (or beta1) too, as ``...-momentum``.
        log_weight_decay: weight decay too, as ``...-weight_decay``.

    Attributes:
        lrs: the learning rates that were logged, by name.

    Raises:
        ValueError: for another interval; in ``fit``, where there is no logger to send it to.
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
        self._rates: dict[str, float] = {}
        self._others: dict[str, float] = {}

    def on_train_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Begin anew."""
        if not trainer.loggers:
            raise ValueError("LearningRateMonitor has no logger to write to: drop it, or drop Trainer(logger=False).")
        self.lrs, self._rates = {}, {}

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Log what is logged by epoch."""
        if self.logging_interval != "step" and not trainer.progress.batch:  # an epoch that is resumed has been logged
            self._read(trainer, "epoch")
            self._write(trainer)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: TaskModule, optimizer: Optimizer) -> None:
        """Read what this step is taken with: schedulers may change it before the step is over."""
        every = trainer.log_every_n_steps
        if self.logging_interval != "epoch" and every and (trainer.progress.step + 1) % every == 0:
            self._read(trainer, "step")

    def on_step_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Log it, unless the step did not happen."""
        if self._rates:
            if trainer.progress.step % trainer.log_every_n_steps == 0:
                self._write(trainer)
            self._rates = {}

    def _read(self, trainer: Trainer, interval: str) -> None:
        self._rates, self._others = {}, {}
        for optimizer, name in self._named(trainer, interval):
            groups: list[dict[str, Any]] = optimizer.param_groups
            for number, group in enumerate(groups, start=1):
                label = f"{name}/{group.get('name', f'pg{number}')}" if len(groups) > 1 else name
                self._rates[label] = float(group["lr"])
                if self.log_momentum:
                    self._others[f"{label}-momentum"] = float(group.get("momentum", group.get("betas", (0.0,))[0]))
                if self.log_weight_decay:
                    self._others[f"{label}-weight_decay"] = float(group.get("weight_decay", 0.0))

    def _named(self, trainer: Trainer, interval: str) -> Iterator[tuple[Optimizer, str]]:
        """The optimizers that are logged at this interval, with their names."""
        taken: dict[str, int] = {}
        for optimizer in trainer.optimizers:
            own = [c for c in trainer.lr_scheduler_configs if getattr(c.scheduler, "optimizer", None) is optimizer]
            name = next((config.name for config in own if config.name), f"lr-{type(optimizer).__name__}")
            number = taken[name] = taken.get(name, -1) + 1
            due = {config.interval for config in own} or {"step"}
            if self.logging_interval is not None or interval in due:
                yield optimizer, f"{name}-{number}" if number else name

    def _write(self, trainer: Trainer) -> None:
        if not self._rates:
            return
        for name, value in self._rates.items():
            self.lrs.setdefault(name, []).append(value)
        row = {**self._rates, **self._others}
        self._rates = {}
        # In callback_metrics too, so that a checkpoint's name can hold it.
        trainer.logbook.callback_values.update(row)
        trainer.logbook.write_row(row, trainer.progress.step, trainer.progress.epoch)
