"""The shape of the house: imports point down, strategies are known by no one above them, files stay small."""

import ast
from pathlib import Path

import pytest

import treadle

ROOMS = ("common", "strategies", "engine", "callbacks", "trainer", "loggers")
MAY_IMPORT = {
    "common": {"common"},
    "strategies": {"strategies", "common"},
    "engine": {"engine", "strategies", "loggers", "common"},
    "callbacks": {"callbacks", "engine", "strategies", "common"},
    "trainer": {"trainer", "callbacks", "engine", "strategies", "loggers", "common"},
    "loggers": {"loggers", "common"},
}
MOST_LINES, MOST_LINES_OF_A_FUNCTION = 800, 60


def folder(room):
    return Path(getattr(__import__(f"treadle.{room}"), room).__file__).parent


FILES = [(room, path) for room in ROOMS for path in sorted(folder(room).rglob("*.py"))]
FILES.append(("treadle", Path(treadle.__file__)))


def tree(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def for_types_only(node):
    test = node.test if isinstance(node, ast.If) else None
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


def imports(node, typing=False):
    """(line, module, names, whether for types only) of every import below `node`, those in functions too."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield child.lineno, alias.name, [], typing
        elif isinstance(child, ast.ImportFrom):
            yield child.lineno, "." * child.level + (child.module or ""), [a.name for a in child.names], typing
        elif for_types_only(child):
            for part in child.body:
                yield from imports(ast.Module([part], []), True)
            for part in child.orelse:
                yield from imports(ast.Module([part], []), typing)
        else:
            yield from imports(child, typing)


def room_of(module, names, own, depth=1):
    """The rooms that an import reaches, from a file `depth` folders down; empty for somebody else's package."""
    if module.startswith("."):
        level = len(module) - len(module.lstrip("."))
        rest = module.lstrip(".")
        if level <= depth:
            return {own}
        return {rest.split(".")[0]} if rest else set(names)
    if module == "treadle" or module.startswith("treadle."):
        inner = module.split(".")[1:2]
        return set(inner) or set(names) or {"treadle"}
    return set()


def test_every_room_is_looked_at():
    assert {room for room, _ in FILES} == {*ROOMS, "treadle"}
    assert len(FILES) > 40


def test_imports_point_down():
    offenders = []
    for room, path in FILES:
        if room == "treadle":
            continue
        for line, module, names, typing in imports(tree(path)):
            rooms = room_of(module, names, room, len(path.relative_to(folder(room)).parts))
            if rooms <= MAY_IMPORT[room]:
                continue
            naming_the_owner = room == "callbacks" and rooms == {"trainer"} and {*names} <= {"Trainer", "TaskModule"}
            if not (typing and naming_the_owner):
                offenders.append(f"{room}/{path.name}:{line} imports {module} {names}")
    assert offenders == []


def test_the_checker_sees_what_it_should():
    source = "def f():\n    from ..trainer import Trainer\nif TYPE_CHECKING:\n    from ..trainer import Trainer\n"
    found = [(room_of(module, names, "engine"), typing) for _, module, names, typing in imports(ast.parse(source))]
    assert found == [({"trainer"}, False), ({"trainer"}, True)]
    assert room_of("treadle.trainer.loop", ["FitLoop"], "engine") == {"trainer"}
    assert room_of("..", ["trainer"], "engine") == {"trainer"}
    assert room_of("..codec", ["encode"], "engine", depth=2) == {"engine"}
    assert room_of("...trainer", ["Trainer"], "engine", depth=2) == {"trainer"}
    assert room_of("torch.utils.data", ["DataLoader"], "engine") == set()


def identifiers(path):
    for node in ast.walk(tree(path)):
        for name in (getattr(node, "id", None), getattr(node, "attr", None), getattr(node, "name", None)):
            if isinstance(name, str):
                yield getattr(node, "lineno", 0), name
        if isinstance(node, ast.alias):
            yield node.lineno, node.name


def test_only_the_strategies_know_the_strategies():
    forbidden = ("DDP", "FSDP", "DistributedDataParallel", "FullyShardedDataParallel", "fully_shard")
    offenders = [
        f"{room}/{path.name}:{line} {name}"
        for room, path in FILES
        if room not in ("strategies", "treadle")
        for line, name in identifiers(path)
        if any(word in name for word in forbidden)
    ]
    assert offenders == []


def test_only_the_strategies_talk_to_other_processes():
    offenders = [
        f"{room}/{path.name}:{line} {module}"
        for room, path in FILES
        if room != "strategies"
        for line, module, names, _ in imports(tree(path))
        if module.startswith("torch.distributed") or (module == "torch" and "distributed" in names)
    ]
    offenders += [
        f"{room}/{path.name}:{node.lineno} torch.distributed"
        for room, path in FILES
        if room != "strategies"
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and node.attr == "distributed" and isinstance(node.value, ast.Name)
        if node.value.id == "torch"
    ]
    assert offenders == []


def test_omegaconf_is_known_to_configurations_and_hyperparameters_only():
    users = {
        f"{room}/{path.name}"
        for room, path in FILES
        for _, module, _, _ in imports(tree(path))
        if module.split(".")[0] == "omegaconf"
    }
    assert users <= {"trainer/config.py", "trainer/stored_hparams.py"}


@pytest.mark.parametrize("room", [*ROOMS, "treadle"])
def test_files_and_functions_stay_small(room):
    long = []
    for own, path in FILES:
        if own != room:
            continue
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > MOST_LINES:
            long.append(f"{room}/{path.name}: {lines} lines")
        for owner in ast.walk(tree(path)):
            for node in ast.iter_child_nodes(owner):
                if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    continue
                if isinstance(owner, ast.ClassDef) and (owner.name, node.name) == ("Trainer", "__init__"):
                    continue
                # A class inside is no statement of the function's; each of its methods is measured by itself.
                inside = sum(c.end_lineno - c.lineno + 1 for c in node.body if isinstance(c, ast.ClassDef))
                length = node.end_lineno - node.lineno + 1 - inside
                if length > MOST_LINES_OF_A_FUNCTION:
                    long.append(f"{room}/{path.name}:{node.lineno} {node.name}: {length} lines")
    assert long == []


def test_the_public_names_are_those_that_checkers_see():
    """What is imported when it is first used, and what type checkers are told, are written down twice."""
    told = {}
    for node in ast.walk(tree(Path(treadle.__file__))):
        if isinstance(node, ast.If) and for_types_only(node):
            for line in node.body:
                home = getattr(line, "module", None) or ""
                told |= {alias.name: home for alias in line.names}
    assert told == {**dict.fromkeys(treadle._ROOMS, ""), **treadle._HOMES}
    for name in treadle.__all__:
        assert getattr(treadle, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Trianer'"):
        _ = treadle.Trianer
