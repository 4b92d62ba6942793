"""Which checkpoints a callback keeps, and which of them is the best."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..monitored_metric import better
from .removal import best_of

if TYPE_CHECKING:
    from ...trainer import Trainer


class KeptCheckpoints:
    """The part of a `ModelCheckpoint` that knows what is kept."""

    monitor: str | None
    mode: str
    save_top_k: int
    best_model_path: str
    best_model_score: Tensor | None
    best_k_models: dict[str, Tensor]
    last_model_path: str
    _replaced_now: list[str]  # what the checkpoint that is being saved takes the place of

    @property
    def kth_best_model_path(self) -> str:
        """The worst that is kept, which the next better one takes the place of; "" while there is room."""
        if not self.best_k_models or (self.save_top_k != -1 and len(self.best_k_models) < self.save_top_k):
            return ""
        return best_of(self.best_k_models, self.mode, worst=True)

    def _is_worth_it(self, score: Tensor | None) -> bool:
        worst = self._replaced() if score is not None else ""
        return not worst or better(float(score), float(self.best_k_models[worst]), self.mode)  # type: ignore[arg-type]

    def _replaced(self) -> str:
        """The checkpoint that the next one takes the place of; "" if there is room for it."""
        if self.save_top_k == -1:
            return ""
        return self.best_model_path if self.monitor is None else self.kth_best_model_path

    def _keep(self, path: str, score: Tensor | None, replaced: str) -> None:
        if score is None:
            self.best_model_path = path
            return
        known = {*self.best_k_models, ""}
        self.best_k_models = {p: s for p, s in self.best_k_models.items() if p != replaced} | {path: score}
        best = best_of(self.best_k_models, self.mode)
        earlier = None if self.best_model_path in known else self.best_model_score  # of the directory before a resume
        if earlier is None or better(float(self.best_k_models[best]), float(earlier), self.mode):
            self.best_model_path, self.best_model_score = best, self.best_k_models[best]

    def _forget_missing(self, trainer: Trainer) -> None:
        """Forget those that somebody has removed, by rank zero's disk. All processes must call it."""
        known = {*self.best_k_models, self.best_model_path} - {""}
        gone = trainer.accelerator.world.broadcast([path for path in sorted(known) if not os.path.exists(path)])
        self.best_k_models = {path: value for path, value in self.best_k_models.items() if path not in gone}
        if self.best_model_path in gone:
            self.best_model_path = best_of(self.best_k_models, self.mode) if self.best_k_models else ""
            self.best_model_score = self.best_k_models.get(self.best_model_path)

    def _held_by_others(self, trainer: Trainer) -> set[str]:
        """What the other callbacks of this run keep, are saving, or will remove when that is in place."""
        held = {""}
        for other in trainer.checkpoint_callbacks:
            if other is not self:
                held |= {other.best_model_path, other.last_model_path, *other.best_k_models, *other._replaced_now}
        return held - {""}


def moved(state: dict[str, Any], home: str) -> dict[str, Any]:
    """A callback's state with the paths of today, if its folder has been moved to ``home`` since it was saved."""
    before = state["dirpath"]
    if before in (None, home) or os.path.isdir(before):
        return state

    def now(path: str) -> str:
        there = os.path.join(home, os.path.relpath(path, before)) if path else ""
        return there if os.path.isdir(there) else path

    paths = {name: now(state[name]) for name in ("best_model_path", "last_model_path")}
    best = {now(path): score for path, score in state["best_k_models"].items()}
    if best.keys() == state["best_k_models"].keys() and all(state[name] == path for name, path in paths.items()):
        return state  # nothing of it is there
    replaced = [now(path) for path in state["replaced"]]
    return {**state, **paths, "best_k_models": best, "replaced": replaced, "dirpath": home}
