"""`LearningRateMonitor`: logs the learning rates of the optimizers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from ..common.messages import warn
from ..common.validation import check_bool, choose
from .best_effort import BestEffortCallback

if TYPE_CHECKING:
    from ..trainer import TaskModule, Trainer


class LearningRateMonitor(BestEffortCallback):
    """Callback that logs the learning rates of each optimizer, per step or per epoch.

    The rate of a step is the one that the optimizer used in the step. The rate of an epoch is the one at its start.
    Each rate is logged under the ``"name"`` in the scheduler's configuration. The default name is ``lr-`` followed by
    the name of the optimizer's class, such as ``lr-Adam``. If a name occurs again, a number is appended, as in
    ``lr-Adam-1``. Parameter groups are distinguished by their ``"name"`` or number, as in ``lr-Adam/pg1``.

    Args:
        logging_interval: ``"step"`` (every ``log_every_n_steps`` steps), ``"epoch"`` or None. None uses the interval of
            each scheduler, or both for an optimizer without a scheduler. Default: None.
        log_momentum: Also log the momentum (or beta1), as ``...-momentum``. For optimizers without either, 0 is logged.
            Default: False.
        log_weight_decay: Also log the weight decay, as ``...-weight_decay``. For optimizers without it, 0 is logged.
            Default: False.

    Attributes:
        lrs: Learning rates logged in the latest ``fit``: for each name, a list in the order of logging.
        last_momentum_values: The latest logged momenta by name.
        last_weight_decay_values: The latest logged weight decays by name.

    Raises:
        ValueError, TypeError: If an argument is invalid.
        ValueError: In ``fit``, if the rates cannot be logged, for example because there is no logger.

    Examples:
        >>> import tempfile
        >>> import treadle as tl
        >>> from treadle.callbacks import LearningRateMonitor
        >>> from treadle.compat.demos.boring_classes import BoringModel
        >>> from treadle.loggers import CSVLogger
        >>> monitor = LearningRateMonitor(logging_interval="step")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     trainer = tl.Trainer(
        ...         max_steps=2,
        ...         accelerator="cpu",
        ...         devices=1,
        ...         logger=CSVLogger(folder),
        ...         log_every_n_steps=1,
        ...         callbacks=monitor,
        ...         enable_checkpointing=False,
        ...         enable_progress_bar=False,
        ...     )
        ...     trainer.fit(BoringModel())
        >>> monitor.lrs
        {'lr-SGD': [0.1, 0.1]}
    """

    def __init__(
        self, logging_interval: str | None = None, log_momentum: bool = False, log_weight_decay: bool = False
    ) -> None:
        if logging_interval is not None:
            choose("logging_interval", logging_interval, ("step", "epoch"))
        self.logging_interval = logging_interval
        self.log_momentum = check_bool("log_momentum", log_momentum)
        self.log_weight_decay = check_bool("log_weight_decay", log_weight_decay)
        self.lrs: dict[str, list[float]] = {}
        self.last_momentum_values: dict[str, float] = {}
        self.last_weight_decay_values: dict[str, float] = {}
        self._rates: dict[str, float] = {}
        self._options: dict[str, float] = {}
        self._written = 0  # optimizer step whose rates were logged last

    def on_train_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Discard the rates of an earlier run."""
        if not trainer.loggers:
            raise ValueError(
                "LearningRateMonitor needs a logger, but the Trainer has none. Set Trainer(logger=True), or remove the "
                "callback."
            )
        no_step = self.logging_interval != "epoch" and not trainer.log_every_n_steps
        if no_step and (names := [name for _, name in self._find_optimizers(trainer, "step")]):
            raise ValueError(
                f"log_every_n_steps=0 does not work with LearningRateMonitor, which logs {', '.join(names)} at that "
                "interval. Set log_every_n_steps to at least 1, or use LearningRateMonitor(logging_interval='epoch')."
            )
        for optimizer in trainer.optimizers:
            _check_names(optimizer)
        without = [o for o in trainer.optimizers if not {"momentum", "betas"} & o.defaults.keys()]
        if self.log_momentum and without:
            warn(f"log_momentum=True, but {type(without[0]).__name__} has no momentum, so 0 is logged.")
        self.lrs, self._rates = {}, {}
        self._written = trainer.progress.step

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Log the learning rates whose interval is ``"epoch"``."""
        if self.logging_interval != "step" and not trainer.progress.batch:  # a resumed epoch was logged before
            self._safely(self._read_and_write, trainer)

    def _read_and_write(self, trainer: Trainer) -> None:
        self._read(trainer, "epoch")
        self._write(trainer)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: TaskModule, optimizer: Optimizer) -> None:
        """Record the rates if they are due, before a scheduler can change them."""
        interval = trainer.log_every_n_steps
        if self.logging_interval != "epoch" and interval and (trainer.progress.step + 1) % interval == 0:
            self._safely(self._read_step, trainer, optimizer if self._rates else None)

    def _read_step(self, trainer: Trainer, only: Optimizer | None) -> None:
        self._read(trainer, "step", only)
        # Before the row is written, so that `on_train_batch_end` and a validation find the rates of this step.
        trainer.logbook.callback_values.update(self._rates | self._options)

    def on_step_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Log the rates of the step if they are due."""
        if self._rates:
            step = trainer.progress.step
            # After a step that float16 skipped, this is still the number of the previous step.
            if step % trainer.log_every_n_steps == 0 and step != self._written:
                self._written = step
                self._safely(self._write, trainer)
            self._rates, self._options = {}, {}

    def _read(self, trainer: Trainer, interval: str, only: Optimizer | None = None) -> None:
        for optimizer, name in self._find_optimizers(trainer, interval):
            if only is not None and optimizer is not only:
                continue
            for label, group in _label_groups(name, optimizer):
                if "lr" not in group:
                    continue
                self._rates[label] = float(group["lr"])
                if self.log_momentum:
                    self._options[f"{label}-momentum"] = float(group.get("momentum", group.get("betas", (0.0,))[0]))
                if self.log_weight_decay:
                    self._options[f"{label}-weight_decay"] = float(group.get("weight_decay", 0.0))

    def _find_optimizers(self, trainer: Trainer, interval: str) -> Iterator[tuple[Optimizer, str]]:
        for optimizer, name, due in name_optimizers(trainer):
            if self.logging_interval is not None or due in (interval, "any"):
                yield optimizer, name

    def _extract_stats(self, trainer: Trainer, interval: str) -> dict[str, float]:
        """Return the values to log at an interval, by name. The interval ``"any"`` means both step and epoch."""
        rates, options = self._rates, self._options
        self._rates, self._options = {}, {}
        try:
            for due in ("step", "epoch") if interval == "any" else (interval,):
                self._read(trainer, due)
            return self._rates | self._options
        finally:
            self._rates, self._options = rates, options

    def _write(self, trainer: Trainer) -> None:
        if not self._rates:
            return
        for name, value in self._rates.items():
            only_name, _, group = name.rpartition("/")
            if group == "pg1" and only_name in self.lrs and only_name not in self._rates:
                self.lrs[name] = self.lrs.pop(only_name)  # it was the only group before others were added
            self.lrs.setdefault(name, []).append(value)
        for ending, newest in (
            ("-momentum", self.last_momentum_values),
            ("-weight_decay", self.last_weight_decay_values),
        ):
            newest.update({name: value for name, value in self._options.items() if name.endswith(ending)})
        row = {**self._rates, **self._options}
        self._rates, self._options = {}, {}
        # Also in callback_metrics, so that a checkpoint's name can contain it.
        trainer.logbook.callback_values.update(row)
        trainer.logbook.write_row(row, trainer.progress.step, trainer.progress.epoch)


def name_optimizers(trainer: Trainer) -> Iterator[tuple[Optimizer, str, str]]:
    """Yield the optimizer of each scheduler, and then the optimizers without a scheduler.

    Args:
        trainer: The Trainer.

    Yields:
        The optimizer, a unique name, and the interval of its scheduler (``"any"`` without a scheduler).
    """
    optimizers = trainer.optimizers
    name_counts: Counter[str] = Counter()
    scheduled = []
    for config in trainer.lr_scheduler_configs:
        optimizer = getattr(config.scheduler, "optimizer", None)
        if optimizer is None and len(optimizers) == 1:  # a user-defined scheduler
            optimizer = optimizers[0]
        if isinstance(optimizer, Optimizer):
            scheduled.append((optimizer, config.name, config.interval))
    scheduled_ids = {id(optimizer) for optimizer, _, _ in scheduled}
    unscheduled = [(optimizer, None, "any") for optimizer in optimizers if id(optimizer) not in scheduled_ids]
    for optimizer, config_name, due in [*scheduled, *unscheduled]:
        name = config_name or f"lr-{type(optimizer).__name__}"
        number = name_counts[name]
        name_counts[name] += 1
        yield optimizer, f"{name}-{number}" if number else name, due


def read_learning_rates(trainer: Trainer) -> dict[str, float]:
    """Return the current learning rate of each parameter group, under the names that `LearningRateMonitor` uses.

    Args:
        trainer: The Trainer.
    """
    return {
        label: float(group["lr"])
        for optimizer, name, _ in name_optimizers(trainer)
        for label, group in _label_groups(name, optimizer)
        if "lr" in group
    }


def _label_groups(name: str, optimizer: Optimizer) -> Iterator[tuple[str, dict[str, Any]]]:
    groups: list[dict[str, Any]] = optimizer.param_groups
    for number, group in enumerate(groups, start=1):
        group_name = group.get("name", f"pg{number}" if len(groups) > 1 else None)
        yield f"{name}/{group_name}" if group_name else name, group


def _check_names(optimizer: Optimizer) -> None:
    names = Counter(label for label, _ in _label_groups("", optimizer))
    if duplicate_names := [label.lstrip("/") for label, count in names.items() if count > 1]:
        raise ValueError(
            f"{type(optimizer).__name__} has several parameter groups with the name {duplicate_names[0]!r}, but "
            "LearningRateMonitor needs unique names. Rename all but one."
        )
