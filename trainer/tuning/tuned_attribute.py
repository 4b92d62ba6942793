"""Attribute that a search sets: on the task, the data module, or the hyperparameters of either."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...callbacks import Callback
from ...common.messages import nearest

if TYPE_CHECKING:
    from ..trainer import Trainer


def attribute_owners(trainer: Trainer, name: str) -> list[Any]:
    """Return the objects that have an attribute ``name``: the task, the data module, or the hparams of either."""
    owners: list[Any] = []
    for module in (trainer.task, trainer.datamodule):
        if module is None:
            continue
        if name in module.hparams:
            owners.append(module.hparams)
        if hasattr(module, name):
            owners.append(module)
    return owners


def get_attribute(trainer: Trainer, name: str) -> Any:
    """Return the value of the attribute; a data module's value takes precedence over the task's."""
    owner = attribute_owners(trainer, name)[-1]
    return owner[name] if isinstance(owner, dict) else getattr(owner, name)


def set_attribute(trainer: Trainer, name: str, value: Any) -> None:
    """Set the attribute on every object that `attribute_owners` returns."""
    for owner in attribute_owners(trainer, name):
        setattr(owner, name, value)


def check_attribute(trainer: Trainer, finder: Callback, name: str, argument: str) -> None:
    """Raise a ValueError if neither the task, the data module nor their hparams have the attribute."""
    if attribute_owners(trainer, name):
        return
    modules = [module for module in (trainer.task, trainer.datamodule) if module is not None]
    valid_names = {key for module in modules for key in (*vars(module), *module.hparams) if not key.startswith("_")}
    places = " or ".join(type(module).__name__ for module in modules)
    raise ValueError(
        f"{type(finder).__name__}: {argument}={name!r} is neither an attribute nor a hyperparameter of {places}. Set "
        f"self.{name} in __init__ and use it.{nearest(name, valid_names)}"
    )
