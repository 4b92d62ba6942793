"""Save while training: the best, the last, every so often."""

from __future__ import annotations

import re
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..engine import checkpoint
from ..strategies import announce, choose
from .callback import Callback
from .monitor import MODES, better, monitored_value

if TYPE_CHECKING:
    from ..trainer import TaskModule, Trainer


class ModelCheckpoint(Callback):
    """Save checkpoints between optimizer steps and keep the ones worth keeping.

    A checkpoint is a directory, put in place in one move once it is complete; an older one is removed only after that.

    Args:
        dirpath: where to; by default ``checkpoints`` in the first logger's directory, else in ``default_root_dir``.
        filename: a template such as ``"{epoch}-{val_loss:.2f}"``; by default ``"{epoch}-{step}"``.
        monitor: the logged value that says which is best; without one the newest is.
        verbose: say what was saved.
        save_last: keep a ``last.ckpt`` too, the newest of all.
        save_top_k: how many of the best to keep; -1 keeps all, 0 none.
        save_weights_only: leave out what only resuming needs.
        mode: ``"min"`` or ``"max"``.
        auto_insert_metric_name: write ``name=value`` into file names.
        every_n_train_steps: save every so many optimizer steps.
        train_time_interval: save after so much time.
        every_n_epochs: save every so many epochs; the default, with 1, where no other trigger is given.
        save_on_train_epoch_end: save when an epoch ends rather than after its validation; by default where there is
            no validation, or several in an epoch.
        enable_version_counter: add ``-v1`` where a name is taken; else overwrite.

    Attributes:
        best_model_path: the best checkpoint, or "".
        best_model_score: its value, or None.
        last_model_path: the newest ``last.ckpt``, or "".
        best_k_models: value by path of all that are kept.
        current_score: the value of the newest.

    Raises:
        ValueError: for triggers that exclude each other.
    """

    after_task = 2
    CHECKPOINT_NAME_LAST = "last"
    FILE_EXTENSION = ".ckpt"

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | None = None,
        save_top_k: int = 1,
        save_weights_only: bool = False,
        mode: str = "min",
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: timedelta | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        enable_version_counter: bool = True,
    ) -> None:
        triggers = {
            "every_n_train_steps": every_n_train_steps,
            "train_time_interval": train_time_interval,
            "every_n_epochs": every_n_epochs,
        }
        given = [name for name, value in triggers.items() if value]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other; use one ModelCheckpoint for each.")
        if save_top_k < -1:
            raise ValueError(f"save_top_k={save_top_k} must be at least -1, which keeps all.")
        if monitor is None and save_top_k not in (-1, 0, 1):
            raise ValueError(f"save_top_k={save_top_k} needs a monitor to tell the best {save_top_k} by.")
        self.dirpath = None if dirpath is None else str(Path(dirpath).absolute())
        self.filename = filename
        self.monitor = monitor
        self.verbose = verbose
        self.save_last = save_last
        self.save_top_k = save_top_k
        self.save_weights_only = save_weights_only
        self.mode = choose("mode", mode, MODES)
        self.auto_insert_metric_name = auto_insert_metric_name
        self.every_n_train_steps = every_n_train_steps or 0
        self.train_time_interval = train_time_interval
        self.every_n_epochs = every_n_epochs or (0 if given else 1)
        self.save_on_train_epoch_end = save_on_train_epoch_end
        self.enable_version_counter = enable_version_counter
        self.best_model_path = ""
        self.best_model_score: float | None = None
        self.last_model_path = ""
        self.best_k_models: dict[str, float | None] = {}
        self.current_score: float | None = None
        self._saved_step = -1
        self._saved_at = 0.0

    @property
    def state_key(self) -> str:
        """See `Callback.state_key`."""
        return (
            f"ModelCheckpoint(monitor={self.monitor!r}, mode={self.mode!r}, "
            f"every_n_train_steps={self.every_n_train_steps}, every_n_epochs={self.every_n_epochs})"
        )

    def state_dict(self) -> dict[str, Any]:
        """See `Callback.state_dict`."""
        return {
            "dirpath": self.dirpath,
            "best_model_path": self.best_model_path,
            "best_model_score": self.best_model_score,
            "last_model_path": self.last_model_path,
            "best_k_models": self.best_k_models,
            "current_score": self.current_score,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `Callback.load_state_dict`. What another directory holds is not ours to remove: then only the best stays known."""
        names = ["best_model_path", "best_model_score"]
        if self.dirpath == state_dict["dirpath"]:
            names += ["last_model_path", "best_k_models", "current_score"]
        for name in names:
            setattr(self, name, state_dict[name])

    # -- when ----------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """Find the directory, the same on every process."""
        if stage == "fit" and self.dirpath is None:
            root = trainer.logbook.agree_on_directory(trainer.default_root_dir)
            self.dirpath = str(Path(root, "checkpoints").absolute())

    def on_train_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Look at what is there already; begin to count time."""
        self._saved_at = time.monotonic()
        self._saved_step = trainer.global_step
        if trainer.is_global_zero and self.save_top_k != 0:
            checkpoint.CheckpointStore(self._directory).recover()

    def on_step_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Save if so many steps, or so much time, have gone by."""
        step = trainer.progress.step
        if self.every_n_train_steps:
            if step % self.every_n_train_steps == 0 and step != self._saved_step:
                self._save(trainer)
        elif self.train_time_interval is not None and step != self._saved_step:
            due = time.monotonic() - self._saved_at >= self.train_time_interval.total_seconds()
            if trainer.accelerator.world.any(due):  # clocks differ; the processes must save the same step
                self._save(trainer)
                self._saved_at = time.monotonic()

    def on_validation_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Save if that happens after validation."""
        if trainer.training and not self._at_epoch_end(trainer):
            self._save_by_epoch(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Save if that happens when epochs end."""
        if self._at_epoch_end(trainer):
            self._save_by_epoch(trainer)

    def _at_epoch_end(self, trainer: Trainer) -> bool:
        if self.save_on_train_epoch_end is not None:
            return self.save_on_train_epoch_end
        # With one validation per epoch its value is known when the epoch ends, and the checkpoint is a whole epoch's.
        once = trainer.val_check_interval == 1.0 and trainer.check_val_every_n_epoch == 1
        return once or not trainer.has_validation

    def _save_by_epoch(self, trainer: Trainer) -> None:
        if self.every_n_epochs and (trainer.current_epoch + 1) % self.every_n_epochs == 0:
            self._save(trainer)

    # -- what ----------------------------------------------------------------------------------------------------

    @property
    def _directory(self) -> Path:
        if self.dirpath is None:
            raise ValueError("ModelCheckpoint has no directory yet: that is found when fit begins.")
        return Path(self.dirpath)

    def _save(self, trainer: Trainer) -> None:
        if trainer.sanity_checking or (self.save_top_k == 0 and not self.save_last):
            return
        self._saved_step = trainer.progress.step
        value = None
        if self.monitor is not None:
            value = monitored_value(trainer, self.monitor, "ModelCheckpoint(monitor")
        self.current_score = value
        if self.save_top_k:
            self._save_best(trainer, value)
        if self.save_last:
            path = self._directory / f"{self.CHECKPOINT_NAME_LAST}{self.FILE_EXTENSION}"
            self.last_model_path = str(path)
            trainer.save_checkpoint(path, self.save_weights_only)

    def _save_best(self, trainer: Trainer, value: float | None) -> None:
        worst = self._worst()
        if worst is not None and self.monitor is not None:
            assert value is not None
            if not better(value, self.best_k_models[worst], self.mode):
                return
        path = self._free_name(trainer, worst)
        kept = dict(self.best_k_models)
        if worst is not None:
            del kept[worst]
        kept[str(path)] = value
        best = path if self.monitor is None else Path(self._best_of(kept))
        # The checkpoint's own record of what is kept must be the one that is true once it is in place.
        self.best_k_models, self.best_model_path, self.best_model_score = kept, str(best), kept[str(best)]
        trainer.save_checkpoint(path, self.save_weights_only)
        if self.verbose:
            announce(f"saved {path}" + ("" if value is None else f" ({self.monitor} = {value:.5g})"))
        if worst is not None and worst != str(path) and worst != str(trainer.ckpt_path):
            self._remove(trainer, Path(worst))

    def _worst(self) -> str | None:
        """The kept checkpoint that the next one takes the place of, once there are as many as wanted."""
        if self.save_top_k == -1 or len(self.best_k_models) < self.save_top_k:
            return None
        if self.monitor is None:
            return next(iter(self.best_k_models))
        return self._best_of(self.best_k_models, reverse=True)

    def _best_of(self, kept: dict[str, float | None], reverse: bool = False) -> str:
        def rank(path: str) -> tuple[bool, float]:
            value = kept[path]
            assert value is not None
            nan = value != value
            return nan, 0.0 if nan else value if self.mode == "min" else -value

        return (max if reverse else min)(kept, key=rank)

    @staticmethod
    def _remove(trainer: Trainer, path: Path) -> None:
        if trainer.is_global_zero and path.exists():
            checkpoint.remove(path)

    def _free_name(self, trainer: Trainer, replaced: str | None) -> Path:
        path = self._directory / (self.format_checkpoint_name(self._values(trainer)))
        if not self.enable_version_counter:
            return path
        taken = trainer.accelerator.world.broadcast
        version, free = 0, path
        while taken(free.exists()) and str(free) != replaced:
            version += 1
            free = path.with_name(f"{path.stem}-v{version}{self.FILE_EXTENSION}")
        return free

    @staticmethod
    def _values(trainer: Trainer) -> dict[str, float]:
        values = {name: float(value) for name, value in trainer.logbook.callback_values.items()}
        return {**values, "epoch": trainer.current_epoch, "step": trainer.global_step}

    def format_checkpoint_name(self, metrics: dict[str, Any], filename: str | None = None) -> str:
        """The file name for these values; a name in the template that was not logged counts as 0."""
        template = filename or self.filename or "{epoch}-{step}"
        for field in re.findall(r"\{([\w/.]+)", template):
            metrics.setdefault(field, 0)

        def fill(match: re.Match[str]) -> str:
            name, spec = match.group(1), match.group(2) or ""
            text = format(metrics[name], spec)
            return f"{name.replace('/', '_')}={text}" if self.auto_insert_metric_name else text

        return re.sub(r"\{([\w/.]+)(?::([^}]*))?\}", fill, template) + self.FILE_EXTENSION
