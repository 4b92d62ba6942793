"""Queries about a task, and models of torchvision."""

from __future__ import annotations

from typing import Any

from lightning_utilities.core.overrides import is_overridden as has_other_method
from torch import nn

from ...callbacks import Callback
from ...common.messages import name_type
from ...trainer import DataModule, TaskModule

__all__ = ["get_torchvision_model", "is_overridden"]


def is_overridden(method_name: str, instance: object | None = None, parent: type[object] | None = None) -> bool:
    """Return whether an object overrides a method of its base class, which is determined from the object by default."""
    if instance is None:
        return False
    if parent is None:
        parent = next((base for base in (TaskModule, DataModule, Callback) if isinstance(instance, base)), None)
    if parent is None:
        raise ValueError(
            f"is_overridden got {name_type(instance)}, which is not a TaskModule, DataModule or Callback, so its base "
            "class is unknown. Pass the base class as parent=..."
        )
    return bool(has_other_method(method_name, instance, parent))


def get_torchvision_model(model_name: str, **kwargs: Any) -> nn.Module:
    """Return ``torchvision.models.get_model(model_name, **kwargs)``."""
    from torchvision import models

    model: nn.Module = models.get_model(model_name, **kwargs)
    return model
