"""Build step that adds type stubs to the wheel: one per module that ``common/peer_finder.py`` makes from the tables.

Type checkers read files only. Each stub has any name, of type ``Any``, but no submodule without a stub, which a package
with a function ``__getattr__`` would have.
"""

import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

STUB = "from collections.abc import Callable\nfrom typing import Any\n\n__getattr__: Callable[[str], Any]\n"
DIRECT = ("data_loader", "logging", "state", "tracking", "utils")  # those that exist below ``treadle`` too


def list_stubs(root: Path) -> list[str]:
    """Return the files of the stubs below ``treadle``; a module or package with a file of its own needs none."""
    paths = set()
    for peer, prefix in (("lightning", ""), ("accelerate", ""), ("fabric", "fabric.")):
        table = tomllib.loads((root / "compat" / f"{peer}.toml").read_text(encoding="utf-8"))
        for path in table.keys() - {"answers", ""}:
            parts = f"{prefix}{path}".split(".")
            paths.update("/".join(parts[:count]) for count in range(1, len(parts) + 1))
    files = [(f"compat/{path}", root / "compat" / path) for path in paths]
    files += [(path, root / "treadle" / path) for path in paths if path.split("/")[0] in DIRECT]
    own = ((name, (file / "__init__.py").exists() or file.with_suffix(".py").exists()) for name, file in files)
    return sorted(f"{name}/__init__.pyi" for name, has_file in own if not has_file)


class BuildWithStubs(build_py):
    """``build_py`` that also writes the stubs, except for an editable install, which has no folder for them."""

    def run(self) -> None:
        """Build, and write the stubs."""
        super().run()
        for name in [] if self.editable_mode else list_stubs(Path(__file__).parent):
            file = Path(self.build_lib, "treadle", name)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(STUB, encoding="utf-8")


if __name__ == "__main__":
    setup(cmdclass={"build_py": BuildWithStubs})
