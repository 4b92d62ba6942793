"""Private attributes and methods of Lightning's ModelCheckpoint that subclasses in public projects use or override."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...common.messages import warn
from .removal import remove
from .top_k import TopKCheckpoints

if TYPE_CHECKING:
    from ...trainer import Trainer

# Lightning methods that Treadle never calls, with replacements.
_SAVE = "Override _save_checkpoint(trainer, filepath) or check_monitor_top_k instead."
_FORMAT = "Override format_checkpoint_name instead."
_NEVER_CALLED = {
    "_save_topk_checkpoint": _SAVE,
    "_save_last_checkpoint": _SAVE,
    "_save_monitor_checkpoint": _SAVE,
    "_save_none_monitor_checkpoint": _SAVE,
    "_save_model": _SAVE,
    "_should_skip_saving_checkpoint": _SAVE,
    "_get_metric_interpolated_filepath_name": _FORMAT,
    "_format_checkpoint_name": _FORMAT,
    "_del_model": "Override _remove_checkpoint instead.",
}


class CheckpointAliases:
    """Base class of `ModelCheckpoint` with Lightning's names."""

    _top_k: TopKCheckpoints
    every_n_train_steps: int
    every_n_epochs: int
    train_time_interval: timedelta | None
    save_last: bool

    @property
    def _directory(self) -> str:
        raise NotImplementedError

    def _save(self, trainer: Trainer, values: dict[str, float], ranked: bool) -> None:
        raise NotImplementedError

    def _save_kept(self, trainer: Trainer, values: dict[str, float], ranked: bool) -> None:
        raise NotImplementedError

    def _warn_of_never_called(self, base: type) -> None:
        for name, instead in _NEVER_CALLED.items():
            if getattr(type(self), name, None) is not getattr(base, name, None):
                warn(f"{type(self).__name__} overrides {name}, which Treadle never calls. {instead}")

    @property
    def _every_n_train_steps(self) -> int:
        return self.every_n_train_steps

    @property
    def _every_n_epochs(self) -> int:
        return self.every_n_epochs

    @property
    def _train_time_interval(self) -> timedelta | None:
        return self.train_time_interval

    @property
    def _last_global_step_saved(self) -> int:
        return self._top_k.saved_step

    @_last_global_step_saved.setter
    def _last_global_step_saved(self, step: int) -> None:
        self._top_k.saved_step = step

    @property
    def kth_value(self) -> Tensor:
        """Value of the worst ranked checkpoint, a 0-d tensor; infinite while fewer than ``save_top_k`` are ranked."""
        top_k = self._top_k
        worst = torch.tensor(float("inf") if top_k.mode == "min" else float("-inf"), device="cpu")
        return top_k.best_k_models.get(top_k.kth_best_model_path, worst)

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
