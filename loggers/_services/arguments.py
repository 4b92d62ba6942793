"""Argument checks for the loggers of tracking services, before a run begins."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from ...common.messages import nearest
from ...common.validation import check_bool_or_word, check_text
from .undisturbed import undisturbed


def check_arguments(log_model: bool | str, texts: Mapping[str, Any]) -> None:
    """Raise a TypeError or ValueError if an argument that the loggers of all tracking services share is invalid."""
    for argument, value in texts.items():
        if value is not None:
            check_text(argument, value)
    check_bool_or_word("log_model", log_model, ("all",))


def check_options(function: str, options: Mapping[str, Any], also: Iterable[str] = ()) -> None:
    """Raise a TypeError for options that a function of a service does not accept.

    Args:
        function: Full name of the function, such as ``"trackio.init"``. Its package is imported only if there are
            options.
        options: Keyword arguments of the function by name.
        also: Names that the function accepts although its signature does not list them.
    """
    if not options:
        return
    package, *path = function.split(".")
    with undisturbed():
        target: Any = importlib.import_module(package)
    for part in path:
        target = getattr(target, part)
    valid = [*inspect.signature(target).parameters, *also]
    for option in options:  # its value is not shown, because it may be a key or a token
        if option not in valid:
            raise TypeError(
                f"{function} has no argument {option!r}. Its arguments are {', '.join(valid)}.{nearest(option, valid)}"
            )
