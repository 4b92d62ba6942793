"""Names of a package that are imported when they are first used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any


def lazy_exports(
    package: str, homes: Mapping[str, str], names: Iterable[str] = (), modules: Iterable[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package whose names are imported when they are first used.

    Args:
        package: the package's ``__name__``.
        homes: for each name the module that defines it, relative to the package.
        names: the package's ``__all__``, which ``dir()`` lists; by default the lazy names.
        modules: modules of the package that are names of it too.

    Example:
        >>> __getattr__, __dir__ = lazy_exports(__name__, {"Trainer": "trainer"}, __all__)
    """
    modules = frozenset(modules)
    listed = sorted({*names} or {*homes, *modules})

    def find(name: str) -> Any:
        if name in modules:
            return import_module(f".{name}", package)
        if name not in homes:
            from .messages import nearest  # which no import of a name waits for

            hint = "" if name.startswith("__") else nearest(name, listed)
            # With an object Python would append a suggestion of its own.
            raise AttributeError(f"module {package!r} has no attribute {name!r}.{hint}", name=name, obj=None)
        value = getattr(import_module(f".{homes[name]}", package), name)
        setattr(sys.modules[package], name, value)  # found without a detour from now on
        return value

    return find, lambda: list(listed)
