"""The package without the folder `tools/`: everything but its commands works."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.house import TOP_ROOMS, root
from support.processes import clean_environment

import treadle

TESTS = Path(__file__).parents[1]
# An editable install would still find the folder of the original.
WITHOUT_EDITABLE_INSTALLS = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "Editable" not in getattr(finder, "__name__", "")]
"""
# One process does all of it, because each takes 4 s of CPU to import torch.
PROGRAM = """
import importlib, pathlib, treadle
from treadle.cli import main

home = pathlib.Path(treadle.__file__).parent
for arguments in (["--help"], ["doctor"], ["fit", "--config", "run.yaml"]):
    print(f"== {arguments[0]}", flush=True)
    try:
        status = main(arguments)
    except SystemExit as error:
        status = error.code
    print("status", status, flush=True)
count = 0
for path in sorted(home.rglob("*.py")):
    parts = path.relative_to(home).with_suffix("").parts
    name = ".".join(("treadle", *parts)).removesuffix(".__init__")
    if name != "treadle.__main__":  # the program
        importlib.import_module(name)
        count += 1
print("imported", count)
"""
CONFIG = """
trainer: {max_epochs: 1, accelerator: cpu, enable_progress_bar: false, logger: false}
model: {class: cli_samples.Line, lr: 0.02}
data: {class: cli_samples.Points, batch_size: 8}
"""


@pytest.mark.long
def test_every_module_is_imported_a_fit_runs_and_missing_commands_are_named(tmp_path):
    """In a copy of the package, which has no `tools/`."""
    skipped = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(treadle.__file__).parent, tmp_path / "treadle", ignore=skipped)
    for room in set(TOP_ROOMS) - {"tools"}:
        shutil.copytree(root(room), tmp_path / "treadle" / room, ignore=skipped)
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_EDITABLE_INSTALLS)
    (tmp_path / "run.yaml").write_text(CONFIG)
    path = os.pathsep.join(map(str, (tmp_path, TESTS, TESTS / "support" / "samples")))
    command, env = [sys.executable, "-c", PROGRAM], clean_environment({"PYTHONPATH": path})
    done = subprocess.run(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    printed, imported = done.stdout.split("\nimported ")
    _, of_help, of_doctor, of_fit = printed.split("== ")
    assert int(imported) > 200
    for name in ("doctor", "migrate", "plan", "sweep"):
        line = rf"^  {name} .*can't be loaded: .* No module named 'treadle.tools'$"
        assert re.search(line, of_help, re.MULTILINE), of_help
    assert "train a task" in of_help
    assert "No module named 'treadle.tools'" in of_doctor
    assert of_doctor.rstrip().endswith("status 1")
    assert "treadle runs show default/1" in of_fit
