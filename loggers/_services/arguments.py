"""Argument checks for the loggers of tracking services, before a run begins."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...common.messages import nearest
from ...common.validation import check_bool_or_word, check_text
from .side_effects import undisturbed


def check_arguments(log_model: bool | str, texts: Mapping[str, Any]) -> None:
    """Raise a ValueError if ``log_model`` is invalid, or a TypeError if one of ``texts`` is not a string or None."""
    for argument, value in texts.items():
        if value is not None:
            check_text(argument, value)
    check_bool_or_word("log_model", log_model, ("all",))


def check_options(function: str, options: Mapping[str, Any], also: Iterable[str] = ()) -> None:
    """Raise a TypeError for options that a function of a service does not accept.

    Args:
        function: Full name of the function, such as ``"trackio.init"``.
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
    arguments = inspect.signature(target).parameters.values()
    check_names(function, options, [*(a.name for a in arguments if a.kind is not a.VAR_KEYWORD), *also])


def check_names(function: str, options: Iterable[str], valid: Sequence[str]) -> None:
    """Raise a TypeError for the first option that is not a valid name. The error does not show values such as tokens.

    Args:
        function: Name of the function, for the error message.
        options: Names of the options.
        valid: Names of the function's arguments.
    """
    for option in options:
        if option not in valid:
            raise TypeError(
                f"{function} has no argument {option!r}. Its arguments are {', '.join(valid)}.{nearest(option, valid)}"
            )
