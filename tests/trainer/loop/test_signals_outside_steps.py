"""Signals before the first step and after the last one: the run leaves with the signal's status, all cleanup done."""

import os
import re
import signal
from functools import partial

import pytest
import torch
from support.models import Line
from support.processes import in_own_process, run, script
from support.trainers import make_trainer
from torch.utils.data import DataLoader
from treadle.callbacks import LambdaCallback, ModelCheckpoint
from treadle.engine import Preempted

import treadle

BEFORE = ("prepare_data", "setup", "callback", "configure_model", "on_fit_start")


class Task(Line):
    """Sends a signal from one of the places `BEFORE` the first step."""

    features = 1

    def __init__(self, place=None, number=signal.SIGTERM):
        super().__init__()
        self.number, self.passed = number, []
        if place is not None:
            setattr(self, place, self.send)

    def send(self, *_):
        os.kill(os.getpid(), self.number)
        self.passed.append(self.number)

    def predict_step(self, batch, batch_idx):
        return self.net(batch)


class Hooks(treadle.Callback):
    """Notes its hooks; sends signals at some of them."""

    def __init__(self, *places):
        self.places, self.called = places, []
        for place in ("setup", "on_train_end", "on_exception", "teardown"):
            setattr(self, place, partial(self._note, place))

    def _note(self, place, trainer, pl_module, value=None):
        self.called.append(type(value).__name__ if place == "on_exception" else place)
        if (place, trainer.global_rank) in self.places:
            os.kill(os.getpid(), signal.SIGTERM)
        if place == "setup" and hasattr(pl_module, "callback"):
            pl_module.callback()


def fit(folder, task, *hooks, steps=4, world=1):
    """Return the Trainer, and the status with which ``fit`` wants to end the script; None if it goes on."""
    saving = ModelCheckpoint(folder, save_on_exception=True, save_top_k=-1, every_n_train_steps=steps)
    own = make_trainer(
        callbacks=[saving, *hooks], enable_checkpointing=None, max_steps=steps, devices=world, strategy="auto"
    )
    try:
        own.fit(task, DataLoader(torch.ones(16, 1), 1), ckpt_path="auto")
    except Preempted as error:
        return own, error.code
    return own, None


@pytest.mark.guarantee
@pytest.mark.parametrize("place", BEFORE)
@in_own_process
def test_before_the_first_step_one_process_leaves_at_once(place, tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    first, second = Hooks(("teardown", 0)), Hooks()  # another signal must not interrupt the cleanup
    task = Task(place)
    own, status = fit(tmp_path, task, first, second)
    assert (status, task.passed, own.global_step) == (143, [], 0)
    assert first.called[-2:] == second.called[-2:] == ["Preempted", "teardown"]
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.long
@in_own_process
def test_a_resumed_run_that_leaves_before_its_first_step_keeps_its_checkpoint(tmp_path):
    assert fit(tmp_path, Task())[1] is None
    names = sorted(path.name for path in tmp_path.iterdir())
    own, status = fit(tmp_path, Task("on_fit_start", signal.SIGHUP), steps=8)
    assert (status, sorted(path.name for path in tmp_path.iterdir())) == (129, names)
    own, status = fit(tmp_path, Task(), steps=8)
    assert (status, own.global_step) == (None, 8)


@in_own_process
def test_an_evaluation_leaves_before_its_first_batch_too(tmp_path):
    task = Task("setup", signal.SIGUSR1)
    with pytest.raises(Preempted, match="143"):
        make_trainer().predict(task, DataLoader(torch.ones(2, 1)))
    assert task.passed == []


@in_own_process
def test_a_save_before_the_first_step_is_completed(tmp_path):
    task = Task("on_save_checkpoint")
    saves = LambdaCallback(on_fit_start=lambda trainer, _: trainer.save_checkpoint(tmp_path / "own"))
    passed = LambdaCallback(on_fit_start=lambda *_: task.passed.append("the save"))
    assert fit(tmp_path, task, saves, passed)[1] == 143
    assert "the save" not in task.passed
    assert treadle.load_checkpoint(tmp_path / "own")["global_step"] == 0


@pytest.mark.long
@pytest.mark.guarantee
@pytest.mark.parametrize("place", ["on_train_end", "teardown"])
@in_own_process
def test_after_the_last_step_all_cleanup_is_done(place, tmp_path):
    first, second = Hooks((place, 0)), Hooks()
    own, status = fit(tmp_path, Task(), first, second)
    assert (status, own.global_step, own.status.value) == (143, 4, "finished")
    assert first.called == second.called == ["setup", "on_train_end", "teardown"]
    own, status = fit(tmp_path, Task())  # as a scheduler does
    assert (status, own.global_step) == (None, 4)


def signal_to_rank_one_in_teardown(folder, place):
    own, status = fit(folder, Task(), Hooks((place, 1)), world=2)
    return status, own.global_step, own.received_sigterm


@pytest.mark.guarantee
def test_after_the_last_step_all_ranks_leave_alike(tmp_path):
    assert run(signal_to_rank_one_in_teardown, 2, str(tmp_path), "teardown") == [(143, 4, False), (143, 4, True)]


IMPORTS = """
import atexit, os, signal, sys, time, treadle
from treadle.compat.demos.boring_classes import BoringModel
"""
AT_EXIT = """
atexit.register(print, "left by the interpreter")

class Task(BoringModel):
    def teardown(self, stage):
        os.kill(os.getpid(), signal.SIGTERM)

treadle.Trainer(max_steps=1, accelerator="cpu", logger=False).fit(Task())
print("went on")
"""


def test_after_the_last_step_the_interpreter_ends_by_itself():
    done = script(IMPORTS + AT_EXIT)
    assert done.returncode == 143, done.stderr
    assert done.stdout.splitlines()[-1] == "left by the interpreter"
    assert "went on" not in done.stdout


LONG_SETUP = """
place, striking, target, limit = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
rank = int(os.environ.get("RANK", "-1"))

def strike_and_work():
    if rank == striking:
        time.sleep(0.2)  # the other is there too
        os.kill(int(os.environ["TREADLE_SUPERVISOR"]) if target == "supervisor" else os.getpid(), signal.SIGTERM)
    for _ in range(1200):
        time.sleep(0.1)

class Task(BoringModel):
    def teardown(self, stage):
        print(f"torn down {rank}", flush=True)

setattr(Task, place, lambda self, stage=None: strike_and_work())
flags = {"timeout": {"seconds": 20}} if limit == "limit" else {}
treadle.Trainer(devices=2, accelerator="cpu", max_steps=1, logger=False, **flags).fit(Task())
"""


@pytest.mark.long
@pytest.mark.guarantee
@pytest.mark.parametrize(
    ("place", "striking", "target", "limit"),
    [
        # Rank 1 waits for rank 0 meanwhile.
        pytest.param("prepare_data", 0, "supervisor", "no limit", marks=pytest.mark.exhaustive),
        pytest.param("prepare_data", 0, "rank", "limit", marks=pytest.mark.exhaustive),
        pytest.param("setup", 0, "supervisor", "limit", marks=pytest.mark.exhaustive),
        ("setup", 1, "rank", "limit"),
    ],
)
def test_a_long_setup_of_two_ranks_ends_soon(place, striking, target, limit):
    done = script(IMPORTS + LONG_SETUP, place, str(striking), target, limit, timeout=90)  # the setup takes longer
    assert done.returncode == 143, done.stderr
    assert sorted(re.findall("torn down .", done.stdout)) == ["torn down 0", "torn down 1"]
    assert "Traceback" not in done.stderr
