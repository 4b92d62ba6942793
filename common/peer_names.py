"""Names of the peers (Lightning, Fabric, Accelerate), each with its counterpart or replacement."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import FrameType
from typing import Any, NoReturn

from .messages import nearest

_PACKAGES = ("callbacks", "loggers", "strategies", "profilers", "data", "utils", "integrations")
_ASKING = (__name__, "treadle.common.lazy_exports")


class Answer(str):
    """Sentence that states the replacement for a peer's name that Treadle does not have."""


class _NoSuchNameError(ImportError):
    """Error for a name that ``from module import name`` requests but Treadle does not have."""


def export_peer_names(module: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a module that only re-exports a peer's names.

    Args:
        module: ``__name__`` of the module.
    """
    path = peer_path(module)
    listed = {name for name, home in read_names(path).items() if not isinstance(home, Answer)}
    own = _own_module(module, path)
    names = sorted(listed if own is None else listed.union(getattr(own, "__all__", None) or _list_public(own)))

    def __getattr__(name: str) -> Any:
        if name.startswith("__"):  # such as ``__file__``, which `inspect` asks of every module
            raise AttributeError(f"module {module!r} has no attribute {name!r}", name=name)
        if name not in listed and is_module(submodule := f"{module}.{name}"):  # may have more than the own one
            value = importlib.import_module(submodule)
        else:
            try:
                value = getattr(None if name in listed else own, name)
            except (AttributeError, _NoSuchNameError):
                value = find_peer_name(module, name, names)
        setattr(sys.modules[module], name, value)  # later lookups find it in the module itself
        return value

    _bind_over_submodules(sys.modules[module], names, __getattr__)
    return __getattr__, lambda: names, names


def _bind_over_submodules(package: Any, names: list[str], find: Callable[[str], Any]) -> None:
    """Import each submodule that has the name of an export, then rebind the export, so no later import replaces it."""
    for entry in pkgutil.iter_modules(package.__path__):
        if entry.name in names:
            importlib.import_module(f"{package.__name__}.{entry.name}")
            setattr(package, entry.name, find(entry.name))


def find_peer_name(module: str, name: str, valid: Any = ()) -> Any:
    """Return Treadle's counterpart of a peer's name, or else Treadle's submodule of that name.

    Raises:
        ImportError, AttributeError: If Treadle has neither; an ImportError for ``from module import name``.
    """
    path = peer_path(module)
    home = read_names(path).get(name)
    if isinstance(home, Answer):
        _refuse(module, name, f"{module} has no {name}: {home}")
    if home is None:
        submodule = None if name.startswith("__") else _import_submodule(module, f"{path}.{name}".lstrip("."))
        if submodule is None:
            hint = _find_in_packages(name) if module == "treadle" else ""
            _refuse(module, name, f"module {module!r} has no attribute {name!r}.{hint or nearest(name, valid)}")
        return submodule
    path, _, inner = home.rpartition(".")
    return getattr(importlib.import_module(f"treadle.{path}".rstrip(".")), inner)


def _find_in_packages(name: str) -> str:
    """Return a sentence that names the public package with this name, such as callbacks; ``""`` if none has it."""
    for package in () if name.startswith("_") else _PACKAGES:
        if name in importlib.import_module(f"treadle.{package}").__all__:
            return f" Use treadle.{package}.{name}."
    return ""


def _import_submodule(module: str, path: str) -> Any:
    # The peers import all their modules with the package: `accelerate.state.PartialState` needs no further import.
    roots = ("treadle", "treadle.compat")
    for root in reversed(roots) if module.startswith("treadle.compat") else roots:
        submodule = f"{root}.{path}"
        if is_module(submodule):
            return importlib.import_module(submodule)
    return None


@cache
def is_module(name: str) -> bool:
    """Return whether a module can be imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its package does not exist either
        return False


def _refuse(module: str, name: str, text: str) -> NoReturn:
    # `from module import name` replaces an AttributeError with one without the text; hasattr() accepts nothing else.
    # Before it looks for a submodule of a package, the import system asks for the name in `_handle_fromlist`.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") in _ASKING:
        frame = frame.f_back
    if frame is not None and frame.f_code.co_name == "_handle_fromlist":
        raise _NoSuchNameError(text, name=module)
    raise AttributeError(text, name=name)  # without obj, so that Python does not append its own suggestion to the text


def peer_path(module: str) -> str:
    """Return the path below a peer's root that a module corresponds to: ``"utils"`` for ``treadle.compat.utils``."""
    return module.removeprefix("treadle").removeprefix(".compat").removeprefix(".")


@cache
def read_names(path: str) -> Mapping[str, str]:
    """Return the peers' names in one module, each with its path below ``treadle`` or an `Answer`."""
    below_fabric = _below_fabric(path)
    if below_fabric is not None:  # most of Fabric's modules are Lightning's
        return {**(read_names(below_fabric) if below_fabric else {}), **dict(_read_section("fabric", below_fabric))}
    return {name: home for peer in ("lightning", "accelerate") for name, home in _read_section(peer, path)}


def _below_fabric(path: str) -> str | None:
    return path[len("fabric.") :] if path.split(".")[0] == "fabric" else None


@cache
def read_table(peer: str) -> Mapping[str, Any]:
    """Return the parsed content of a peer's TOML file in ``compat``."""
    import tomllib  # here, because only a peer's name needs it
    from importlib.resources import files

    return tomllib.loads(files("treadle.compat").joinpath(f"{peer}.toml").read_text(encoding="utf-8"))


def list_paths() -> list[str]:
    """Return the sorted paths below ``treadle.compat`` that the tables list."""
    paths = {path for peer in ("lightning", "accelerate") for path in read_table(peer)}
    paths |= {f"fabric.{path}".rstrip(".") for path in read_table("fabric") if path != "answers"}
    return sorted(paths - {"answers"})


@cache
def list_submodules(package: str) -> tuple[str, ...]:
    """Return the sorted names of the modules that the tables list directly below a package of Treadle."""
    above = f"{peer_path(package)}.".lstrip(".")
    below = {path.removeprefix(above).partition(".")[0] for path in list_paths() if path.startswith(above)}
    return tuple(sorted(below - {""}))


def _read_section(peer: str, path: str) -> Iterator[tuple[str, str]]:
    table = read_table(peer)
    for home, names in table.get(path, {}).items():
        if home == "also":
            for other in names:
                yield from _read_section(peer, other)
        elif home.startswith("!"):
            sentence = Answer(table["answers"].get(home[1:], home[1:]))
            yield from ((name, sentence) for name in names)
        else:
            for line in names:
                name, _, old = line.partition(" as ")
                yield old or name, f"{home}.{name}".removeprefix(".")


def _own_module(module: str, path: str) -> Any:
    """Return Treadle's own module at the same path as a module of ``compat``, or None."""
    below_fabric = _below_fabric(path)
    if not path or below_fabric == "":
        return None
    if below_fabric is None:
        homes = [f"treadle.{path}"]
    else:
        homes = [f"treadle.compat.{below_fabric}", f"treadle.{below_fabric}"]
    own = next((home for home in homes if home != module and is_module(home)), None)
    return None if own is None else importlib.import_module(own)


def _list_public(module: Any) -> list[str]:
    return [name for name in vars(module) if not name.startswith("_")]
