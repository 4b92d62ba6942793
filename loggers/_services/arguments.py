"""Checks of the arguments of tracking services' loggers, while nothing runs yet."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from ...common.messages import nearest
from ...common.validation import check_bool_or_word, check_text
from .undisturbed import undisturbed


def check_arguments(log_model: bool | str, texts: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError for arguments that tracking services share."""
    for argument, value in texts.items():
        if value is not None:
            check_text(argument, value)
    check_bool_or_word("log_model", log_model, ("all",))


def check_options(function: str, options: Mapping[str, Any], also: Iterable[str] = ()) -> None:
    """Raise TypeError for what a service's function does not take, while nothing runs yet.

    Args:
        function: Its full name, such as ``"trackio.init"``. The package is imported only if there are options.
        options: What it will be called with, by name.
        also: Names that it takes and its signature does not show.
    """
    if not options:
        return
    package, *path = function.split(".")
    with undisturbed():
        target: Any = importlib.import_module(package)
    for part in path:
        target = getattr(target, part)
    valid = [*inspect.signature(target).parameters, *also]
    for option, value in options.items():
        if option not in valid:
            raise TypeError(
                f"{option}={value!r} is not an argument: {function} accepts {', '.join(valid)}.{nearest(option, valid)}"
            )
