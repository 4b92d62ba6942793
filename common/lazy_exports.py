"""Lazy exports of packages, which are listed once under ``if TYPE_CHECKING:`` and imported on first use."""

from __future__ import annotations

import ast
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any


def lazy_exports(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a module that lists its exports in a block of imports.

    The module, usually a package, exports the names that the imports under ``if TYPE_CHECKING:`` bind. At run time, the
    home of a name is imported when the name is first used. Any other name is looked up among the peers' names.
    """
    anchor = sys.modules[package].__package__
    # Only for a package does the import system ask for each name of `from module import name`; see `peer_names`.
    sys.modules[package].__dict__.setdefault("__path__", [])
    loader: Any = sys.modules[package].__spec__.loader  # type: ignore[union-attr]
    file = loader.get_filename(package)
    if not file.endswith(".py"):
        raise ImportError(
            f"the source file of {package}, which lists its exports, is missing. Reinstall Treadle.",
            name=package,
        )
    homes = {
        alias.asname or alias.name: (home, alias.name)
        for home, alias in _collect_imports(ast.parse(loader.get_data(file)))
    }

    def __getattr__(name: str) -> Any:
        if package == "treadle":
            from . import rank_zero  # noqa: F401  # programs call functions of lightning_utilities, which need a rank
        if name not in homes:
            # The import system asks here first in `from . import name`; the peers' tables take time to read.
            folder = os.path.dirname(file)
            if package == anchor and any(os.path.exists(f"{folder}/{name}{end}") for end in (".py", "/__init__.py")):
                return importlib.import_module(f".{name}", anchor)
            from .peer_names import find_peer_name

            # A search for a near name takes 4 ms, and pytest asks each module of a test for four such names.
            return find_peer_name(package, name, () if name.startswith("__") else [*homes, *vars(sys.modules[package])])
        home, inner = homes[name]
        if home == ".":
            value = importlib.import_module(f".{inner}", anchor)
        else:
            module = importlib.import_module(home, anchor)
            value = getattr(module, inner)
            # The import has bound its last component to the file (`main` in `from .main import COMMANDS, main`), so no
            # later lookup of that name would reach this function.
            last = home.rpartition(".")[2]
            if last in homes and homes[last][0] == home:
                setattr(sys.modules[package], last, getattr(module, homes[last][1]))
        setattr(sys.modules[package], name, value)  # later lookups find it in the module itself
        return value

    return __getattr__, lambda: sorted(homes), sorted(homes)


def _collect_imports(tree: ast.Module) -> Iterator[tuple[str, ast.alias]]:
    for block in tree.body:
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING":
            for line in block.body:
                if isinstance(line, ast.ImportFrom):
                    yield from (("." * line.level + (line.module or ""), alias) for alias in line.names)
