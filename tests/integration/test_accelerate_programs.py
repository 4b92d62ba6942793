"""Programs of the shapes that public code for Accelerate has, with nothing but their imports changed: the same results.

`swap/accelerate/programs` has the programs, `sources.toml` what each is written after, `programs.json` what Accelerate
found on each process (`benchmarks/swap_accelerate.py --record`). All that a program finds is compared, but for what
`DIFFERENT` names: there a row of docs/differences says why.
"""

import json
import os
import re
import tomllib
from pathlib import Path

import pytest
from support import swapped
from support.differences import differences
from support.house import read_differences
from support.processes import clean_environment, run

FOLDER = Path(__file__).parent / "swap" / "accelerate"
SOURCES = tomllib.loads((FOLDER / "sources.toml").read_text(encoding="utf-8"))
RECORDED = json.loads((FOLDER / "programs.json").read_text(encoding="utf-8"))["programs"]
DECAYED = json.loads((FOLDER / "recorded.json").read_text(encoding="utf-8"))
TOLERANCE = 2e-5  # relative: they compute in float32, and the mean over processes is rounded in another order

# Program, number of processes, pattern of the place: the row of docs/differences that says why it is otherwise.
GLOBAL_BATCH = "`Accelerator(split_batches=True)`"
WEIGHTED = "Short batches, uneven processes, accumulation"
DIFFERENT: dict[tuple[str, int], dict[str, str]] = {
    ("cascade", 2): {f"/{name}( |/|$)": GLOBAL_BATCH for name in ("losses", "norms", "rates", "weights")},
    ("memory", 1): {"/tried": "`find_executable_batch_size`"},
    ("memory", 2): {"/tried": "`find_executable_batch_size`"},
    ("frames", 1): {"/losses/": WEIGHTED},  # a batch sampler whose batches hold different numbers of samples
    ("frames", 2): {"/losses/": WEIGHTED},
}


LONG = ("big_trainer", "early_stopping", "glue", "multi_dataset", "tracking", "unconditional")


def leave_no_launch_variables():
    """As a user starts a script: with nothing in the environment of what launches processes."""
    for variable in os.environ.keys() - clean_environment().keys():
        del os.environ[variable]


def executed(name, world, folder):
    if world == 1:
        leave_no_launch_variables()
    return swapped.execute_accelerate_program(name, "treadle", Path(folder))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "world"),
    [
        # Each on the most processes that it was recorded with by default, but for some that take long.
        pytest.param(name, n, marks=() if n == max(row["processes"]) and name not in LONG else pytest.mark.exhaustive)
        for name, row in SOURCES.items()
        for n in row["processes"]
    ],
)
def test_the_results_are_accelerates(name, world, tmp_path):
    theirs = RECORDED[name][str(world)]
    ours = run(executed, world, name, world, str(tmp_path))
    assert len(ours) == len(theirs) == world
    found = differences(ours, theirs, TOLERANCE)
    known = DIFFERENT.get((name, world), {})
    unexplained = [each for each in found if not any(re.search(pattern, each[0]) for pattern in known)]
    assert unexplained == []
    for pattern in known:  # a difference that is gone leaves this table and the document
        assert any(re.search(pattern, place) for place, _, _ in found), pattern


def test_differences_have_rows():
    document = re.sub(r" *<!-- used:.*?-->", "", read_differences())
    rows = {line.split("|")[1].strip() for line in document.splitlines() if line.startswith("| ")}
    assert {row for places in DIFFERENT.values() for row in places.values()} <= rows


def test_each_program_has_its_source():
    assert {path.stem for path in swapped.ACCELERATE_PROGRAMS.glob("*.py")} == SOURCES.keys() == RECORDED.keys()
    assert len({row["source"] for row in SOURCES.values()}) == len(SOURCES) >= 20
    assert sum(2 in row["processes"] for row in SOURCES.values()) >= 8


def test_only_import_lines_are_changed():
    for name in SOURCES:
        before = (swapped.ACCELERATE_PROGRAMS / f"{name}.py").read_text(encoding="utf-8")
        after = swapped.swapped_for_accelerate(before)
        pairs = [(a, b) for a, b in zip(before.splitlines(), after.splitlines(), strict=True) if a != b]
        assert pairs
        assert all(a.startswith(("import accelerate", "from accelerate")) for a, _ in pairs)
        assert before.count("\nimport accelerate") + before.count("\nfrom accelerate") == len(pairs)


# -- one loop in three orders ------------------------------------------------------------------------------------------


def decayed(path, world, arguments):
    """What `swap/accelerate/decay.py` finds, for each list of arguments."""
    if world == 1:
        leave_no_launch_variables()
    source = swapped.swapped_for_accelerate((FOLDER / "decay.py").read_text(encoding="utf-8"))
    return [swapped.call_main(path, each, source) for each in arguments]


@pytest.mark.parametrize("world", [1, 2])
def test_the_losses_are_accelerates(world, tmp_path):
    """With `use_seedable_sampler`; figures of accelerate 1.15.0, torch 2.13.0 (`benchmarks/swap_accelerate.py`)."""
    runs = [one for one in DECAYED["runs"] if one["processes"] == world]
    assert len({tuple(one["results"]["losses"]) for one in runs}) == 3  # each has an order of its own
    found = run(decayed, world, tmp_path / "decay.py", world, [one["arguments"] for one in runs])[0]
    for ours, theirs in zip(found, (one["results"] for one in runs), strict=True):
        assert ours.keys() == theirs.keys()
        for name, values in theirs.items():
            assert ours[name] == pytest.approx(values, rel=5e-7, abs=1e-7), name
        assert ours["rates"][-1] == theirs["rates"][-1] == 0.0


def test_the_guides_schedule_ends_at_zero(capsys):
    text = (Path(__file__).parents[2] / "docs" / "migrating" / "from_accelerate.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(block, {})
    assert capsys.readouterr().out == "[0.0]\n"
