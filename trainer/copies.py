"""Copies of a Trainer, made by pickle or deepcopy, which leave out what belongs to the process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .trainer import Trainer

# A copy creates these on first use, so that loading one starts no process and joins no process group.
_OF_PROCESS = ("accelerator", "preemption", "checkpointer")
_OF_STAGE = ("stage", "hooks", "sources", "steps", "last_step", "opened_checkpoint", "profiled")


def collect_state(trainer: Trainer) -> dict[str, Any]:
    """Return the attributes that a copy gets: flags, callbacks, loggers, logged values, counters, task, data module.

    Args:
        trainer: Trainer to copy.
    """
    state = {name: value for name, value in vars(trainer).items() if name not in _OF_PROCESS}
    return state | dict.fromkeys(_OF_STAGE) | {"lr_scheduler_configs": []}


def lacks(trainer: Trainer, name: str) -> bool:
    """Return whether an attribute is one that a copy creates on first use.

    Args:
        trainer: Trainer without this attribute.
        name: Name of the attribute.
    """
    return name in _OF_PROCESS and "logbook" in vars(trainer)
