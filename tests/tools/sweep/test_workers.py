"""The processes of trials: their share of the machine, what they inherit from a launcher, what became of them."""

import json
import os
import signal
import sys

import pytest
from treadle.tools.sweep.workers import OUTPUT, End, Workers, judge, share_gpus
from treadle.trainer.runs import RunFolder

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


def test_what_a_trial_inherits(tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "SLURM_STEP_ID", "TREADLE_SUPERVISOR"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    workers = Workers(2, devices=1, gpus=["4", "6"])
    folders = [tmp_path / "0", tmp_path / "1"]
    for trial, folder in enumerate(folders):
        folder.mkdir()
        workers.start(trial, folder, [sys.executable, "-c", SHOW], {"TOLD": "this"})
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


OBJECTIVE = {"objective": {"metric": "val_loss", "value": 0.5, "mode": "min"}, "steps": 7}


@pytest.mark.parametrize(
    ("state", "facts", "status", "end"),
    [
        ("finished", OBJECTIVE, 0, End.COMPLETE),
        ("finished", OBJECTIVE, None, End.COMPLETE),
        ("killed", OBJECTIVE, 0, End.COMPLETE),  # a run that had nothing left to train
        ("pruned", OBJECTIVE, 0, End.PRUNED),
        ("pruned", OBJECTIVE, None, End.PRUNED),
        ("finished", {}, 0, End.FAILED),
        ("finished", {"objective": {"metric": "val_loss", "value": "nan"}}, 0, End.FAILED),
        ("failed: ValueError", {"error": "ValueError: no"}, 1, End.FAILED),
        ("failed: ValueError", {"error": "ValueError: no"}, None, End.FAILED),
        ("waiting", {}, 2, End.FAILED),
        ("running", {}, -signal.SIGSEGV, End.FAILED),
        ("running", OBJECTIVE, -signal.SIGKILL, End.CUT_SHORT),
        ("running", OBJECTIVE, 128 + signal.SIGKILL, End.CUT_SHORT),
        ("interrupted", OBJECTIVE, 128 + signal.SIGTERM, End.CUT_SHORT),
        ("interrupted", OBJECTIVE, None, End.CUT_SHORT),
        ("running", OBJECTIVE, None, End.CUT_SHORT),
        ("waiting", {}, None, End.CUT_SHORT),
    ],
)
def test_outcomes(state, facts, status, end, tmp_path):
    folder = RunFolder.create(tmp_path, "sweep")
    folder.record({"state": "running" if state == "killed" else state, **facts})
    folder.release()
    (folder.path / OUTPUT).write_text("\n".join(map(str, range(100))))
    outcome = judge(folder.path, status)
    assert outcome.end is end
    assert outcome.value == (0.5 if end is End.COMPLETE else None)
    assert bool(outcome.error) == (end in (End.FAILED, End.CUT_SHORT))
    if status == 2:
        assert outcome.error.splitlines() == ["the process ended with status 2:", *map(str, range(80, 100))]


def test_what_another_process_works_at_is_left_to_it(tmp_path):
    folder = RunFolder.create(tmp_path, "sweep")
    assert judge(folder.path, 2).end is End.ELSEWHERE
    folder.release()
    assert judge(tmp_path / "1").end is End.CUT_SHORT  # is not there yet
