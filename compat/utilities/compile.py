"""Tasks that ``torch.compile`` has wrapped."""

from __future__ import annotations

from typing import Any

from ...trainer import TaskModule
from ...trainer.loop.stage import uncompiled

__all__ = ["from_compiled", "to_uncompiled"]


def from_compiled(model: Any) -> TaskModule:
    """Return the task inside what ``torch.compile(task)`` returned. A Trainer compiles the parts of it.

    Raises:
        ValueError: for anything else.
    """
    task = uncompiled(model)
    if task is model or not isinstance(task, TaskModule):
        raise ValueError(f"from_compiled takes what torch.compile returned for a TaskModule, not a {_name(model)}.")
    return task


def to_uncompiled(model: Any) -> TaskModule:
    """Return the task inside what ``torch.compile(task)`` or `from_compiled` returned; nothing compiles it any more.

    Raises:
        ValueError: for a task that isn't compiled, and for anything else.
    """
    task = uncompiled(model)
    if not isinstance(task, TaskModule) or task.__dict__.pop("_compiler", None) is None:
        raise ValueError(f"to_uncompiled takes a compiled TaskModule, not a {_name(model)} that is not compiled.")
    return task


def _name(model: Any) -> str:
    return type(model).__name__
