"""Reads the package as source: its files, what each imports, and what each room's face exports."""

import ast
import importlib.util
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import treadle

ALL_ROOMS = ("common", "strategies", "engine", "loggers", "callbacks")
ALL_ROOMS += ("trainer", "integrations", "cli", "tools", "compat")
ROOT = Path(__file__).parents[2]
TOP_ROOMS = tuple(room for room in ALL_ROOMS if importlib.util.find_spec(f"treadle.{room}"))  # `tools` may be deleted


@dataclass(frozen=True)
class Import:
    """One imported name. ``module`` is below ``treadle``; ``name`` is None for ``import x``."""

    line: int
    module: str | None  # None: a package that is not ours
    external: str
    name: str | None
    typing: bool  # under `if TYPE_CHECKING`


def load_script(path):
    """Import a script of the repository that belongs to no package."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_differences():
    """Return the pages that list the differences from the peers."""
    return "\n".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs/differences").glob("*.md")))


def root(room):
    return Path(getattr(__import__(f"treadle.{room}"), room).__file__).parent


@cache
def files():
    """Every module below ``treadle``, by its dotted name; a package stands for its ``__init__.py``."""
    found = {}
    homes = [(room, root(room)) for room in TOP_ROOMS] + [("", Path(treadle.__file__).parent)]
    for room, folder in homes:
        for path in sorted(folder.rglob("*.py")):
            parts = [*filter(None, [room]), *path.relative_to(folder).with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def is_package(module):
    return files()[module].name == "__init__.py"


def package_of(module):
    return module if is_package(module) else module.rpartition(".")[0]


@cache
def tree(module):
    return ast.parse(files()[module].read_text(encoding="utf-8"))


def for_types_only(node):
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imports_in(node, module, package, typing=False):
    """Every import below ``node`` in file ``module``, those in functions too."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                ours = alias.name.partition(".")[2] if alias.name.split(".")[0] == "treadle" else None
                yield Import(child.lineno, ours, alias.name, None, typing)
        elif isinstance(child, ast.ImportFrom):
            home = _absolute(child, module, package)
            for alias in child.names:
                yield Import(child.lineno, home, child.module or "", alias.name, typing)
        elif for_types_only(child):
            yield from imports_in(ast.Module(child.body, []), module, package, True)
            yield from imports_in(ast.Module(child.orelse, []), module, package, typing)
        else:
            yield from imports_in(child, module, package, typing)


def _absolute(node, module, package):
    if not node.level:
        first, _, rest = (node.module or "").partition(".")
        return rest if first == "treadle" else None
    parts = module.split(".") if module else []
    parts = parts if package else parts[:-1]
    parts = parts[: len(parts) - (node.level - 1)]
    return ".".join(parts + (node.module.split(".") if node.module else []))


@cache
def imports(module):
    """Every imported name, and every name of a room that is used as ``room.name``."""
    found = tuple(imports_in(tree(module), module, is_package(module)))
    rooms = {each.name: f"{each.module}.{each.name}".lstrip(".") for each in found if each.module is not None}
    used = {
        (node.lineno, rooms[node.value.id], node.attr)
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if (home := rooms.get(node.value.id)) in files() and is_package(home) and node.attr in exports(home)
    }
    return found + tuple(Import(line, home, home, name, False) for line, home, name in sorted(used))


@cache
def exports(package):
    """What a face exports: the name, its home and its name there."""
    found = {}
    for node in tree(package).body:
        for line in node.body if for_types_only(node) else [node]:
            if (
                isinstance(line, ast.ImportFrom)
                and line.level
                and not (line.module or "").endswith(("lazy_exports", "peer_finder"))
            ):
                for alias in line.names:
                    found[alias.asname or alias.name] = (_absolute(line, package, True) or "", alias.name)
    return found


def sentence(package):
    """The first sentence of a face's docstring."""
    return (ast.get_docstring(tree(package)) or "").partition("\n")[0].removesuffix(".")


def picture():
    """The rooms, the highest first, each with its sentence: the list in ``docs/architecture.md``."""
    rows = []
    for room in reversed(TOP_ROOMS):
        packages = [package for package in files() if package.split(".")[0] == room and is_package(package)]
        rows += [(f"{'    ' * package.count('.')}{package.split('.')[-1]}/", sentence(package)) for package in packages]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {words}" for name, words in rows)


if __name__ == "__main__":
    print(picture())
