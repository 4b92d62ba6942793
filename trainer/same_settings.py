"""What every rank must have alike when a stage begins: all that decides its steps and its collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .task import TaskModule
    from .trainer import Trainer

# `max_time` may differ: the first rank whose time is over stops all of them.
_FLAGS = (
    "max_epochs",
    "max_steps",
    "min_epochs",
    "min_steps",
    "limit_train_batches",
    "limit_val_batches",
    "limit_test_batches",
    "limit_predict_batches",
    "overfit_batches",
    "fast_dev_run",
    "val_check_interval",
    "check_val_every_n_epoch",
    "num_sanity_val_steps",
    "log_every_n_steps",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "use_distributed_sampler",
    "reload_dataloaders_every_n_epochs",
    "on_nonfinite",
    "barebones",
)
_WORDS = ("last", "best", "auto")


def same_settings(trainer: Trainer, stage: str, task: TaskModule, ckpt_path: Any) -> dict[str, Any]:
    """Return what the ranks compare as a stage begins, by the names that users know.

    Args:
        trainer: whose flags are meant.
        stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        task: what runs.
        ckpt_path: as it was given. Rank zero finds the checkpoint, so its place may be written in any way.
    """
    accelerator = trainer.accelerator
    return {
        "stage": stage,
        "task": type(task).__qualname__,
        "automatic_optimization": task.automatic_optimization,
        "ckpt_path": ckpt_path if ckpt_path is None or ckpt_path in _WORDS else "a path",
        "strategy": accelerator.strategy.name,
        "precision": accelerator.precision.name,
        "val_check_interval (seconds)": trainer.val_check_seconds,
        **{flag: getattr(trainer, flag) for flag in _FLAGS},
        "callbacks": [type(callback).__name__ for callback in trainer.callbacks if callback.exchanges],
    }
