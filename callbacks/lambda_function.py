"""`LambdaCallback`: a callback whose hooks are functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..common.messages import nearest
from .callback import HOOKS, Callback


class LambdaCallback(Callback):
    """Callback whose hooks are passed as functions.

    Args:
        hooks: Functions by hook name. Each takes the arguments of the hook in `Callback`, except ``self``. A hook that
            is None is ignored.

    Raises:
        TypeError: If a hook does not exist, or a value is neither callable nor None.

    Examples:
        >>> import treadle as tl
        >>> from treadle.callbacks import LambdaCallback
        >>> from treadle.compat.demos.boring_classes import BoringModel
        >>> callback = LambdaCallback(on_train_end=lambda trainer, pl_module: print("done"))
        >>> trainer = tl.Trainer(max_steps=1, accelerator="cpu", devices=1, barebones=True, callbacks=callback)
        >>> trainer.fit(BoringModel())
        done
    """

    def __init__(self, **hooks: Callable[..., Any] | None) -> None:
        for name, function in hooks.items():
            if name not in HOOKS:
                raise TypeError(f"LambdaCallback: {name!r} is not a hook.{nearest(name, HOOKS)}")
            if function is None:
                continue
            if not callable(function):
                raise TypeError(f"LambdaCallback: {name}={function!r} must be a function.")
            setattr(self, name, function)
