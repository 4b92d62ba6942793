"""Functions for tasks that are wrapped by ``torch.compile``."""

from __future__ import annotations

from typing import Any

from ...common.messages import name_type
from ...trainer import TaskModule
from ...trainer.loop.stage import uncompiled

__all__ = ["from_compiled", "to_uncompiled"]


def from_compiled(model: Any) -> TaskModule:
    """Return the task inside the result of ``torch.compile(task)``.

    A Trainer compiles its submodules with the arguments of ``torch.compile``.

    Raises:
        ValueError: If the argument is not a compiled task.
    """
    task = uncompiled(model)
    if task is model or not isinstance(task, TaskModule):
        raise ValueError(
            f"from_compiled got {_describe(model)}, but expects the result of torch.compile(task), where task is a "
            "TaskModule."
        )
    return task


def to_uncompiled(model: Any) -> TaskModule:
    """Return the task inside the result of ``torch.compile(task)`` or `from_compiled`, without its compilation.

    Raises:
        ValueError: If the argument is not a compiled task.
    """
    task = uncompiled(model)
    if not isinstance(task, TaskModule) or task.__dict__.pop("_compiler", None) is None:
        raise ValueError(
            f"to_uncompiled got {_describe(model)}, but expects the result of torch.compile(task) or from_compiled, "
            "where task is a TaskModule."
        )
    return task


def _describe(model: Any) -> str:
    inner = getattr(model, "_modules", {}).get("_orig_mod")
    if inner is not None:
        return f"a compiled {type(inner).__name__}"
    return f"{name_type(model)} that is not compiled" if isinstance(model, TaskModule) else name_type(model)
