"""Reads the package as source: its files, what each imports, and what each room's face exports."""

import ast
import importlib.util
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import treadle

HELPERS = {"common.lazy_exports", "common.peer_finder"}  # what makes a face, and no export of it
ALL_ROOMS = ("common", "strategies", "engine", "loggers", "callbacks")
ALL_ROOMS += ("trainer", "integrations", "cli", "tools", "compat")
TOP_ROOMS = tuple(room for room in ALL_ROOMS if importlib.util.find_spec(f"treadle.{room}"))  # `tools` may be deleted


@dataclass(frozen=True)
class Import:
    """One imported name. ``module`` is below ``treadle``; ``name`` is None for ``import x``."""

    line: int
    module: str | None  # None: a package that is not ours
    external: str
    name: str | None
    typing: bool  # under `if TYPE_CHECKING`


def root(room: str) -> Path:
    return Path(getattr(__import__(f"treadle.{room}"), room).__file__).parent


@cache
def files() -> dict[str, Path]:
    """Every module below ``treadle``, by its dotted name; a package stands for its ``__init__.py``."""
    found = {}
    homes = [(room, root(room)) for room in TOP_ROOMS] + [("", Path(treadle.__file__).parent)]
    for room, folder in homes:
        for path in sorted(folder.rglob("*.py")):
            parts = [*filter(None, [room]), *path.relative_to(folder).with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def count_code(path: Path) -> int:
    """The lines with code: without blank lines, comments and docstrings."""
    source, lines, docstrings = path.read_text(encoding="utf-8"), set(), set()
    for node in ast.walk(ast.parse(source)):
        has_body = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if has_body and ast.get_docstring(node) is not None:
            docstrings |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    ignored = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in ignored:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def is_package(module: str) -> bool:
    return files()[module].name == "__init__.py"


def package_of(module: str) -> str:
    return module if is_package(module) else module.rpartition(".")[0]


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(files()[module].read_text(encoding="utf-8"))


def for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imports_in(node: ast.AST, module: str, package: bool, typing: bool = False) -> Iterator[Import]:
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


def _absolute(node: ast.ImportFrom, module: str, package: bool) -> str | None:
    if not node.level:
        first, _, rest = (node.module or "").partition(".")
        return rest if first == "treadle" else None
    parts = module.split(".") if module else []
    parts = parts if package else parts[:-1]
    parts = parts[: len(parts) - (node.level - 1)]
    return ".".join(parts + (node.module.split(".") if node.module else []))


@cache
def imports(module: str) -> tuple[Import, ...]:
    return tuple(imports_in(tree(module), module, is_package(module)))


@cache
def exports(package: str) -> dict[str, tuple[str, str]]:
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


def target(module: str | None, name: str | None) -> str | None:
    """The file that an import really reaches, through any faces; None for what is not ours."""
    while module is not None and module in files() and is_package(module):
        inner = f"{module}.{name}" if module else name
        if inner in files():
            module, name = inner, None
        elif name is not None and name in exports(module):
            module, name = exports(module)[name]
        else:
            break
    return module if module in files() else None


def sentence(package: str) -> str:
    """The first sentence of a face's docstring."""
    return (ast.get_docstring(tree(package)) or "").partition("\n")[0].removesuffix(".")


def picture() -> str:
    """The rooms, the highest first, each with its sentence: the list in ``docs/architecture.md``."""
    rows = []
    for room in reversed(TOP_ROOMS):
        packages = [package for package in files() if package.split(".")[0] == room and is_package(package)]
        rows += [(f"{'    ' * package.count('.')}{package.split('.')[-1]}/", sentence(package)) for package in packages]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {words}" for name, words in rows)


if __name__ == "__main__":
    print(picture())
