"""Lookup of classes by short name, and of classes and functions by import path."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from .... import callbacks, loggers, strategies
from ....common.messages import nearest
from ....engine import profilers
from ....trainer.core import DataModule, TaskModule
from ..values import ConfigError

_SHELVES: tuple[tuple[type, str], ...] = (
    (callbacks.Callback, callbacks.__name__),
    (loggers.Logger, loggers.__name__),
    (strategies.Strategy, strategies.__name__),
    (profilers.Profiler, profilers.__name__),
    (torch.optim.Optimizer, "torch.optim"),
    (torch.optim.lr_scheduler.LRScheduler, "torch.optim.lr_scheduler"),
    (torch.nn.Module, "torch.nn"),
)
"""Base classes, each with the module in which its subclasses are looked up by short name."""
_ROOMS = [home for _, home in _SHELVES]


def list_shelved() -> list[type]:
    """Return the base classes whose subclasses have short names."""
    return [kind for kind, _ in _SHELVES]


def is_shelved(base: Any) -> bool:
    """Return whether a configuration must name a subclass of ``base`` instead of ``base`` itself."""
    return base in (TaskModule, DataModule, *(kind for kind, _ in _SHELVES)) or inspect.isabstract(base)


def list_short_names(base: Any) -> dict[str, str]:
    """Return the short names of subclasses of ``base``, each with its module.

    If ``base`` is ``object``, all short names are returned.
    """
    if base is object:
        return {name: home for kind in list_shelved() for name, home in list_short_names(kind).items()}
    homes: dict[str, str] = {}
    for kind, home in _SHELVES:
        if not (isinstance(base, type) and issubclass(base, kind)):
            continue
        module = importlib.import_module(home)
        for name in getattr(module, "__all__", None) or dir(module):
            # An export that is imported on first use should not be imported just to compare its name.
            lazy = kind is base and name not in vars(module) and name[:1].isupper()
            if name != kind.__name__ and (lazy or _is_subclass(getattr(module, name, None), base)):
                homes[name] = home
    for cls in _iterate_loaded_classes(base):
        homes.setdefault(cls.__qualname__, cls.__module__)
    return homes


def find(name: str, base: Any) -> Any:
    """Return the class or function that a short name, a name in the running script, or an import path refers to.

    Short names are limited to subclasses of ``base``. The function does not check that its result is such a subclass.

    Raises:
        ConfigError: If the name is unknown or ambiguous.
    """
    homes = list_short_names(base)
    if name in homes:
        kinds = [] if homes[name] in _ROOMS else list_shelved() if base is object else [base]
        paths = {
            f"{cls.__module__}.{name}"
            for kind in kinds
            for cls in _iterate_loaded_classes(kind)
            if cls.__qualname__ == name
        }
        if len(paths) > 1:
            raise ConfigError(f"{name!r} is ambiguous: it may be {' or '.join(sorted(paths))}. Use the import path.")
        return _get_attribute(importlib.import_module(homes[name]), name)
    if "." not in name:
        main = getattr(sys.modules.get("__main__"), name, None)
        if main is not None:
            return main
        hint = nearest(name, homes)
        one_of = "one of " if len(homes) > 1 else ""
        raise ConfigError(
            f"there is no {_format_noun(base)}{name!r}.{hint} Use {one_of}{_format_some(homes)}, or an import path, "
            "such as 'my_package.module.Name'."
            if homes
            else f"{name!r} must be an import path, such as 'my_package.module.{name}'."
        )
    return import_target(name)


def import_target(name: str) -> Any:
    """Return the object at an import path, such as ``"my_package.module.Name"``."""
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        raise ConfigError(f"{name!r} must be an import path, such as 'my_package.module.Name'.")
    module: Any = None
    for end in range(1, len(parts)):
        path = ".".join(parts[:end])
        try:
            module = importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name is None or not (path == error.name or path.startswith(f"{error.name}.")):
                place = traceback.extract_tb(error.__traceback__)
                asking = next(
                    (f"{f.filename}:{f.lineno}" for f in reversed(place) if "importlib" not in f.filename), path
                )
                raise ConfigError(
                    f"{path!r} can't be imported: {asking} imports {error.name!r}, which is not installed. Install it."
                ) from error
            if module is None:
                hint = nearest(parts[0], _list_importable_modules())
                hint = suggest_short_name(parts[-1]) or hint
                raise ConfigError(
                    f"module {parts[0]!r} was not found in {Path.cwd()} or among the installed packages.{hint}"
                ) from None
            break
        except Exception as error:
            error.add_note(f"while importing {path!r} for {name!r} in the configuration")
            raise
        target = getattr(module, parts[end], None)
        if target is not None and not inspect.ismodule(target):
            break
    target = module
    for done, part in enumerate(parts[len(module.__name__.split(".")) :], len(module.__name__.split("."))):
        target = _get_attribute(target, part, ".".join(parts[:done]))
    return target


def suggest_short_name(name: str, base: type = object) -> str:
    """Return a hint if a subclass of ``base`` has the short name ``name``; otherwise, an empty string."""
    return f" Use the short name {name!r}." if name in list_short_names(base) else ""


def _get_attribute(holder: Any, name: str, path: str = "") -> Any:
    for part in name.split("."):
        try:
            holder = getattr(holder, part)
        except AttributeError:
            public_names = [member for member in dir(holder) if not member.startswith("_")]
            hint = nearest(part, public_names)
            raise ConfigError(f"{path or holder!r} has no {part!r}.{hint}") from None
    return holder


def _is_subclass(candidate: Any, base: type) -> bool:
    return isinstance(candidate, type) and issubclass(candidate, base)


def _iterate_loaded_classes(base: Any) -> Iterator[type]:
    """Iterate over imported, non-local subclasses of ``base`` that belong neither to torch nor to Treadle."""
    cls: type
    for cls in type.__subclasses__(base) if isinstance(base, type) else ():
        if not cls.__module__.startswith(("torch.", "treadle.")) and "<" not in cls.__qualname__:
            yield cls
        yield from _iterate_loaded_classes(cls)


def _list_importable_modules() -> list[str]:
    current_directory = Path.cwd()
    files = [file.stem for file in current_directory.glob("*.py")]
    return [
        *files,
        *(init_file.parent.name for init_file in current_directory.glob("*/__init__.py")),
        "torch",
        "treadle",
    ]


def _format_noun(base: Any) -> str:
    return f"{base.__name__} named " if isinstance(base, type) and base is not object else ""


def _format_some(choices: Any) -> str:
    names = sorted(choices)
    return ", ".join(names) if len(names) <= 40 else ", ".join(names[:12]) + ", ..."
