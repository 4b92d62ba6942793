"""Query about a method's signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["is_param_in_hook_signature"]


def is_param_in_hook_signature(
    hook_fx: Callable[..., Any], param: str, explicit: bool = False, min_args: int | None = None
) -> bool:
    """Return whether a method accepts a parameter. Keyword-only parameters and ``**kwargs`` are not considered.

    Args:
        hook_fx: Method whose first parameter is ``self``.
        param: Name of the parameter.
        explicit: Whether ``*args`` does not count as accepting the parameter. Default: False.
        min_args: A method with at least this many parameters, not counting ``self``, is assumed to accept any
            parameter. Default: None.
    """
    specification = inspect.getfullargspec(getattr(hook_fx, "__wrapped__", hook_fx))
    names = specification.args[1:]
    takes_any = not explicit and specification.varargs is not None
    return param in names or takes_any or (isinstance(min_args, int) and len(names) >= min_args)
