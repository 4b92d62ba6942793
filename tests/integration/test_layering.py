"""The shape of the house: imports point down, rooms are entered through their faces, no files import in a circle."""

import ast
import graphlib
import io
import tokenize
from pathlib import Path

import pytest
from support.house import TOP_ROOMS, exports, files, imports, imports_in, is_package, package_of, tree

import treadle

MAY_IMPORT = {
    "common": set(),
    "strategies": {"common"},
    "loggers": {"common"},
    "engine": {"common", "strategies", "loggers"},
    "callbacks": {"common", "strategies", "engine"},
    "trainer": {"common", "strategies", "loggers", "engine", "callbacks"},
    "integrations": {"common", "strategies", "loggers", "engine", "callbacks", "trainer"},
    "cli": {"common", "strategies", "loggers", "engine", "callbacks", "trainer", "integrations"},
    "tools": {"common", "strategies", "loggers", "engine", "callbacks", "trainer", "integrations", "cli"},
    "compat": {"common", "strategies", "loggers", "engine", "callbacks", "trainer", "integrations", "cli", ""},
}
# Classes of the room above that hooks receive, so that a callback may name them for type checkers.
NAMED_FROM_BELOW = {"TaskModule", "Trainer"}
# The class that its own files may name for type checkers, although it imports them.
NAMED_IN_A_CIRCLE = {"Trainer"}
MOST_LINES, MOST_LINES_OF_A_FUNCTION, MOST_MODULES = 800, 60, 15
# Lines of code in each room. They may only fall; lower a figure when a room has become smaller.
MOST_CODE = {
    **{"common": 917, "strategies": 7540, "engine": 17251, "loggers": 1510, "callbacks": 5410, "trainer": 9410},
    **{"integrations": 595, "cli": 3575, "tools": 4560, "compat": 3813, "": 770},
}
# One file for each public callback, at the path that Lightning gives it.
FULL_BY_NAME = {"callbacks"}
# The whole public surface in one file, half of it docstrings.
LONG_BY_DOCSTRINGS = {"engine.accelerator"}

# Know what torch's strategies communicate, in place of the processes that a plan does not have.
SIMULATED = {"tools.plan.simulated_world", "tools.plan.strategy_facts"}


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


def room(module):
    """The top-level room; empty for the few files of ``treadle`` itself."""
    first = module.partition(".")[0]
    return first if first in TOP_ROOMS else ""


def is_inside(package, other):
    return package == other or package.startswith(f"{other}.") or not other


def names_for_types(found, names):
    return found.typing and found.name in names


def edges(module):
    """The files that a file imports, the Trainer for type checkers apart."""
    for found in imports(module):
        reached = target(found.module, found.name)
        if reached not in (None, module) and not names_for_types(found, NAMED_IN_A_CIRCLE):
            yield reached


def test_every_room_is_looked_at():
    assert {room(module) for module in files()} == {*TOP_ROOMS, ""}
    assert len(files()) > 200
    assert sum(len(imports(module)) for module in files()) > 2000


def test_imports_point_down():
    offenders = []
    for module in files():
        for found in imports(module):
            if found.module is None or not room(module) or names_for_types(found, NAMED_FROM_BELOW):
                continue
            reached = room(target(found.module, found.name) or found.module)
            if reached != room(module) and reached not in MAY_IMPORT[room(module)]:
                offenders.append(f"{module}:{found.line} imports {found.module} {found.name}")
    assert offenders == []


def test_nothing_imports_the_tools():
    """Their commands are found like those of any package: by their entry points."""
    for module, path in files().items():
        if room(module) != "tools":
            assert "treadle.tools" not in path.read_text(encoding="utf-8"), module
            reached = [(room(found.module or ""), found.name) for found in imports(module)]
            assert not [name for own, name in reached if own == "tools" or (own, name) == ("", "tools")], module


def test_rooms_are_entered_through_their_faces():
    """A file imports from files beside or above it, and from the faces of other rooms."""
    offenders = []
    for module in files():
        if is_package(module) or room(module) in ("", "compat"):
            continue
        for found in imports(module):
            home = found.module
            if (
                home is None
                or home not in files()
                or room(home) == "common"
                or is_inside(package_of(module), package_of(home))
            ):
                continue
            if not is_package(home):
                offenders.append(f"{module}:{found.line} imports {home}, a file inside another room")
            elif found.name not in exports(home) and f"{home}.{found.name}" not in files():
                offenders.append(f"{module}:{found.line} imports {found.name}, which {home} does not export")
            if any(part.startswith("_") for part in home.split(".")) and not is_inside(
                package_of(module), home[: home.index("._")]
            ):
                offenders.append(f"{module}:{found.line} imports {home}, a private room")
    assert offenders == []


def test_no_files_import_in_a_circle():
    graph = {module: sorted(set(edges(module))) for module in files() if not is_package(module)}
    assert len(list(graphlib.TopologicalSorter(graph).static_order())) >= len(graph)  # a circle is an error


def test_what_faces_export_exists():
    for package in files():
        if is_package(package) and exports(package):
            face = __import__(f"treadle.{package}" if package else "treadle", fromlist=["*"])
            for name in exports(package):
                assert getattr(face, name) is not None, (package, name)
    assert set(exports("")) == set(treadle.__all__)
    with pytest.raises(AttributeError, match=r"no attribute 'Trianer'. Did you mean 'Trainer'"):
        _ = treadle.Trianer


def test_the_checkers_see_what_they_should():
    source = "import torch.nn\nfrom treadle.engine import rng\n"
    source += "def f():\n    from ..trainer import Trainer\nif TYPE_CHECKING:\n    from . import rng\n"
    found = [(each.module, each.name, each.typing) for each in imports_in(ast.parse(source), "engine.rng", False)]
    absolute, inner, typing = ("engine", "rng", False), ("trainer", "Trainer", False), ("engine", "rng", True)
    assert found == [(None, None, False), absolute, inner, typing]
    assert target("trainer", "Trainer") == target("", "Trainer") == "trainer.trainer"
    assert (target("engine", "data"), target(None, "DataLoader")) == ("engine.data", None)


def identifiers(module):
    for node in ast.walk(tree(module)):
        for name in (getattr(node, "id", None), getattr(node, "attr", None), getattr(node, "name", None)):
            if isinstance(name, str):
                yield getattr(node, "lineno", 0), name
        if isinstance(node, ast.alias):
            yield node.lineno, node.name


def above_the_strategies():
    below = ("common", "strategies", "compat", "")
    return [module for module in files() if room(module) not in below and module not in SIMULATED]


def test_only_the_strategies_know_the_strategies():
    forbidden = ("DDP", "FSDP", "DistributedDataParallel", "FullyShardedDataParallel", "fully_shard")
    offenders = [
        f"{module}:{line} {name}"
        for module in above_the_strategies()
        for line, name in identifiers(module)
        if any(word in name for word in forbidden)
    ]
    assert offenders == []


def test_only_the_strategies_talk_to_other_processes():
    offenders = [
        f"{module}:{found.line} {found.external}"
        for module in above_the_strategies()
        for found in imports(module)
        if found.external.startswith("torch.distributed") or (found.external, found.name) == ("torch", "distributed")
    ]
    offenders += [
        f"{module}:{node.lineno} torch.distributed"
        for module in above_the_strategies()
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Attribute) and node.attr == "distributed"
        if isinstance(node.value, ast.Name) and node.value.id == "torch"
    ]
    assert offenders == []


def test_omegaconf_is_known_to_configurations_hyperparameters_and_stored_states_only():
    users = {module for module in files() for found in imports(module) if found.external.split(".")[0] == "omegaconf"}
    of_states = {"engine.checkpoint.json_codec", "trainer.checkpointing.lightning_layout"}
    assert users == {"cli.config.resolve", "trainer.core.hparams", *of_states}


def test_no_folder_is_too_full():
    counted = {}
    for module in files():
        if not is_package(module):
            counted[package_of(module)] = counted.get(package_of(module), 0) + 1
    # The files of compat are at the peers' module paths.
    ours = {package: count for package, count in counted.items() if room(package) != "compat"}
    full = {package: count for package, count in ours.items() if count > MOST_MODULES}
    assert set(full) == FULL_BY_NAME, full


def test_rooms_only_shrink():
    counted = dict.fromkeys([*TOP_ROOMS, ""], 0)
    for module, path in files().items():
        counted[room(module)] += count_code(path)
    assert {own: (lines, MOST_CODE[own]) for own, lines in counted.items() if lines > MOST_CODE[own]} == {}
    lower = {own: lines for own, lines in counted.items() if lines < MOST_CODE[own] - 100}
    assert lower == {}, "lower MOST_CODE"


def test_files_and_functions_stay_small():
    long = []
    for module, path in files().items():
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > MOST_LINES and module not in LONG_BY_DOCSTRINGS:
            long.append(f"{module}: {lines} lines")
        for owner in ast.walk(tree(module)):
            for node in ast.iter_child_nodes(owner):
                if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    continue
                if isinstance(owner, ast.ClassDef) and (owner.name, node.name) == ("Trainer", "__init__"):
                    continue
                # A class inside is no statement of the function's; each of its methods is measured by itself.
                inside = sum(c.end_lineno - c.lineno + 1 for c in node.body if isinstance(c, ast.ClassDef))
                length = node.end_lineno - node.lineno + 1 - inside
                if length > MOST_LINES_OF_A_FUNCTION:
                    long.append(f"{module}:{node.lineno} {node.name}: {length} lines")
    assert long == []
