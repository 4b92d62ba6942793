"""The package without the folder `tools/`: everything but its commands works."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from house import TOP_ROOMS, root
from processes import clean_environment

import treadle

TESTS = Path(__file__).parents[1]
# An editable install would still find the folder of the original.
WITHOUT_EDITABLE_INSTALLS = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "Editable" not in getattr(finder, "__name__", "")]
"""
IMPORT_ALL = """
import importlib, pathlib, sys, treadle
home = pathlib.Path(treadle.__file__).parent
count = 0
for path in sorted(home.rglob("*.py")):
    parts = path.relative_to(home).with_suffix("").parts
    name = ".".join(("treadle", *parts)).removesuffix(".__init__")
    if name not in ("treadle.engine.planning", "treadle.__main__"):  # a former path; the program
        importlib.import_module(name)
        count += 1
assert count > 300, count
sys.exit(importlib.import_module("treadle.__main__").main(["fit", "--config", "run.yaml"]))
"""
CONFIG = """
trainer: {max_epochs: 1, accelerator: cpu, enable_progress_bar: false, logger: false}
model: {class: cli_samples.Line, lr: 0.02}
data: {class: cli_samples.Points, batch_size: 8}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs Python on a copy of the package and some of its tests, without `tools/` and the tests of it."""
    folder = tmp_path_factory.mktemp("copy")
    skipped = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(treadle.__file__).parent, folder / "treadle", ignore=skipped)
    for room in set(TOP_ROOMS) - {"tools"}:
        shutil.copytree(root(room), folder / "treadle" / room, ignore=skipped)
    for part in ("support", "integration/test_layering.py", "conftest.py"):
        copy = shutil.copytree if (TESTS / part).is_dir() else shutil.copy
        (folder / "tests" / part).parent.mkdir(parents=True, exist_ok=True)
        copy(TESTS / part, folder / "tests" / part)
    (folder / "sitecustomize.py").write_text(WITHOUT_EDITABLE_INSTALLS)
    (folder / "run.yaml").write_text(CONFIG)
    path = os.pathsep.join(map(str, (folder, folder / "tests" / "support")))

    def run(*arguments, status=0):
        env = clean_environment({"PYTHONPATH": path})
        done = subprocess.run([sys.executable, *arguments], cwd=folder, env=env, capture_output=True, text=True)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


def test_every_module_is_imported_and_a_fit_runs(run):
    assert "treadle runs show default/1" in run("-c", IMPORT_ALL)


def test_the_commands_that_are_missing_are_named(run):
    out = run("-m", "treadle", "--help")
    for name in ("doctor", "migrate", "plan", "sweep"):
        assert re.search(rf"^  {name} .*can't be loaded: .* No module named 'treadle.tools'$", out, re.MULTILINE), out
    assert "train a task" in out
    assert "No module named 'treadle.tools'" in run("-m", "treadle", "doctor", status=1)


def test_the_rules_of_the_rooms_hold(run):
    rules = "every_room or point_down or nothing_imports or faces"
    file = "tests/integration/test_layering.py"
    assert " passed" in run("-m", "pytest", "-q", "-p", "no:cacheprovider", file, "-k", rules)
