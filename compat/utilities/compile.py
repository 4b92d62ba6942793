"""Tasks wrapped by ``torch.compile``."""

from __future__ import annotations

from typing import Any

from ...trainer import TaskModule
from ...trainer.loop.stage import uncompiled

__all__ = ["from_compiled", "to_uncompiled"]


def from_compiled(model: Any) -> TaskModule:
    """Return the task inside the result of ``torch.compile(task)``. A Trainer compiles the task's parts.

    Args:
        model: The compiled task.

    Raises:
        ValueError: If the argument is not a compiled task.
    """
    task = uncompiled(model)
    if task is model or not isinstance(task, TaskModule):
        raise ValueError(f"from_compiled takes the result of torch.compile for a TaskModule, not a {_name(model)}.")
    return task


def to_uncompiled(model: Any) -> TaskModule:
    """Return the task inside the result of ``torch.compile(task)`` or `from_compiled`, without its compilation.

    Args:
        model: The compiled task.

    Raises:
        ValueError: If the argument is not a compiled task.
    """
    task = uncompiled(model)
    if not isinstance(task, TaskModule) or task.__dict__.pop("_compiler", None) is None:
        raise ValueError(f"to_uncompiled takes a compiled TaskModule, not a {_name(model)} that is not compiled.")
    return task


def _name(model: Any) -> str:
    return type(model).__name__
