"""Hyperparameters: what a task or data module was built with, kept as plain data."""

from __future__ import annotations

import copy
import inspect
from argparse import Namespace
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any

from torch import nn

from ..engine.codec import encode
from ..strategies import warn


class AttributeDict(dict[str, Any]):
    """A dict whose keys are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no hyperparameter {name!r}; there are: {', '.join(self) or 'none'}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __repr__(self) -> str:
        return "\n".join(f"{name!r}: {value!r}" for name, value in self.items())


class HyperparametersMixin:
    """Adds ``save_hyperparameters`` and ``hparams``."""

    log_hyperparameters = True
    hparams_name: str | None = None  # of the one argument that holds them all, where there is such a one

    def save_hyperparameters(
        self, *args: Any, ignore: str | Iterable[str] | None = None, frame: FrameType | None = None, logger: bool = True
    ) -> None:
        """Keep the arguments of ``__init__`` as ``self.hparams``; they are saved in checkpoints and logged.

        What can not be stored as plain data (a module, a function) is left out, with a warning that names it.

        Args:
            args: names of arguments to keep (all by default), or one mapping or namespace to keep instead.
            ignore: names to leave out.
            frame: whose arguments; the caller's by default.
            logger: whether loggers get them.
        """
        ignored = {ignore} if isinstance(ignore, str) else set(ignore or ())
        if len(args) == 1 and not isinstance(args[0], str):
            if not isinstance(args[0], Namespace | Mapping):
                raise TypeError(f"save_hyperparameters takes names, a mapping or a Namespace, not {args[0]!r}.")
            values = dict(vars(args[0])) if isinstance(args[0], Namespace) else dict(args[0])
            self.hparams_name = _name_of_argument(self, frame or inspect.currentframe().f_back, args[0])  # type: ignore[union-attr]
        else:
            caller = frame or inspect.currentframe().f_back  # type: ignore[union-attr]
            values = _init_arguments(self, caller)
            unknown = [name for name in args if name not in values]
            if unknown:
                raise ValueError(f"__init__ has no argument {unknown[0]!r}; it has {', '.join(values)}.")
            values = {name: value for name, value in values.items() if not args or name in args}
        kept = {name: value for name, value in values.items() if name not in ignored and _storable(name, value)}
        hparams = self.hparams
        hparams.update(copy.deepcopy(kept))
        self.log_hyperparameters = logger

    @property
    def hparams(self) -> AttributeDict:
        """What `save_hyperparameters` kept."""
        if "_hparams" not in self.__dict__:
            self.__dict__["_hparams"] = AttributeDict()
        return self.__dict__["_hparams"]

    @property
    def hparams_initial(self) -> AttributeDict:
        """A copy of `hparams`."""
        return copy.deepcopy(self.hparams)


def _name_of_argument(instance: Any, frame: FrameType | None, value: Any) -> str | None:
    """Which argument of ``__init__`` the whole of the hyperparameters was passed as."""
    arguments = _init_arguments(instance, frame)
    return next((name for name, argument in arguments.items() if argument is value), None)


def _init_arguments(instance: Any, frame: FrameType | None) -> dict[str, Any]:
    """The arguments of all of ``instance``'s ``__init__`` calls on the stack, the outermost class's last."""
    found: list[dict[str, Any]] = []
    while frame is not None and frame.f_code.co_name == "__init__":
        names, _, variadic, local = inspect.getargvalues(frame)
        names = [*names, *_keyword_only(frame)]
        if local.get(names[0] if names else "") is not instance:
            break
        values = {name: local[name] for name in names[1:] if name in local}
        if variadic is not None:
            values.update(local.get(variadic, {}))
        found.append(values)
        frame = frame.f_back
    merged: dict[str, Any] = {}
    for values in found:
        merged.update(values)
    return {name: value for name, value in merged.items() if name != "__class__"}


def _keyword_only(frame: FrameType) -> tuple[str, ...]:
    code = frame.f_code
    return code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]


def _storable(name: str, value: Any) -> bool:
    if isinstance(value, nn.Module):
        warn(
            f"save_hyperparameters leaves out {name!r}: a module is saved with the weights already. "
            f"Say ignore=[{name!r}] to silence this, and pass it to load_from_checkpoint."
        )
        return False
    try:
        encode(value)
    except (TypeError, ValueError) as error:
        warn(f"save_hyperparameters leaves out {name!r}, which is not plain data: {error}")
        return False
    return True
