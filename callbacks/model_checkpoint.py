"""`ModelCheckpoint`: saves checkpoints during training."""

from __future__ import annotations

import math
import os
from datetime import timedelta
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..common.durations import parse_duration
from ..common.messages import announce, warn
from ..common.remote_path import absolute, as_path, lexists
from ..common.validation import check_bool, check_bool_or_word, check_int, check_monitor, choose
from ..engine.checkpoint import Job, forget_saved
from ..engine.checkpoint import store as checkpoint
from ._checkpointing import (
    STATE,
    AgreedInterval,
    TopKCheckpoints,
    check_place,
    check_triggers,
    estimate_checkpoint_bytes,
    fill_in,
    finish_removing,
    folders,
    is_abandoned,
    is_taken,
    recorded,
    relocate,
    remove,
)
from .checkpoint import Checkpoint
from .monitored_metric import MODES, checks_at_epoch_end, make_never_logged_error, read_logged_metrics

if TYPE_CHECKING:
    from ..trainer import TaskModule, Trainer

# Lightning methods that Treadle never calls, with replacements.
_SAVE = "Override _save_checkpoint(trainer, filepath) or check_monitor_top_k instead."
_NEVER_CALLED = {
    "_save_topk_checkpoint": _SAVE,
    "_save_last_checkpoint": _SAVE,
    "_save_monitor_checkpoint": _SAVE,
    "_save_none_monitor_checkpoint": _SAVE,
    "_save_model": _SAVE,
    "_should_skip_saving_checkpoint": _SAVE,
    "_get_metric_interpolated_filepath_name": "Override format_checkpoint_name instead.",
    "_del_model": "Override _remove_checkpoint instead.",
}


class ModelCheckpoint(Checkpoint):
    """Callback that saves checkpoints between optimizer steps and keeps the best ones.

    A checkpoint is one file, which ``torch.load`` and Lightning open too. It is a directory at a URL, with sharded
    state (FSDP, ``DDP(zero=True)``), and if a hook of ``register_save_state_pre_hook`` may add files. Incomplete
    checkpoints are never loaded. A run may have several ModelCheckpoints that differ in ``monitor``, ``mode`` or their
    triggers.

    A value from a validation is used to rank a checkpoint only if the checkpoint contains the validated weights. If a
    save is due while ``monitor`` has no value for the current weights, the ranked checkpoint is saved once the next
    value is available; ``last.ckpt`` is saved immediately. If ``monitor`` is logged by training steps, its latest value
    is used.

    Args:
        dirpath: Directory of the checkpoints, or a URL such as ``s3://bucket/run``. Default: ``checkpoints`` in the
            run's folder.
        filename: Template of checkpoint names, such as ``"{epoch}-{val_loss:.2f}"``. Default: ``"{epoch}-{step}"``.
        monitor: Name of the logged value by which checkpoints are ranked. If None, the latest checkpoint counts as the
            best. ``"step"`` with ``mode="max"`` keeps the latest ``save_top_k`` checkpoints. Default: None.
        verbose: Announce each save and each value of ``monitor`` that is not good enough for a save. Default: False.
        save_last: Also keep the latest checkpoint as ``last.ckpt``. With ``"link"``, ``last.ckpt`` is a second name (a
            hard link) of a checkpoint file that is saved anyway, which takes neither time nor space; where there is
            none, it is saved as with True. Default: False. In a `RunFolder`, if no ModelCheckpoint keeps the latest
            state, the default is True for one of them.
        save_top_k: Number of best checkpoints to keep; -1 keeps all, 0 keeps none. Values above 1 require ``monitor``.
            Default: 1.
        save_on_exception: Save the run when an error or Ctrl-C ends ``fit``. After an error, rank zero saves the run as
            of the last completed step, without the state of other ranks. If rank zero cannot save the run alone, for
            example because the model is sharded, nothing is saved after an error. Default: False.
        save_weights_only: Omit everything that is needed only to resume, such as the optimizer state. Default: False.
        save_trainable_only: Omit frozen weights (``requires_grad=False``), unless they were trained during the run. To
            load such a checkpoint, build the task with the same frozen weights. Their digests are compared with those
            in the checkpoint. Default: False.
        mode: ``"min"`` if lower values are better, ``"max"`` if higher values are better. NaN is worse than any number.
            Default: ``"min"``.
        auto_insert_metric_name: Write each field of the template as ``name=value`` instead of only the value. Default:
            True.
        every_n_train_steps: Number of optimizer steps between saves; None or 0 disables this trigger. Default: None.
        train_time_interval: Time between saves: ``"DD:HH:MM:SS"``, a timedelta or a dict of its arguments. Default:
            None.
        every_n_epochs: Number of epochs between saves; 0 disables this trigger. Default: 1 if no other trigger is
            passed, otherwise 0.
        save_on_train_epoch_end: For ``every_n_epochs``, save at the end of the epoch (True) or after each validation in
            the epoch (False). Default: None, which selects False in a run with validation if ``val_check_interval`` is
            not 1.0 or ``check_val_every_n_epoch`` is not 1, and True otherwise.
        enable_version_counter: Append ``-v1``, ``-v2``, ... to the name if it is taken by a checkpoint that this save
            does not replace, or that another run on this machine is writing. If False, replace the existing checkpoint,
            unless it is this callback's ``last.ckpt`` or belongs to another ModelCheckpoint of this run. Default: True.
        async_save: Write the checkpoint in the background, from a copy of the state in host memory. If the save fails,
            the error is raised at a later step or at the end of ``fit``. ``best_model_path`` may not exist until the
            save is complete. Default: False.
        format: ``"file"`` or ``"directory"``. ``"file"`` is an error where a checkpoint must be a directory. Default:
            None, which selects a file where one is possible.

    Attributes:
        best_model_path: Path of the best checkpoint, usually a file, or "".
        best_model_score: Value of ``monitor`` for the best checkpoint, a 0-d tensor, or None.
        best_k_models: Values of ``monitor`` for the kept checkpoints, by path; empty without a monitor.
        last_model_path: Path of the latest ``last.ckpt``, or "".
        current_score: Value of ``monitor`` for the latest checkpoint that was among the best, or None.

    Raises:
        ValueError, TypeError: If an argument is invalid or more than one trigger is set. In ``fit``, if ``monitor`` was
            needed but not logged, or if the state cannot be saved, for example because a weight is not finite.
        OSError: In ``fit``, if a checkpoint cannot be written.

    Examples:
        >>> import os, tempfile
        >>> import treadle as tl
        >>> from treadle.callbacks import ModelCheckpoint
        >>> from treadle.compat.demos.boring_classes import BoringModel
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpoint = ModelCheckpoint(folder, every_n_train_steps=1)
        ...     trainer = tl.Trainer(
        ...         max_steps=2,
        ...         accelerator="cpu",
        ...         devices=1,
        ...         logger=False,
        ...         enable_progress_bar=False,
        ...         callbacks=checkpoint,
        ...     )
        ...     trainer.fit(BoringModel())
        >>> os.path.basename(checkpoint.best_model_path)
        'epoch=0-step=2.ckpt'
    """

    after_task = 2
    exchanges = True

    # Elements of names; a script may set them on the class, a subclass or an instance, as in Lightning.
    CHECKPOINT_JOIN_CHAR = "-"
    CHECKPOINT_EQUALS_CHAR = "="
    CHECKPOINT_NAME_LAST = "last"
    CHECKPOINT_NAME_PREEMPTED = "preempted"
    FILE_EXTENSION = ".ckpt"
    STARTING_VERSION = 1

    monitor: str | None = recorded("monitor")
    mode: str = recorded("mode")
    save_top_k: int = recorded("save_top_k")
    best_model_path: str = recorded("best_model_path")
    best_model_score: Tensor | None = recorded("best_model_score")
    best_k_models: dict[str, Tensor] = recorded("best_k_models")
    last_model_path: str = recorded("last_model_path")
    current_score: Tensor | None = recorded("current_score")

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | str | None = None,
        save_top_k: int = 1,
        save_on_exception: bool = False,
        save_weights_only: bool = False,
        mode: str = "min",
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: str | timedelta | dict[str, int] | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        enable_version_counter: bool = True,
        *,
        save_trainable_only: bool = False,
        async_save: bool = False,
        format: str | None = None,
    ) -> None:
        pause = train_time_interval
        interval = None if pause is None else parse_duration("train_time_interval", pause, zero=True)
        check_triggers(every_n_train_steps, interval, every_n_epochs)
        check_place(dirpath, filename)
        if check_int("save_top_k", save_top_k, -1, "keeps all") > 1 and monitor is None:
            raise ValueError(
                f"save_top_k={save_top_k} needs monitor, the logged value that ranks the checkpoints. Set monitor, for "
                "example to 'val_loss'."
            )
        at_end = save_on_train_epoch_end
        by_default = (every_n_train_steps, interval, every_n_epochs) == (None, None, None)
        self._top_k = TopKCheckpoints(
            None if monitor is None else check_monitor(monitor), choose("mode", mode, MODES), save_top_k
        )
        self.dirpath = None if dirpath is None else str(absolute(os.path.expanduser(dirpath)))
        self.filename = filename
        self.verbose = check_bool("verbose", verbose)
        self.save_last = save_last is not None and check_bool_or_word("save_last", save_last, ("link",))
        self._links_last = save_last == "link"
        self._may_keep_last = save_last is None
        self.save_on_exception = check_bool("save_on_exception", save_on_exception)
        self.save_weights_only = check_bool("save_weights_only", save_weights_only)
        self.save_trainable_only = check_bool("save_trainable_only", save_trainable_only)
        self.auto_insert_metric_name = check_bool("auto_insert_metric_name", auto_insert_metric_name)
        self.every_n_train_steps = every_n_train_steps or 0
        self.train_time_interval = interval
        self.every_n_epochs = 1 if by_default else every_n_epochs or 0
        self.save_on_train_epoch_end = None if at_end is None else check_bool("save_on_train_epoch_end", at_end)
        self.enable_version_counter = check_bool("enable_version_counter", enable_version_counter)
        self.async_save = check_bool("async_save", async_save)
        self.format = None if format is None else choose("format", format, ("file", "directory"))
        self._clock = None if interval is None else AgreedInterval(interval)
        self._triggered_step = self._first_step = 0  # of the latest trigger, and at which the run started
        self._save_requested = self._waiting = False  # a trigger has fired; the ranked save waits for its value
        self._continues = False  # the run resumes in the same directory
        self._resumed_step: int | None = None
        self._previous_record: dict[str, Any] = {}  # the record before the checkpoint that is being saved
        self._job: Job | None = None  # the save in the background

    # -- state ---------------------------------------------------------------------------------------------------

    @property
    def state_key(self) -> str:
        """Name under which the state is saved. It includes the class, the monitor, the mode and the triggers."""
        return (
            f"{type(self).__qualname__}(monitor={self.monitor!r}, mode={self.mode!r}, every_n_train_steps="
            f"{self.every_n_train_steps}, every_n_epochs={self.every_n_epochs}, "
            f"train_time_interval={self.train_time_interval})"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the paths and scores of the kept checkpoints, and the state of the triggers."""
        return {
            "dirpath": self.dirpath,
            "triggered_step": self._triggered_step,
            "replaced": self._top_k.replaced,
            "wanted": self._save_requested,
            "waiting": self._waiting,
            **{name: getattr(self._top_k, name) for name in STATE},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned.

        Of checkpoints in another directory, only the best one's path and score are restored, unless the directory was
        moved to ``dirpath``.
        """
        self._triggered_step, self._waiting = state_dict["triggered_step"], state_dict["waiting"]
        self._save_requested = state_dict["wanted"]
        if self.dirpath is not None:
            state_dict = relocate(state_dict, self.dirpath)
        self._continues = self.dirpath == state_dict["dirpath"]
        names = (*STATE, "replaced") if self._continues else ("best_model_path", "best_model_score")
        self._top_k.replaced = []
        self._top_k.restore({name: state_dict[name] for name in names})

    @property
    def saves(self) -> bool:
        """True if the callback saves any checkpoints."""
        triggers = self.every_n_train_steps or self.every_n_epochs or self.train_time_interval is not None
        return self.save_on_exception or bool(triggers and (self.save_top_k or self.save_last))

    @property
    def keeps_newest(self) -> bool:
        """True if the latest checkpoint is always kept and a run can be resumed from it."""
        newest = self.save_last or self.save_top_k == -1 or (self.monitor is None and bool(self.save_top_k))
        return newest and not self.save_weights_only

    def keep_last_by_default(self) -> None:
        """Also keep a ``last.ckpt``, unless ``save_last`` was set."""
        self.save_last |= self._may_keep_last

    # -- triggers ------------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """In ``fit``, determine the directory."""
        if stage != "fit":
            return
        for name, instead in _NEVER_CALLED.items():
            if getattr(type(self), name, None) is not getattr(ModelCheckpoint, name, None):
                warn(f"{type(self).__name__} overrides {name}, which Treadle never calls. {instead}")
        self._complete_job(trainer, wait=True)  # a leftover of a fit that Ctrl-C ended twice
        self._save_requested = self._waiting = False
        if self.dirpath is None:
            root = trainer.logbook.agree_on_directory(trainer.default_root_dir)
            self.dirpath = str(absolute(root) / "checkpoints")
        # Names that contain the time differ between ranks.
        self.dirpath = trainer.accelerator.world.broadcast(self.dirpath)

    def on_train_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Check that saving will work, and remove leftover checkpoints of a killed run."""
        progress, world = trainer.progress, trainer.accelerator.world
        self._top_k.saved_step = self._first_step = progress.step
        self._triggered_step = min(self._triggered_step, progress.step)
        self._resumed_step = progress.step if self._continues else None
        self._continues = False
        if self._clock is not None:
            self._clock.restart(progress.step)
        with world.failing_together():
            if world.is_main and self.saves:
                store = checkpoint.CheckpointStore(self._directory)
                if not self.enable_version_counter:  # otherwise another name is chosen
                    for name in (self.CHECKPOINT_NAME_LAST, self.CHECKPOINT_NAME_PREEMPTED):
                        checkpoint.check_target(as_path(self._directory) / (name + self.FILE_EXTENSION))
                store.probe(estimate_checkpoint_bytes(trainer, self.save_weights_only, self.save_trainable_only))
                replaced = sorted(set(self._top_k.replaced) - self._collect_reserved_paths(trainer))
                removed = finish_removing(replaced, self._directory, progress.step, trainer.ckpt_path)
                stores = [*map(checkpoint.CheckpointStore, folders(self._directory, self.name_depth))]
                recovered = [sentence for store in stores for sentence in store.recover()]
                forget_saved(store.directory for store in stores)
                for sentence in [*recovered, *(f"{path}: removed, because it had been replaced" for path in removed)]:
                    announce(sentence)
        self._top_k.replaced = []
        if self.save_trainable_only:
            trainer.accelerator.checkpointer.find_frozen(world)  # before anything is trained
        missing = [path for path in sorted(self._top_k.ranked_paths) if not as_path(path).exists()]
        self._top_k.forget(world.broadcast(missing))  # those that rank zero does not find

    def on_validation_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Trigger a save if one is due and ``every_n_epochs`` saves after validations."""
        if trainer.stage == "fit" and not trainer.sanity_checking and not self._should_save_on_train_epoch_end(trainer):
            self._trigger_by_epoch(trainer)

    def on_step_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Save a checkpoint if one is due."""
        if self._job is not None:
            self._complete_job(trainer)
        progress = trainer.progress
        step = progress.step
        if self.every_n_train_steps:
            if step % self.every_n_train_steps == 0:
                self._trigger(step)
        elif self._clock is not None and self._clock.is_over(trainer):
            self._trigger(step)
        # The epoch's last step is saved when the epoch is closed, so that a resumed run begins with the next one.
        if (self._save_requested or self._waiting) and not progress.epoch_is_trained:
            self._serve(trainer, epoch_is_over=False)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Save a checkpoint if one is due."""
        if self._should_save_on_train_epoch_end(trainer):
            self._trigger_by_epoch(trainer)
        self._serve(trainer, epoch_is_over=True)

    def on_train_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Wait for a background save. With ``save_last``, save the run if no trigger has saved it."""
        if self.save_last and self._top_k.saved_step == self._first_step < trainer.progress.step:
            self._save(trainer, read_logged_metrics(trainer), ranked=False)
        self._complete_job(trainer, wait=True)
        if self._waiting and not self.best_model_path:
            warn(
                f"ModelCheckpoint saved no best checkpoint, because {self.monitor!r} was not measured before training "
                "ended."
            )

    def on_exception(self, trainer: Trainer, pl_module: TaskModule, exception: BaseException) -> None:
        """Save the run as of the last completed step if ``save_on_exception`` is set and the step can be saved.

        Only rank zero saves, without collectives.
        """
        try:
            self._complete_job(trainer, wait=True)
        finally:
            self._save_last(trainer, exception)

    def save_now(self, trainer: Trainer, preempted: bool = True) -> str:
        """Save the run as ``last.ckpt`` if one is kept, and return the path. Must be called on all ranks.

        Args:
            trainer: The Trainer.
            preempted: Otherwise, save the run as ``preempted.ckpt`` (True, the default) or under a name from
                ``filename`` (False).
        """
        self._complete_job(trainer, wait=True)
        progress = trainer.progress
        if preempted and not self.save_last:
            path = os.path.join(self._directory, self.CHECKPOINT_NAME_PREEMPTED + self.FILE_EXTENSION)
        else:
            values = {self.monitor or "": float("nan"), **trainer.logbook.callback_values}
            values |= {"epoch": progress.epoch, "step": progress.step}
            replaced = self.last_model_path if self.save_last else ""
            path = self._agree_on_path(trainer, values, replaced, last=bool(self.save_last))
        if self.save_last:
            self._top_k.last_model_path = path
        self._save_checkpoint(trainer, path)
        self._top_k.saved_step = progress.step
        return path

    def _save_last(self, trainer: Trainer, exception: BaseException) -> None:
        last = trainer.last_step
        if not self.save_on_exception or last is None or not trainer.is_global_zero:
            return
        if last.step <= self._top_k.saved_step:
            return
        if last.unsavable_reason:
            warn(f"the run is not saved, because {last.unsavable_reason}. Its checkpoints are from earlier steps.")
            return
        values = {self.monitor or "": float("nan"), **trainer.logbook.callback_values, **last.counts}
        if self.save_last:
            path = self._choose_path(trainer, values, last.step, self.last_model_path, last=True)
            self.last_model_path = path
            last.update_callback_state(self, last_model_path=path)
        else:
            path = self._choose_path(trainer, values, last.step)
        last.save(as_path(path), self.save_weights_only, self.save_trainable_only, self.format)
        self._top_k.saved_step = last.step
        announce(f"{type(exception).__name__}: the run as of optimizer step {last.step} is saved as {path}")

    def _should_save_on_train_epoch_end(self, trainer: Trainer) -> bool:
        if self.save_on_train_epoch_end is not None:
            return self.save_on_train_epoch_end
        # With one validation per epoch its value is known when the epoch ends, and the checkpoint is a whole epoch's.
        return checks_at_epoch_end(trainer)

    def _trigger_by_epoch(self, trainer: Trainer) -> None:
        if self.every_n_epochs and (trainer.progress.epoch + 1) % self.every_n_epochs == 0:
            self._trigger(trainer.progress.step)

    def _trigger(self, step: int) -> None:
        if step != self._triggered_step:  # a step that float16 skipped does not count
            self._triggered_step, self._save_requested = step, True

    def _serve(self, trainer: Trainer, epoch_is_over: bool) -> None:
        """Perform a triggered save. If ``monitor`` has no current value yet, the ranked checkpoint is saved later."""
        measured = epoch_is_over or trainer.logbook.latest_validation.step == trainer.progress.step
        if not self._save_requested and not (self._waiting and measured):
            return
        ranked = bool(self.save_top_k)
        values = read_logged_metrics(trainer, keep=trainer.logbook.latest_validation.just_measured(trainer))
        if ranked and self.monitor is not None:
            ranked = self._has_current_value(trainer, self.monitor, values, epoch_is_over)
            self._waiting = not ranked
        if ranked or self._save_requested:
            self._save_requested = False
            self._save(trainer, values, ranked)

    def _has_current_value(self, trainer: Trainer, name: str, values: dict[str, float], epoch_is_over: bool) -> bool:
        """Return whether ``name`` has a value for the current weights."""
        if name in ("step", "epoch") or name in trainer.logbook.agreed_names:
            return True
        validation = trainer.logbook.latest_validation
        if name in values:
            just_measured = name in validation.just_measured(trainer) or name in trainer.metrics.latest()
            # Otherwise it is of an epoch, of part of one (a limit ended the run within it) or of an older validation.
            return just_measured or (trainer.progress.epoch_is_over and name not in validation.stale(trainer))
        if epoch_is_over and validation.step is not None:
            raise make_never_logged_error(trainer, name, "ModelCheckpoint's monitor", values)
        if epoch_is_over and not trainer.has_validation:
            words = make_never_logged_error(trainer, name, "ModelCheckpoint's monitor", values)
            warn(f"{words} Until it is logged, no best checkpoint is saved.")
        return False

    # -- saving --------------------------------------------------------------------------------------------------

    @property
    def _directory(self) -> str:
        if self.dirpath is None:
            raise ValueError("ModelCheckpoint has no directory before fit begins. Pass dirpath, or call fit first.")
        return self.dirpath

    def _save(self, trainer: Trainer, values: dict[str, float], ranked: bool) -> None:
        own = type(self)._update_best_and_save is not ModelCheckpoint._update_best_and_save
        if not (own and ranked and self.monitor):
            self._save_kept(trainer, values, ranked)
            return
        score = torch.tensor(values[self.monitor], dtype=torch.float64, device="cpu")
        candidates = self._monitor_candidates(trainer) | {self.monitor: score}  # callback_metrics have 32 bits
        if self.check_monitor_top_k(trainer, score):
            self._update_best_and_save(score, trainer, candidates)
        self._save_last_checkpoint(trainer, candidates)  # unless the method has saved it too

    def _save_kept(self, trainer: Trainer, values: dict[str, float], ranked: bool) -> None:
        """Decide which checkpoints to keep, and save the new one if it is among them."""
        self._complete_job(trainer, wait=True)
        top_k, previous_record = self._top_k, self._top_k.snapshot()
        self._previous_record = previous_record
        values = {**values, "epoch": trainer.progress.epoch, "step": trainer.progress.step}
        paths: list[str] = []
        if ranked:
            score = None
            if self.monitor is not None:
                value = values[self.monitor]
                if math.isnan(value):  # worse than any number
                    value = math.inf if self.mode == "min" else -math.inf
                score = torch.tensor(value, dtype=torch.float64, device="cpu")
            if score is None or self.check_monitor_top_k(trainer, score):
                top_k.current_score = score
                replaced = top_k.next_replaced
                paths.append(self._agree_on_path(trainer, values, replaced))
                top_k.add(paths[0], score, replaced)
            elif self.verbose:
                rank = "the best value" if self.save_top_k == 1 else f"among the best {self.save_top_k} values"
                announce(f"{self.monitor} = {float(score):.5g} is not {rank}")
        if self.save_last:
            top_k.last_model_path = self._agree_on_path(trainer, values, self.last_model_path, last=True)
            paths.append(top_k.last_model_path)
        if not paths:
            return
        top_k.replace_since(previous_record, self._collect_reserved_paths(trainer))
        names = paths
        if self._links_last and self._can_link(trainer, paths):
            paths = paths[:1]
        try:
            if type(self)._save_checkpoint is ModelCheckpoint._save_checkpoint:
                trainer.save_checkpoint(
                    paths[0],
                    self.save_weights_only,
                    trainable_only=self.save_trainable_only,
                    blocking=not self.async_save,
                    also=paths[1:],
                    format=self.format,
                )
            else:
                for path in paths:
                    self._save_checkpoint(trainer, path)
        except BaseException:
            top_k.restore(previous_record)
            raise
        if paths != names:
            with trainer.accelerator.world.failing_together():
                if trainer.is_global_zero:
                    checkpoint.link(*names)
        top_k.saved_step = trainer.progress.step
        self._job = trainer.accelerator.saving
        if self._job is None:
            self._finish_save(trainer)

    def _can_link(self, trainer: Trainer, paths: list[str]) -> bool:
        """Return whether the last of these paths can be a second name of the first, once that is written."""
        checkpointer = trainer.checkpointer
        is_written = len(paths) == 2 and not self.async_save and checkpointer.plugin is None
        return is_written and checkpointer.is_one_file(self.format, paths)

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        """Save one checkpoint on all ranks. May be overridden, as in Lightning."""
        only = self.save_trainable_only
        trainer.save_checkpoint(filepath, self.save_weights_only, trainable_only=only, format=self.format)

    def _complete_job(self, trainer: Trainer, wait: bool = False) -> None:
        """Complete a background save that has ended. With ``wait``, first wait until it ends."""
        job = self._job
        if job is None or not (wait or job.done):
            return
        try:
            job.finish()
        finally:
            if job.done:  # otherwise Ctrl-C ended the wait, and the replaced checkpoints are still needed
                self._job = None
                if job.error is not None:
                    self._top_k.restore(self._previous_record)
        if job.error is None:
            self._finish_save(trainer)

    def _finish_save(self, trainer: Trainer) -> None:
        if self.verbose:
            announce(f"saved a checkpoint of optimizer step {self._top_k.saved_step} in {self._directory}")
        for path in self._top_k.replaced:
            self._remove_checkpoint(trainer, path)
        self._top_k.replaced = []
        trainer.logbook.call_loggers("after_save_checkpoint", self)

    def _collect_reserved_paths(self, trainer: Trainer) -> set[str]:
        """Return the paths that other checkpoint callbacks of the run use."""
        other_callbacks = (callback for callback in trainer.checkpoint_callbacks if callback is not self)
        return set().union(*(callback._top_k.reserved_paths for callback in other_callbacks))

    # -- Lightning's public methods ------------------------------------------------------------------------------

    @property
    def kth_best_model_path(self) -> str:
        """Path of the lowest-ranked checkpoint; "" if no checkpoint is ranked or fewer than ``save_top_k`` are."""
        return self._top_k.kth_best_model_path

    @property
    def kth_value(self) -> Tensor:
        """Value of the worst ranked checkpoint, a 0-d tensor; infinite while fewer than ``save_top_k`` are ranked."""
        worst = torch.tensor(math.inf if self.mode == "min" else -math.inf, device="cpu")
        return self.best_k_models.get(self.kth_best_model_path, worst)

    def check_monitor_top_k(self, trainer: Trainer, current: Tensor | None = None) -> bool:
        """Return whether a checkpoint with this value of ``monitor`` is to be kept.

        A subclass may decide differently, but the decision must be the same on every rank.

        Args:
            trainer: The Trainer.
            current: Value of ``monitor``, a 0-d tensor. If it is None, the result is False. Default: None.
        """
        return current is not None and bool(self.save_top_k) and self._top_k.is_among_best(current)

    def to_yaml(self, filepath: str | Path | None = None) -> None:
        """Write the paths and scores in ``best_k_models`` to a YAML file.

        Args:
            filepath: Path of the file. Default: ``best_k_models.yaml`` in ``dirpath``.
        """
        import yaml

        file = as_path(os.path.join(self._directory, "best_k_models.yaml") if filepath is None else filepath)
        scores = {path: score.item() for path, score in self.best_k_models.items()}
        file.write_bytes(yaml.safe_dump(scores).encode())

    def file_exists(self, filepath: str | Path, trainer: Trainer) -> bool:
        """Return whether a path or URL exists, as seen by rank zero. Must be called on all ranks.

        Args:
            filepath: Path or URL to check.
            trainer: The Trainer.
        """
        is_main = trainer.is_global_zero
        return bool(trainer.accelerator.world.broadcast(lexists(filepath) if is_main else None))

    # -- names ---------------------------------------------------------------------------------------------------

    @property
    def _template(self) -> str:
        return self.filename or f"{{epoch}}{self.CHECKPOINT_JOIN_CHAR}{{step}}"

    @property
    def name_depth(self) -> int:
        """Number of folder levels below ``dirpath`` in checkpoint names."""
        return max(len(Path(template).parts) - 1 for template in (self._template, self.CHECKPOINT_NAME_LAST))

    def format_checkpoint_name(
        self, metrics: dict[str, Any], filename: str | None = None, ver: int | None = None
    ) -> str:
        """Return the path of a checkpoint with these values, or only its name if ``dirpath`` is not known yet.

        Args:
            metrics: Values for the fields of the template, by name. A missing value is written as 0, with a warning.
            filename: The template. Default: the callback's template.
            ver: Version number in a suffix such as ``-v1``. Default: no suffix.

        Raises:
            ValueError: If a value cannot be written in its field's format.
        """
        suffix = "" if ver is None else f"{self.CHECKPOINT_JOIN_CHAR}v{ver}"
        stem = self._format_checkpoint_name(filename, metrics, auto_insert_metric_name=self.auto_insert_metric_name)
        name = f"{stem}{suffix}{self.FILE_EXTENSION}"
        return name if self.dirpath is None else str(as_path(self.dirpath) / name)

    def _agree_on_path(self, trainer: Trainer, values: dict[str, Any], replaced: str, last: bool = False) -> str:
        """Return the path that rank zero chooses. Must be called on all ranks."""
        step = trainer.progress.step
        path = self._choose_path(trainer, values, step, replaced, last) if trainer.is_global_zero else ""
        return str(trainer.accelerator.world.broadcast(path))

    def _choose_path(
        self, trainer: Trainer, values: dict[str, Any], step: int, replaced: str = "", last: bool = False
    ) -> str:
        """Return a path for a new checkpoint. ``replaced`` is the path of a checkpoint that it may overwrite."""
        template = self.CHECKPOINT_NAME_LAST if last else None
        # Paths of this run count too: they may not be on disk yet, or look like what was saved before a resume.
        reserved_paths = self._collect_reserved_paths(trainer)
        reserved_paths |= self._top_k.ranked_paths if last else {self.last_model_path}
        path, version = self.format_checkpoint_name(values, template), self.STARTING_VERSION
        while path in reserved_paths or (
            self.enable_version_counter
            and not (path == replaced and trainer.checkpointer.plugin)  # which may write anything
            and is_taken(path, replaced)
        ):
            if path not in reserved_paths and is_abandoned(path, step, self._resumed_step):
                break
            path = self.format_checkpoint_name(values, template, version)
            version += 1
        return path

    # -- private names of Lightning's that subclasses in public projects use or override --------------------------

    def _format_checkpoint_name(
        self,
        filename: str | None,
        metrics: dict[str, Any],
        prefix: str | None = None,
        auto_insert_metric_name: bool = True,
    ) -> str:
        equals = self.CHECKPOINT_EQUALS_CHAR if auto_insert_metric_name else None
        name = fill_in(filename or self._template, metrics, equals)
        return name if prefix is None else f"{prefix}{self.CHECKPOINT_JOIN_CHAR}{name}"

    _every_n_train_steps = property(attrgetter("every_n_train_steps"))
    _every_n_epochs = property(attrgetter("every_n_epochs"))
    _train_time_interval = property(attrgetter("train_time_interval"))
    _save_on_train_epoch_end = property(attrgetter("save_on_train_epoch_end"))
    _last_global_step_saved: int = recorded("saved_step")

    def _monitor_candidates(self, trainer: Trainer) -> dict[str, Tensor]:
        progress = trainer.progress
        return trainer.callback_metrics | {
            "epoch": torch.tensor(progress.epoch, device="cpu"),
            "step": torch.tensor(progress.step, device="cpu"),
        }

    def _should_skip_saving_checkpoint(self, trainer: Trainer) -> bool:
        saved = self._top_k.saved_step == trainer.progress.step
        return saved or trainer.stage != "fit" or trainer.sanity_checking or bool(trainer.fast_dev_run)

    def _save_topk_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Any]) -> None:
        self._save(trainer, {name: float(value) for name, value in monitor_candidates.items()}, True)

    def _update_best_and_save(self, current: Tensor, trainer: Trainer, monitor_candidates: dict[str, Any]) -> None:
        """Save a checkpoint that is among the best. An override is called for each of them."""
        self._save_kept(trainer, {name: float(value) for name, value in monitor_candidates.items()}, True)

    def _remove_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        """Remove a checkpoint that another has replaced. An override is called on every rank."""
        if trainer.is_global_zero:
            remove(filepath, self._directory, trainer.ckpt_path, trainer.checkpointer.plugin)

    def _save_last_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, Any]) -> None:
        if self.save_last and self._top_k.saved_step != trainer.progress.step:
            self._save(trainer, {name: float(value) for name, value in monitor_candidates.items()}, False)
