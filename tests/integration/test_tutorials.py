"""The notebooks of docs/tutorials run from an empty folder, and the outputs that they show are those of their cells."""

from pathlib import Path

import pytest
from support.processes import script

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs/tutorials").glob("*.ipynb"))
# Those that take long.
LONG = {"fine_tuning", "gan", "language_model", "reading_a_report", "reinforcement_learning", "scaling"}


def test_there_are_tutorials():
    assert {path.stem for path in NOTEBOOKS} >= LONG
    assert len(NOTEBOOKS) >= 7


@pytest.mark.long
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.exhaustive] if path.stem in LONG else [])
        for path in NOTEBOOKS
    ],
)
def test_a_tutorial_runs(path, tmp_path):
    source = f"import os, runpy, sys\nos.chdir({str(tmp_path)!r})\n"
    source += f"sys.argv = ['run_notebooks.py', '--check', {str(path)!r}]\n"
    source += f"runpy.run_path({str(ROOT / '.ci/run_notebooks.py')!r}, run_name='__main__')\n"
    done = script(source, env={"CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "Agg"}, timeout=280)
    assert done.returncode == 0, done.stderr
