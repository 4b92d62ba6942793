"""What has become of a trial, from the end of its process and from its run folder."""

import signal

import pytest
from treadle.tools.sweep.workers import OUTPUT, End, judge
from treadle.trainer.runs import RunFolder

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


def test_a_folder_that_is_not_there_is_to_be_made(tmp_path):
    assert judge(tmp_path / "1").end is End.CUT_SHORT
