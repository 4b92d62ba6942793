"""Lightning's helpers for hyperparameters, and for attributes of a task and its data module."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, MutableMapping, Sequence
from types import FrameType
from typing import Any

_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def get_init_args(frame: FrameType) -> dict[str, Any]:
    """Return the arguments of the ``__init__`` that runs in a frame, by name; an empty dict for any other frame.

    An ``__init__`` that does not refer to ``__class__``, as ``super()`` does, counts as any other frame.
    """
    local = inspect.getargvalues(frame).locals
    if "__class__" not in local or frame.f_code.co_name != "__init__":
        return {}
    parameters = list(inspect.signature(local["__class__"].__init__).parameters.values())
    arguments = {parameter.name: local[parameter.name] for parameter in parameters[1:]}
    for parameter in parameters:
        if parameter.kind in _VARIADIC:
            given = arguments.pop(parameter.name)
            arguments |= given if isinstance(given, dict) else {}
    return arguments


def save_hyperparameters(
    obj: Any,
    *args: Any,
    ignore: Sequence[str] | str | None = None,
    frame: FrameType | None = None,
    given_hparams: dict[str, Any] | None = None,
) -> None:
    """Call ``obj.save_hyperparameters``; see `HyperparametersMixin`.

    Args:
        obj: A task, a data module, or another object with the method ``save_hyperparameters``.
        *args: Names of the arguments to save, or one object that holds all hyperparameters. Default: all arguments.
        ignore: Name or names to omit. Default: None.
        frame: The frame whose arguments are saved. Default: the caller's.
        given_hparams: Values to save instead of a frame's arguments. Default: the fields of a dataclass, otherwise
            None.
    """
    if dataclasses.is_dataclass(obj) and given_hparams is None:
        given_hparams = {field.name: getattr(obj, field.name) for field in dataclasses.fields(obj) if field.init}
    if given_hparams is not None:
        names = [name for name in args if isinstance(name, str)] or list(given_hparams)
        args = ({name: given_hparams[name] for name in names},)
    obj.save_hyperparameters(*args, ignore=ignore, frame=frame or inspect.currentframe().f_back)  # type: ignore[union-attr]


def _find_holders(model: Any, attribute: str) -> list[Any]:
    trainer = model.__dict__.get("_trainer")
    holders = []
    for owner in (model, None if trainer is None else trainer.datamodule):
        if owner is not None:
            holders += [owner] if hasattr(owner, attribute) else []
            holders += [owner.hparams] if attribute in getattr(owner, "hparams", ()) else []
    return holders


def _get_holders(model: Any, attribute: str) -> list[Any]:
    holders = _find_holders(model, attribute)
    if not holders:
        raise AttributeError(
            f"neither the task nor its data module has an attribute or a hyperparameter {attribute!r}. Define it, or "
            "correct the name."
        )
    return holders


def lightning_hasattr(model: Any, attribute: str) -> bool:
    """Return whether a task, its data module or the hyperparameters of either have an attribute."""
    return bool(_find_holders(model, attribute))


def lightning_getattr(model: Any, attribute: str) -> Any:
    """Return an attribute of a task, its data module, or the hyperparameters of either.

    The data module precedes the task, and hyperparameters precede attributes.

    Raises:
        AttributeError: If none of these objects has the attribute.
    """
    holder = _get_holders(model, attribute)[-1]
    return holder[attribute] if isinstance(holder, Mapping) else getattr(holder, attribute)


def lightning_setattr(model: Any, attribute: str, value: Any) -> None:
    """Set an attribute wherever it exists: in a task, its data module, and the hyperparameters of either.

    Raises:
        AttributeError: If none of these objects has the attribute.
    """
    for holder in _get_holders(model, attribute):
        if isinstance(holder, MutableMapping):
            holder[attribute] = value
        else:
            setattr(holder, attribute, value)
