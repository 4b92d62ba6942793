"""A callback made of functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..common.messages import nearest
from .callback import HOOKS, Callback


class LambdaCallback(Callback):
    """A callback made of functions: ``LambdaCallback(on_train_end=lambda trainer, pl_module: print("done"))``.

    Args:
        hooks: A function for each hook's name, with the arguments of `Callback`'s method of that name, less ``self``;
            None for none.

    Raises:
        TypeError: For a hook that doesn't exist, with the nearest one, or for something that can't be called.
    """

    def __init__(self, **hooks: Callable[..., Any] | None) -> None:
        for name, function in hooks.items():
            if name not in HOOKS:
                raise TypeError(f"LambdaCallback: there is no hook {name!r}.{nearest(name, HOOKS)}")
            if function is None:
                continue
            if not callable(function):
                raise TypeError(f"LambdaCallback: {name}={function!r} is no function.")
            setattr(self, name, function)
