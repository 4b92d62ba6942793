"""Checks that ranks have the same settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from ...engine import check_values_match
from ...strategies import World
from ..core import SchedulerConfig, TaskModule, overrides

if TYPE_CHECKING:
    from ..trainer import Trainer

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


def collect_settings(trainer: Trainer, stage: str, task: TaskModule, ckpt_path: Any) -> dict[str, Any]:
    """Return the settings that ranks compare when a stage begins, by their user-facing names.

    Ranks may pass different paths as ``ckpt_path``, because rank zero resolves the checkpoint.
    """
    accelerator = trainer.accelerator
    return {
        "stage": stage,
        "has a validation_step": overrides(task, "validation_step"),
        "automatic_optimization": task.automatic_optimization,
        "ckpt_path": ckpt_path if ckpt_path is None or ckpt_path in _WORDS else "a path",
        "strategy": accelerator.strategy.name,
        "precision": accelerator.precision.name,
        "val_check_interval (seconds)": trainer.val_check_seconds,
        **{flag: getattr(trainer, flag) for flag in _FLAGS},
        "callbacks": [type(callback).__name__ for callback in trainer.callbacks if callback.exchanges],
    }


def check_optimizers_match(
    task: TaskModule, optimizers: Sequence[Optimizer], schedulers: Sequence[SchedulerConfig], world: World
) -> None:
    """Check that ``configure_optimizers`` gave every rank the same result. Call it on all ranks.

    Raises:
        ValueError: On every rank, if the results differ, because replicas would silently diverge.
    """
    if world.size == 1:
        return
    names = {id(parameter): name for name, parameter in task.named_parameters()}
    values: dict[str, Any] = {"optimizers": [type(optimizer).__name__ for optimizer in optimizers]}
    for number, optimizer in enumerate(optimizers):
        for position, group in enumerate(optimizer.param_groups):
            label = f"optimizer {number}, group {position}"
            values[f"{label}, params"] = [names.get(id(parameter), "?") for parameter in group["params"]]
            for key, value in group.items():
                if key != "params":
                    values[f"{label}, {key}"] = _make_comparable(value)
    values["schedulers"] = [
        (type(config.scheduler).__name__, config.interval, config.frequency, config.monitor) for config in schedulers
    ]
    check_values_match(
        f"{type(task).__name__}.configure_optimizers returned different results on the ranks", values, world
    )


def _make_comparable(value: Any) -> Any:
    """Return a value in a form that ranks can compare.

    An object is compared by the name of its class, because its ``repr`` may contain an address.
    """
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [_make_comparable(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else type(value).__name__
