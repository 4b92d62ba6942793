"""Record of the checkpoints that a `ModelCheckpoint` keeps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, overload

from torch import Tensor

from ...common.remote_path import as_path
from ...engine.checkpoint import is_checkpoint
from ..monitored_metric import is_better

Value = TypeVar("Value")

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

    def replace_since(self, before: Mapping[str, Any], reserved: set[str]) -> None:
        """Set ``replaced`` to the checkpoints that were kept before, no longer are, and are not reserved.

        Args:
            before: The `snapshot` to compare with.
            reserved: Paths of other callbacks, which this callback must not remove.
        """
        earlier = {before["last_model_path"], *before["best_k_models"]}
        if self.monitor is None and self.save_top_k == 1:
            earlier.add(before["best_model_path"])
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


class Recorded(Generic[Value]):
    """Descriptor that forwards a callback's attribute to its `TopKCheckpoints`.

    Args:
        owner: Name of the callback's attribute that holds the `TopKCheckpoints`.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner

    def __set_name__(self, callback_class: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, callback: None, callback_class: type) -> Recorded[Value]: ...
    @overload
    def __get__(self, callback: object, callback_class: type) -> Value: ...
    def __get__(self, callback: object | None, callback_class: type) -> Any:
        return self if callback is None else getattr(getattr(callback, self._owner), self._name)

    def __set__(self, callback: object, value: Value) -> None:
        setattr(getattr(callback, self._owner), self._name, value)


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
    before = state["dirpath"]
    if before in (None, directory) or as_path(before).is_dir():
        return state

    def relocate_path(path: str) -> str:
        place, folder = as_path(path) if path else None, as_path(before)
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
