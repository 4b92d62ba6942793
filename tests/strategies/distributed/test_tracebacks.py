"""Uncaught errors: user frames in full, framework frames counted, one report for all ranks; nothing else changes."""

import contextlib
import io
import sys
import traceback

import pytest
import torch
from support.models import Line, loader
from support.processes import run, script
from support.trainers import make_trainer
from treadle.strategies import open_world
from treadle.strategies.distributed import tracebacks
from treadle.strategies.distributed.tracebacks import PeerFailed

SCRIPT = """
import atexit, sys, torch, treadle
from treadle.compat.demos.boring_classes import BoringModel

class Task(BoringModel):
    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            torch.nn.functional.mse_loss(self(batch), torch.ones(3, 3))
        return super().training_step(batch, batch_idx)

def at_exit():
    count, trace = 0, sys.last_traceback
    while trace is not None:
        count, trace = count + 1, trace.tb_next
    print("frames for a debugger:", count)

def main():
    trainer = treadle.Trainer(accelerator="cpu", limit_val_batches=0, logger=False, enable_progress_bar=False)
    atexit.register(at_exit)
    trainer.fit(Task())

main()
"""


def after_announcement(stderr):
    """What follows the words with which `fit` begins, without the lines of carets."""
    text = stderr[stderr.index("Traceback") :]
    return [line for line in text.splitlines() if set(line) - set(" ^~")]


def test_a_script():
    done = script(SCRIPT)
    assert done.returncode == 1
    lines = after_announcement(done.stderr)
    assert lines[-3].startswith("RuntimeError: The size of tensor a (2) must match")
    assert lines[-2:] == ["in fit, epoch 0, after optimizer step 2, in batch 2", "the batch: Tensor (1, 32) float32"]
    shown = [line for line in lines if line.startswith("  File ")]
    assert [line.split()[-1] for line in shown] == ["<module>", "main", "training_step"]
    counted = [line for line in lines if line.startswith("  ... ")]
    frames = int(done.stdout.split()[-1])
    assert [sum(int(line.split()[1]) for line in counted), len(counted)] == [frames - 3, 2]
    assert counted[0].endswith(" frames of treadle (set TREADLE_FULL_TRACEBACK=1 to show all frames)")
    assert counted[1].endswith(" frames of torch") or counted[1].endswith(" frame of torch")


def test_an_own_loop():
    source = "import torch, treadle\ntreadle.Accelerator(cpu=True).prepare(torch.nn.Linear(1, 1), device_placement=[])"
    lines = script(source).stderr.splitlines()
    assert [line.split()[-1] for line in lines if line.startswith("  File ")] == ["<module>"]
    assert any("of treadle (set TREADLE_FULL_TRACEBACK=1 to show all frames)" in line for line in lines)
    assert lines[-1].startswith("ValueError: ")


# -- in this process -------------------------------------------------------------------------------------------------


class Task(Line):
    def training_step(self, batch, batch_idx):
        raise self.error


def failed(error):
    """The error that comes out of a fit in which a step raised ``error``."""
    task = Task()
    task.error = error
    with pytest.raises(type(error)) as caught:
        make_trainer().fit(task, loader())
    return caught.value


@pytest.fixture(autouse=True)
def hook_is_left_as_it_was(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)


def printed(error):
    """What a hook prints."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        sys.excepthook(type(error), error, error.__traceback__)
    return said.getvalue()


def test_the_error_and_its_traceback_stay_the_users():
    error = ValueError("mine")
    caught = failed(error)
    assert caught is error
    names = [frame.f_code.co_name for frame, _ in traceback.walk_tb(caught.__traceback__)]
    assert {"fit", "run", "take", "training_step"} <= set(names)


def shown_by_pytest():
    return str(pytest.ExceptionInfo.from_exception(failed(ValueError("mine"))).getrepr(style="short"))


def test_pytest_leaves_framework_frames_out():
    assert "in training_step" in shown_by_pytest()
    assert "stage.py" not in shown_by_pytest()


def test_the_flag_shows_every_frame(monkeypatch):
    monkeypatch.setenv("TREADLE_FULL_TRACEBACK", "1")
    error = failed(ValueError("mine"))
    assert sys.excepthook is sys.__excepthook__
    assert tracebacks.format_error(error, error.__traceback__) == "".join(traceback.format_exception(error))
    assert "stage.py" in shown_by_pytest()


def test_a_hook_of_the_users_is_kept():
    sys.excepthook = hook = lambda *_: None
    failed(ValueError("mine"))
    assert sys.excepthook is hook


def test_causes_and_groups_are_folded_too():
    try:
        raise ExceptionGroup("several", [failed(ValueError("first"))]) from failed(KeyError("cause"))
    except ExceptionGroup as group:
        said = printed(group)
    assert said.count(" frames of treadle") == 2
    assert said.count("TREADLE_FULL_TRACEBACK") == 1
    assert said.count("in training_step") == 2
    assert "stage.py" not in said


def test_an_error_that_treadle_had_no_part_in_is_printed_as_ever():
    failed(ValueError("before"))
    with pytest.raises(RuntimeError) as caught:
        torch.nn.Linear(2, 2)(torch.ones(3))
    assert printed(caught.value) == "".join(traceback.format_exception(caught.value))


# -- two ranks -------------------------------------------------------------------------------------------------------


def reports(kinds, patience):
    """What the hook of each rank prints for an error of its kind; the last rank is late, or never reports."""
    tracebacks.PATIENCE = patience
    world = open_world("cpu")
    hook = sys.excepthook
    assert isinstance(hook, tracebacks.Uncaught)
    hook._await_reporter_exit = lambda earlier: None  # in this test no process ends
    kind = kinds[world.rank]
    if kind is None:  # it claims the report, and is killed before it makes it
        hook._claim(ValueError(), "ValueError: ")
        world.barrier()
        world.barrier()
        return ""
    if None in kinds:
        world.barrier()
    try:
        raise kind("of both") if issubclass(kind, ValueError) else kind(f"rank {1 - world.rank} failed")
    except Exception as error:
        said = printed(error)
    world.barrier()
    return said


def test_ranks_with_the_same_error_report_it_once():
    said = sorted(run(reports, 2, (ValueError, ValueError), 10))
    assert said[0] == ""
    assert "ValueError: of both\non rank " in said[1]


def test_a_rank_with_another_error_says_it_in_a_line():
    short, long = sorted(run(reports, 2, (ValueError, KeyError), 10), key=len)
    assert "Traceback" in long
    assert short in ("rank 1 of 2: KeyError: 'rank 0 failed'\n", "rank 0 of 2: ValueError: of both\n")


class Closed(RuntimeError):
    """As gloo's, of a rank that has ended."""

    def __init__(self, words):
        super().__init__(f"Read error: Connection closed by peer; {words}")


@pytest.mark.long
@pytest.mark.parametrize("kind", [PeerFailed, Closed])
def test_a_rank_that_only_heard_of_an_error_lets_the_other_report(kind):
    first, second = run(reports, 2, (kind, ValueError), 10)
    assert first == ""
    assert "ValueError: of both\non rank 1 of 2\n" in second


def test_an_error_is_not_lost_with_the_rank_that_was_to_report_it():
    assert "ValueError: of both\non rank 1 of 2\n" in run(reports, 2, (None, ValueError), 0.2)[1]


TWO = SCRIPT.replace("treadle.Trainer(", "treadle.Trainer(devices=2, ")


@pytest.mark.long
def test_two_processes():
    done = script(TWO)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == done.stderr.count("RuntimeError: The size of tensor") == 1
    rank = done.stderr.partition("on rank ")[2][0]
    assert f"on rank {rank} of 2, in fit, epoch 0, after optimizer step 2, in batch 2" in done.stderr
    assert f"treadle: rank {rank} of 2 failed first: exit status 1" in done.stderr


def test_an_error_raised_while_a_lost_rank_was_handled_follows_from_that():
    error = ValueError("DataLoader worker is killed by signal: Terminated.")
    assert not tracebacks.is_consequence(error)
    error.__context__ = RuntimeError("[pair.cc:537] Read error: Connection reset by peer")
    assert tracebacks.is_consequence(error)
