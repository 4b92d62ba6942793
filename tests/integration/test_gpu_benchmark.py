"""benchmarks/gpu.py runs from end to end where there is no GPU, and every arm trains what the raw loop does."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
COMPILED = pytest.mark.skipif(shutil.which("gcc") is None, reason="inductor needs a C++ compiler")


def run_program(*arguments):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, PROGRAM, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "cases",
    [
        ["mlp", "llama1b", "loading", "save"],
        pytest.param(["gpt2", "gpt2-compiled"], marks=[pytest.mark.slow, COMPILED]),
    ],
    ids=" ".join,
)
def test_every_case_in_small(cases, tmp_path):
    written = tmp_path / "gpu.json"
    done = run_program("--tiny", "--json", written, "--cases", *cases)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(written.read_text())
    measured = {name.partition(",")[0] for name in results["cases"]} | ({"save"} & results.keys())
    assert measured == set(cases)
    for case in results["cases"].values():
        assert {"raw loop", "Treadle Accelerator", "Treadle Trainer"} <= case["arms"].keys()
        assert all(row["rate"] > 0 and row["ratio"] > 0 for row in case["arms"].values())
    if "save" in cases:
        assert results["save"]["at_once_s"] > 0


@pytest.mark.long
def test_without_a_gpu_it_says_what_runs_here():
    done = run_program()
    assert done.returncode == 2
    assert "there is no CUDA device here; --tiny runs the program on the CPU" in done.stderr
