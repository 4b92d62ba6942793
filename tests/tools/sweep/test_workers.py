"""The processes of trials: their share of the machine, and what they inherit from a launcher."""

import json
import os
import signal
import sys

import pytest
from treadle.tools.sweep.workers import OUTPUT, Workers, share_gpus

SHOW = "import json, os, sys; json.dump(dict(os.environ), sys.stdout)"


@pytest.mark.parametrize(
    ("gpus", "count", "shares"),
    [
        ("0123", 2, [["0", "1"], ["2", "3"]]),
        ("0123", 4, [["0"], ["1"], ["2"], ["3"]]),
        ("01", 3, [["0"], ["1"], ["0"]]),
        ("01234", 2, [["0", "1"], ["2", "3"]]),
    ],
)
def test_each_slot_has_its_own_gpus(gpus, count, shares):
    assert [share_gpus(list(gpus), count, slot) for slot in range(count)] == shares


def environment(workers, folder, trial):
    folder.mkdir()
    workers.start(trial, folder, [sys.executable, "-c", SHOW], {"TOLD": "this"})
    return folder


def test_what_a_trial_inherits(tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "SLURM_STEP_ID", "TREADLE_SUPERVISOR"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    workers = Workers(2, devices=1, gpus=["4", "6"])
    folders = [environment(workers, tmp_path / str(trial), trial) for trial in range(2)]
    assert not workers.has_room
    assert {workers.wait(60).trial, workers.wait(60).trial} == {0, 1}
    assert workers.has_room
    found = [json.loads((folder / OUTPUT).read_text()) for folder in folders]
    for one in found:
        assert one["TOLD"] == "this"
        assert one["SLURM_JOB_ID"] == "7"
        assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "SLURM_STEP_ID"} & one.keys()
        assert int(one["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 2)
    assert [one["CUDA_VISIBLE_DEVICES"] for one in found] == ["4", "6"]


def test_trials_are_told_to_end(tmp_path):
    workers = Workers(1)
    (tmp_path / "1").mkdir()
    workers.start(0, tmp_path / "1", [sys.executable, "-c", "import time; time.sleep(60)"], {})
    workers.wake()
    assert workers.wait(60) is None
    workers.end(signal.SIGTERM)
    assert workers.wait(60).process.returncode == -signal.SIGTERM
    assert workers.wait(0.01) is None
