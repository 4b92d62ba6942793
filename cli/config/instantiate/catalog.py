"""Classes by name: a short one where it is plain what is meant, else an import path."""

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
"""Where classes that extend the first are looked for under their bare names."""
_ROOMS = [home for _, home in _SHELVES]


def shelved() -> list[type]:
    """The classes whose extensions have short names."""
    return [kind for kind, _ in _SHELVES]


def is_shelved(base: Any) -> bool:
    """Whether ``base`` only stands for others: a configuration has to say which of them."""
    return base in (TaskModule, DataModule, *(kind for kind, _ in _SHELVES)) or inspect.isabstract(base)


def short_names(base: Any) -> dict[str, str]:
    """What can be named without a path where a ``base`` is expected: bare names and where they are."""
    if base is object:
        return {name: home for kind in shelved() for name, home in short_names(kind).items()}
    found: dict[str, str] = {}
    for kind, home in _SHELVES:
        if not (isinstance(base, type) and issubclass(base, kind)):
            continue
        module = importlib.import_module(home)
        for name in getattr(module, "__all__", None) or dir(module):
            # What is imported when it is first used need not be for its name.
            lazy = kind is base and name not in vars(module) and name[:1].isupper()
            if name != kind.__name__ and (lazy or _extends(getattr(module, name, None), base)):
                found[name] = home
    for cls in _loaded(base):
        found.setdefault(cls.__qualname__, cls.__module__)
    return found


def find(name: str, base: Any) -> Any:
    """What a name stands for where a ``base`` (``object`` for anything) is expected.

    Raises:
        ConfigError: there is nothing of this name, with the nearest that is.
    """
    known = short_names(base)
    if name in known:
        kinds = [] if known[name] in _ROOMS else shelved() if base is object else [base]
        paths = {f"{cls.__module__}.{name}" for kind in kinds for cls in _loaded(kind) if cls.__qualname__ == name}
        if len(paths) > 1:
            raise ConfigError(f"{name!r} may be {' or '.join(sorted(paths))}: write the path.")
        return _attribute(importlib.import_module(known[name]), name)
    if "." not in name:
        main = getattr(sys.modules.get("__main__"), name, None)
        if main is not None:
            return main
        hint = nearest(name, known)
        raise ConfigError(
            f"there is no {_noun(base)}{name!r}.{hint} Name one of {_some(known)}, or an import path as "
            "'my_package.module.Name'."
            if known
            else f"{name!r} needs an import path, as 'my_package.module.{name}'."
        )
    return imported(name)


def imported(name: str) -> Any:
    """What an import path leads to.

    Raises:
        ConfigError: it leads nowhere, with the nearest name where it ends.
    """
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        raise ConfigError(f"{name!r} is no import path, as 'my_package.module.Name' is.")
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
                    f"{path!r} can't be imported: {asking} imports {error.name!r}, which is not there."
                ) from error
            if module is None:
                hint = nearest(parts[0], _importable_here())
                hint = own(parts[-1]) or hint
                raise ConfigError(f"there is no module {parts[0]!r} in {Path.cwd()} or installed.{hint}") from None
            break
        except Exception as error:
            error.add_note(f"while {path!r} was imported, for {name!r} in the configuration")
            raise
        found = getattr(module, parts[end], None)
        if found is not None and not inspect.ismodule(found):
            break
    found = module
    for done, part in enumerate(parts[len(module.__name__.split(".")) :], len(module.__name__.split("."))):
        found = _attribute(found, part, ".".join(parts[:done]))
    return found


def own(name: str, base: type = object) -> str:
    """A sentence for those who bring the path of another program's class where there is one of that name here."""
    return f" {name!r} alone, without a path, is known here." if name in short_names(base) else ""


def _attribute(holder: Any, name: str, path: str = "") -> Any:
    for part in name.split("."):
        try:
            holder = getattr(holder, part)
        except AttributeError:
            known = [one for one in dir(holder) if not one.startswith("_")]
            hint = nearest(part, known)
            raise ConfigError(f"{path or holder!r} has no {part!r}.{hint}") from None
    return holder


def _extends(one: Any, base: type) -> bool:
    return isinstance(one, type) and issubclass(one, base)


def _loaded(base: Any) -> Iterator[type]:
    """The classes of users and their libraries that extend ``base``, as far as they are imported."""
    cls: type
    for cls in type.__subclasses__(base) if isinstance(base, type) else ():
        if not cls.__module__.startswith(("torch.", "treadle.")) and "<" not in cls.__qualname__:
            yield cls
        yield from _loaded(cls)


def _importable_here() -> list[str]:
    here = Path.cwd()
    files = [one.stem for one in here.glob("*.py")]
    return [*files, *(one.parent.name for one in here.glob("*/__init__.py")), "torch", "treadle"]


def _noun(base: Any) -> str:
    return f"{base.__name__} named " if isinstance(base, type) and base is not object else ""


def _some(known: Any) -> str:
    names = sorted(known)
    return ", ".join(names) if len(names) <= 40 else ", ".join(names[:12]) + ", ..."
