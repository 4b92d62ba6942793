"""Helpers for `ModelCheckpoint`: when to save, how to name checkpoints, and which checkpoints to keep or remove."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ..common.messages import name_type, nearest, warn
from ..common.remote_path import AnyPath, as_path, lexists
from ..common.validation import check_int
from ..engine.checkpoint import MANIFEST, atomic_swap, filesystem, is_checkpoint, read_manifest, store
from ..strategies import iter_tensors
from ..strategies.distributed import split_tied
from .monitored_metric import is_better

if TYPE_CHECKING:
    from ..trainer import Trainer


class AgreedInterval:
    """Timer on which all ranks agree without communicating at every step. It follows rank zero's clock.

    Args:
        interval: Time after which `is_over` returns True.

    Examples:
        >>> from datetime import timedelta
        >>> from treadle.callbacks import AgreedInterval
        >>> interval = AgreedInterval(timedelta(minutes=10))
        >>> interval.restart(step=0)
        >>> interval.is_over(trainer)  # doctest: +SKIP
        False

        The last line is skipped because it needs a running Trainer. Call `is_over` in a callback's ``on_step_end``.
    """

    def __init__(self, interval: timedelta) -> None:
        self._interval = interval.total_seconds()

    def restart(self, step: int) -> None:
        """Start a new interval.

        Args:
            step: The current optimizer step.
        """
        self._began = self._looked = time.monotonic()
        self._looked_step, self._next_step = step, step + 1

    def is_over(self, trainer: Trainer) -> bool:
        """Return whether the interval has ended, and start the next one if so.

        Call `restart` first, and then this method on all ranks after each step.

        Args:
            trainer: The Trainer.
        """
        step = trainer.progress.step
        if step < self._next_step:
            return False
        current_time = time.monotonic()
        remaining_seconds = self._interval - (current_time - self._began)
        per_step = max((current_time - self._looked) / max(step - self._looked_step, 1), 1e-6)
        steps = trainer.accelerator.world.broadcast(
            0 if remaining_seconds <= 0 else max(1, int(remaining_seconds / 2 / per_step))
        )
        if not steps:
            self.restart(step)
            return True
        self._looked, self._looked_step, self._next_step = current_time, step, step + steps
        return False


def check_triggers(steps: int | None, interval: timedelta | None, epochs: int | None) -> None:
    """Raise a ValueError if more than one trigger is set, or if a number of steps or epochs is invalid.

    Args:
        steps: The argument ``every_n_train_steps``.
        interval: The parsed argument ``train_time_interval``.
        epochs: The argument ``every_n_epochs``.
    """
    for name, value in (("every_n_train_steps", steps), ("every_n_epochs", epochs)):
        if value is not None:
            check_int(name, value, 0, "means never")
    triggers = {"every_n_train_steps": steps, "train_time_interval": interval, "every_n_epochs": epochs}
    active_triggers = [name for name, value in triggers.items() if value or value is interval is not None]
    if len(active_triggers) > 1:
        raise ValueError(f"{' and '.join(active_triggers)} can't be combined. Use one ModelCheckpoint for each.")


# Number of tensors of a parameter's size that torch's optimizers create in their first step; each of the options adds
# one. Other optimizers count as 0, because an estimate that is too high would end a run without need.
_STATES = {
    **dict.fromkeys(("Adadelta", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Rprop"), 2),
    **dict.fromkeys(("ASGD", "Adagrad", "RMSprop"), 1),
    **dict.fromkeys(("Muon", "SGD"), 0),
}
_STATE_OPTIONS = ("amsgrad", "centered", "momentum")


def estimate_checkpoint_bytes(trainer: Trainer, weights_only: bool, trainable_only: bool = False) -> int:
    """Return the estimated size in bytes of one checkpoint, over all processes.

    For optimizer states, the size is a lower bound, provided that every trainable parameter gets a gradient.

    Args:
        trainer: The Trainer, with its task and optimizers already created.
        weights_only: Omit optimizer states.
        trainable_only: Omit frozen weights. Default: False.
    """
    frozen = {name for name, p in trainer.task.named_parameters(remove_duplicate=False) if not p.requires_grad}
    # The size of a lazy tensor is unknown before its layer's first batch.
    tensors = {n: t for n, t in trainer.task.state_dict().items() if isinstance(t, Tensor) and not is_lazy(t)}
    distinct, _ = split_tied(tensors)
    needed = sum(_count_bytes(t) for n, t in distinct.items() if not (trainable_only and n in frozen))
    return needed if weights_only else needed + sum(map(_count_optimizer_bytes, trainer.optimizers))


def _count_optimizer_bytes(optimizer: Optimizer) -> int:
    """Return the size of an optimizer's state in bytes, or an estimate if the state has not been created yet."""
    state_bytes = sum(_count_bytes(value) for state in optimizer.state.values() for value in iter_tensors(state))
    if state_bytes:
        return state_bytes
    kind = next((c.__name__ for c in type(optimizer).__mro__ if c.__module__.startswith("torch.optim.")), "")
    if kind not in _STATES:
        return 0
    return sum(
        (_STATES[kind] + sum(bool(group.get(option)) for option in _STATE_OPTIONS)) * _count_bytes(parameter)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad and not is_lazy(parameter)
    )


def _count_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()  # the full size of a sharded tensor


_FIELD = re.compile(r"\{([^{}:]+)(?::([^{}]*))?\}")


def fill_in(template: str, values: Mapping[str, Any], equals: str | None) -> str:
    """Replace the fields of a template with values. A missing value is written as 0, with a warning.

    ``equals`` is the text between a field's name and its value; None omits the name.
    """

    def fill(match: re.Match[str]) -> str:
        name, spec = match.group(1), match.group(2) or ""
        if name not in values:
            warn(
                f"the checkpoint name {template!r} uses {name!r}, which is not logged, so it is written as 0."
                f"{nearest(name, values)}"
            )
        try:
            text = format(values.get(name, 0), spec)
        except (ValueError, TypeError) as error:  # None and lists have no formats
            raise ValueError(
                f"the checkpoint name {template!r} cannot be formatted: {error}. Change the format of {name!r}, for "
                f"example to {{{name}:.2f}}."
            ) from error
        return text if equals is None else f"{name.replace('/', '_')}{equals}{text}"

    return _FIELD.sub(fill, template)


def check_place(dirpath: str | Path | None, filename: str | None) -> None:
    """Raise an error if the directory or the file name of checkpoints is invalid.

    Args:
        dirpath: Argument of `ModelCheckpoint`.
        filename: Argument of `ModelCheckpoint`.

    Raises:
        ValueError, TypeError: If an argument is invalid.
    """
    if dirpath is not None and not isinstance(dirpath, str | os.PathLike):
        raise TypeError(f"dirpath={dirpath!r} must be the path of a directory, not {name_type(dirpath)}.")
    if dirpath is not None:
        as_path(dirpath)
    if filename is None:
        return
    if not isinstance(filename, str):
        raise TypeError(
            f"filename={filename!r} must be a string such as '{{epoch}}-{{val_loss:.2f}}', not {name_type(filename)}."
        )
    if os.path.isabs(filename) or ".." in Path(filename).parts:
        raise ValueError(f"filename={filename!r} must be a relative path without '..'. Pass the directory as dirpath.")
    parts = filename.split("/")
    if not parts[-1] or any(part.startswith(".") for part in parts):
        raise ValueError(
            f"filename={filename!r} must not be empty or end with '/', and no part of it may begin with a dot, which "
            "marks incomplete checkpoints. Remove filename to use the default, '{epoch}-{step}'."
        )
    if re.search("[{}]", _FIELD.sub("", filename)):
        raise ValueError(
            f"filename={filename!r} has a brace that is not part of a field. Write a field as {{epoch}} or "
            "{val_loss:.2f}."
        )


def is_taken(path: str, replaced: str) -> bool:
    """Return whether a path belongs to another checkpoint, which another run may still be writing.

    ``replaced`` is the path of this run's checkpoint that may be overwritten, unless it lost its manifest or another
    run has replaced it. In an object store, only the save checks this, because each check is a request.
    """
    place = as_path(path)
    if not isinstance(place, Path):
        return path != replaced and lexists(path)
    if path != replaced:
        return os.path.lexists(path) or atomic_swap.is_being_written(place)
    try:
        store.check_target(place)
    except ValueError:
        return True
    return bool(atomic_swap.explain_replaced(place, place))


def folders(directory: str | AnyPath, levels: int) -> list[AnyPath]:
    """Return a directory and its nested folders that may contain checkpoints.

    Folders that are hidden, unreadable or themselves checkpoints are excluded.

    Args:
        directory: Directory in which a callback saves checkpoints.
        levels: Number of levels to descend.
    """
    listed = level = [as_path(directory)]
    for _ in range(levels):
        paths = (parent / name for parent in level for name in filesystem.list_names(parent))
        level = [path for path in paths if _is_folder(path)]
        listed = listed + level
    return listed


def _is_folder(path: AnyPath) -> bool:
    if path.name.startswith(".") or not path.is_dir():
        return False
    if isinstance(path, Path) and not os.access(path, os.R_OK | os.X_OK):
        return False
    return not (path / MANIFEST).exists()


# Entries of a ModelCheckpoint's saved state about the kept checkpoints, with Lightning's names.
STATE = ("best_model_path", "best_model_score", "best_k_models", "last_model_path", "current_score")


@dataclass
class TopKCheckpoints:
    """Record of the checkpoints that one `ModelCheckpoint` keeps.

    The record is saved in each checkpoint that a run can resume from, so it is updated before the checkpoint is
    written. `snapshot` and `restore` undo the update if a save fails. Other attributes are those of `ModelCheckpoint`.

    Attributes:
        replaced: Checkpoints to remove once the checkpoint that is being saved is in place.
        saved_step: Optimizer step of the latest save, or else the step at which the run started.
    """

    monitor: str | None
    mode: str
    save_top_k: int
    best_model_path: str = ""
    best_model_score: Tensor | None = None
    best_k_models: dict[str, Tensor] = field(default_factory=dict)
    last_model_path: str = ""
    current_score: Tensor | None = None
    replaced: list[str] = field(default_factory=list)
    saved_step: int = 0

    # -- kept checkpoints ----------------------------------------------------------------------------------------

    @property
    def ranked_paths(self) -> set[str]:
        """Paths of the checkpoints, excluding ``last.ckpt``."""
        return {self.best_model_path, *self.best_k_models} - {""}

    @property
    def paths(self) -> set[str]:
        """Paths of the checkpoints, including ``last.ckpt``."""
        return self.ranked_paths | {self.last_model_path} - {""}

    @property
    def reserved_paths(self) -> set[str]:
        """Paths that no other callback may save to or remove."""
        return self.paths.union(self.replaced)

    @property
    def kth_best_model_path(self) -> str:
        """Path of the worst ranked checkpoint, or ""."""
        if not self.best_k_models or (self.save_top_k != -1 and len(self.best_k_models) < self.save_top_k):
            return ""
        return find_best_path(self.best_k_models, self.mode, worst=True)

    @property
    def next_replaced(self) -> str:
        """Path of the checkpoint that the next one replaces, or ""."""
        if self.save_top_k == -1:
            return ""
        return self.best_model_path if self.monitor is None else self.kth_best_model_path

    def is_among_best(self, score: Tensor) -> bool:
        """Return whether a checkpoint with this value of ``monitor`` would be kept.

        Args:
            score: Value of ``monitor`` for the checkpoint, a 0-d tensor.
        """
        worst = self.next_replaced
        return worst not in self.best_k_models or is_better(float(score), float(self.best_k_models[worst]), self.mode)

    # -- changes -------------------------------------------------------------------------------------------------

    def add(self, path: str, score: Tensor | None, replaced: str) -> None:
        """Rank a checkpoint that is about to be saved.

        Args:
            path: Path of the checkpoint.
            score: Value of ``monitor`` for the checkpoint; None without a monitor.
            replaced: Path of the checkpoint that the new one replaces, or "".
        """
        if score is None:
            self.best_model_path = path
            return
        previous_paths = {*self.best_k_models, ""}
        self.best_k_models = {p: s for p, s in self.best_k_models.items() if p != replaced} | {path: score}
        best = find_best_path(self.best_k_models, self.mode)
        # The best checkpoint of another directory, from before a resume, stays the best while none here is as good. (A
        # subclass that renames the best one leaves its score.)
        earlier = None if self.best_model_path in previous_paths else self.best_model_score
        if earlier is None or not is_better(float(earlier), float(self.best_k_models[best]), self.mode):
            self.best_model_path, self.best_model_score = best, self.best_k_models[best]

    def forget(self, paths: Iterable[str]) -> None:
        """Update the record after checkpoints were deleted from disk.

        Args:
            paths: Paths of the deleted checkpoints.
        """
        missing = set(paths)
        self.best_k_models = {path: score for path, score in self.best_k_models.items() if path not in missing}
        if self.best_model_path in missing:
            self.best_model_path = find_best_path(self.best_k_models, self.mode) if self.best_k_models else ""
            self.best_model_score = self.best_k_models.get(self.best_model_path)

    def replace_since(self, snapshot: Mapping[str, Any], reserved: set[str]) -> None:
        """Set ``replaced`` to the checkpoints that were kept before, no longer are, and are not reserved.

        Args:
            snapshot: The `snapshot` to compare with.
            reserved: Paths of other callbacks, which this callback must not remove.
        """
        earlier = {snapshot["last_model_path"], *snapshot["best_k_models"]}
        if self.monitor is None and self.save_top_k == 1:
            earlier.add(snapshot["best_model_path"])
        self.replaced = sorted(earlier - {""} - self.paths - reserved)

    def snapshot(self) -> dict[str, Any]:
        """Return the values that a save changes."""
        return {name: getattr(self, name) for name in (*STATE, "replaced", "saved_step")}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Set values of the record, such as those of a `snapshot`.

        Args:
            snapshot: The values, by attribute.
        """
        for name, value in snapshot.items():
            setattr(self, name, value)


def recorded(name: str) -> Any:
    """Return a property that forwards a callback's attribute to its `TopKCheckpoints`.

    Args:
        name: Name of the attribute.
    """
    return property(attrgetter(f"_top_k.{name}"), lambda callback, value: setattr(callback._top_k, name, value))


def find_best_path(scores: Mapping[str, Tensor], mode: str, worst: bool = False) -> str:
    """Return the path with the best or, with ``worst``, the worst score. NaN is worse than any number."""

    def rank(path: str) -> tuple[bool, float]:
        value = float(scores[path])
        return math.isnan(value), 0.0 if math.isnan(value) else value if mode == "min" else -value

    return (max if worst else min)(scores, key=rank)


def relocate(state: dict[str, Any], directory: str) -> dict[str, Any]:
    """Return a callback's saved state, with updated paths if its folder was moved to ``directory`` after the save.

    Args:
        state: State of a `ModelCheckpoint`.
        directory: The current directory of the callback.
    """
    old_directory = state["dirpath"]
    if old_directory in (None, directory) or as_path(old_directory).is_dir():
        return state

    def relocate_path(path: str) -> str:
        place, folder = as_path(path) if path else None, as_path(old_directory)
        if place is None or folder not in place.parents:
            return path
        moved = as_path(directory) / str(place)[len(str(folder)) :].lstrip("/\\")
        return str(moved) if is_checkpoint(moved) else path

    paths = {name: relocate_path(state[name]) for name in ("best_model_path", "last_model_path")}
    best = {relocate_path(path): score for path, score in state["best_k_models"].items()}
    if best.keys() == state["best_k_models"].keys() and all(state[name] == path for name, path in paths.items()):
        return state  # none of its checkpoints is in the new directory
    replaced = [relocate_path(path) for path in state["replaced"]]
    return {**state, **paths, "best_k_models": best, "replaced": replaced, "dirpath": directory}


def remove(path: str, directory: str, resumed: str | None, plugin: Any = None) -> bool:
    """Delete a checkpoint if it exists, and return whether it was deleted. Warn if it cannot be deleted.

    The checkpoint that the run was resumed from is never deleted, nor are checkpoints in other directories.

    Args:
        path: Path of the checkpoint.
        directory: Directory of the callback's checkpoints.
        resumed: The checkpoint that the run was resumed from, or None.
        plugin: The user's ``CheckpointIO``, which has written the checkpoint. Default: none.
    """
    place = as_path(path)
    if as_path(directory) not in place.parents:
        return False
    try:
        if not place.exists() or (resumed is not None and _is_same(as_path(resumed), place)):
            return False
        if plugin is None or is_checkpoint(path):
            store.remove(path)
        else:
            plugin.remove_checkpoint(path)
    except (OSError, ValueError) as error:  # the new checkpoint is saved, so a leftover must not end the run
        warn(f"{path} is no longer among the checkpoints to keep, but cannot be deleted: {error}")
        return False
    return True


def _is_same(resumed: AnyPath, place: AnyPath) -> bool:
    if isinstance(resumed, Path) and isinstance(place, Path):
        return resumed.exists() and os.path.samefile(resumed, place)
    return resumed == place


def finish_removing(paths: Iterable[str], directory: str, step: int, resumed: str | None) -> list[str]:
    """Delete checkpoints that a killed run had replaced but not deleted, and return their paths.

    Args:
        paths: The replaced checkpoints.
        directory: Directory of the callback's checkpoints.
        step: Optimizer step of the latest checkpoint. Later checkpoints are kept.
        resumed: The checkpoint that the run resumes from, or None.
    """
    leftovers = [path for path in paths if is_checkpoint(path) and _read_step(path, default=step) < step]
    return [path for path in leftovers if remove(path, directory, resumed)]


def is_abandoned(path: str, step: int, resumed_step: int | None) -> bool:
    """Return whether this run saved ``path`` at the current step before it was resumed from an earlier step.

    Args:
        path: Path of the checkpoint.
        step: The current optimizer step.
        resumed_step: The step that the run was resumed from, or None.
    """
    return resumed_step is not None and step > resumed_step and _read_step(path, default=-1) == step


def _read_step(path: str, default: int) -> int:
    try:
        return read_manifest(path).step
    except ValueError:
        return default
