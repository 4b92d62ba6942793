"""Import of the peers' modules that are only a section of a table, through an entry in the ``__path__`` above them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec

# Accelerate's modules that are imported most exist below ``treadle`` too, next to `treadle.utils`.
_DIRECT = ("data_loader", "logging", "state", "tracking")
_PREFIX = "peers of "


def add_peer_modules(package: str, folders: Sequence[str]) -> list[str]:
    """Return the ``__path__`` of a package that has the modules of the tables too.

    Args:
        package: The package's name.
        folders: The folders of its own modules, which come first.
    """
    if PeerFinder not in sys.path_hooks:
        sys.path_hooks.insert(0, PeerFinder)  # before that of zip files, which takes any path in one
    return [*folders, os.path.join(folders[0], _PREFIX + package)]


class PeerFinder:
    """Finder and loader of one package's modules, made by `sys.path_hooks` for the entry of `add_peer_modules`.

    All its modules are packages, because only for a package does the import system ask for each name of a
    ``from module import name`` itself: `peer_names` tells by it which error to raise.
    """

    def __init__(self, entry: str) -> None:
        self._folder, name = os.path.split(entry)
        if not name.startswith(_PREFIX):
            raise ImportError(f"{entry} does not come from add_peer_modules.", path=entry)
        self._package = name.removeprefix(_PREFIX)

    def find_spec(self, name: str, target: Any = None) -> ModuleSpec | None:
        """Return the spec of a module that the tables list; None for any other."""
        from importlib.machinery import ModuleSpec

        child = name.rpartition(".")[2]
        if child not in self._list_children():
            return None
        spec = ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        spec.submodule_search_locations = add_peer_modules(name, [os.path.join(self._folder, child)])
        return spec

    def iter_modules(self, prefix: str = "") -> Iterator[tuple[str, bool]]:
        """Yield the name of each module, for `pkgutil`."""
        for child in self._list_children():
            yield prefix + child, True

    def create_module(self, spec: ModuleSpec) -> None:
        """Return None: Python creates the module."""

    def exec_module(self, module: Any) -> None:
        """Give a module its names, each of which is imported on first use."""
        from .peer_names import export_peer_names

        module.__getattr__, module.__dir__, module.__all__ = export_peer_names(module.__name__)

    def _list_children(self) -> Sequence[str]:
        if self._package == "treadle":
            return _DIRECT
        from .peer_names import list_submodules

        return list_submodules(self._package)
