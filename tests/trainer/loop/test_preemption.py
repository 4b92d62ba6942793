"""Signals that ask a run to end: saved at the next step boundary, status 143, and gone on with bit for bit."""

import multiprocessing
import os
import signal
import sys
import time

import pytest
import torch
from support.fit_runs import Recorder
from support.models import gathered, optimize
from support.processes import in_own_process, run
from support.trainers import make_trainer
from torch import nn
from torch.utils.data import DataLoader
from treadle.callbacks import LambdaCallback, ModelCheckpoint
from treadle.engine import Preempted
from treadle.strategies.processes import os_process

import treadle

SAMPLES, BATCH = 24, 2


class Task(treadle.TaskModule):
    """Dropout, a scheduler and a logged mean: all that a resume has to restore."""

    def __init__(self, manual=False):
        super().__init__()
        torch.manual_seed(3)
        self.automatic_optimization = not manual
        self.net = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.seen, self.means = [], []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch.flatten().tolist())
        loss = self.net(batch).square().mean()
        self.log("loss", loss, on_epoch=True, on_step=False)
        return optimize(self, loss)

    def validation_step(self, batch, batch_idx):
        self.log("val", self.net(batch).square().mean())

    def on_train_epoch_end(self):
        self.means.append(self.trainer.callback_metrics["loss"].item())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class Signals(treadle.Callback):
    """Sends a signal to this process when a run first comes to a place, ``times`` times."""

    def __init__(self, number, step, place="on_train_batch_end", rank=0, times=1):
        self.number, self.step, self.rank, self.times = number, step, rank, times
        setattr(self, place, self._send)

    def _send(self, trainer, *_):
        if trainer.global_step == self.step and trainer.global_rank == self.rank and not trainer.sanity_checking:
            for _ in range(self.times):
                self.step = -1
                os.kill(os.getpid(), self.number)


def loaders(batch_size=BATCH, **options):
    """Of training and of validation."""
    return [DataLoader(torch.arange(float(n))[:, None], batch_size, shuffle=n > 9, **options) for n in (SAMPLES, 6)]


def fit(folder, callbacks=(), manual=False, saving=None, loading=None, **flags):
    task, saving = Task(manual), ModelCheckpoint(folder, **(saving or {}))
    flags = {"max_epochs": 2, "num_sanity_val_steps": 0, "enable_checkpointing": None, **flags}
    own = make_trainer(callbacks=[saving, *callbacks], **flags)
    error = None
    try:
        own.fit(task, *loaders(BATCH // own.world_size, **(loading or {})), ckpt_path="auto")
    except (Preempted, KeyboardInterrupt) as caught:
        error = getattr(caught, "code", 130)
        assert own.interrupted or error != 130
    return {
        "status": error,
        "step": own.global_step,
        "seen": task.seen,
        "means": task.means,
        "weights": list(map(gathered, task.parameters())),
        "flag": own.received_sigterm,
        "drawn": torch.rand(()).item(),
    }


def check(first, second, right, step, status=143):
    assert (first["status"], first["step"]) == (status, step)
    assert second["status"] is None
    assert first["seen"] + second["seen"] == right["seen"]
    assert (first["means"] + second["means"], second["drawn"]) == (right["means"], right["drawn"])
    assert all(map(torch.equal, second["weights"], right["weights"]))


# The last step's validation is still to come when a run of 24 steps is resumed.
PLACES = [
    # step at which it comes, where, and the step that is saved
    ("on_train_batch_start", 3, 4),
    ("on_train_batch_end", 5, 5),
    ("on_train_batch_end", 12, 12),  # the epoch's last: its validation is still to come
    ("on_validation_batch_start", 12, 12),
    ("on_save_checkpoint", 12, 12),
    ("on_validation_batch_start", 24, 24),
]
TWICE = [PLACES[0], PLACES[4]]
RANKS = [
    ("ddp", 1),
    *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in (("ddp", 0), ("fsdp", 0), ("fsdp", 1))),
]


@pytest.mark.guarantee
@pytest.mark.parametrize(
    ("times", "place", "step", "saved"),
    [
        *((1, *place) for place in PLACES),
        *(pytest.param(2, *place, marks=() if place in TWICE else pytest.mark.exhaustive) for place in PLACES),
    ],
)
@in_own_process
def test_a_signal_saves_at_the_next_step_boundary(place, step, saved, times, tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
    right = fit(tmp_path / "whole")
    first = fit(tmp_path / "a", [Signals(signal.SIGTERM, step, place, times=times)])
    assert first["flag"]
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)] == before
    check(first, fit(tmp_path / "a"), right, saved)


@pytest.mark.long
@pytest.mark.parametrize(
    "more",
    [
        {"manual": True},
        {"accumulate_grad_batches": 3},
        pytest.param({"saving": {"save_last": True}}, marks=pytest.mark.exhaustive),
        pytest.param({"val_check_interval": 5}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
@in_own_process
def test_whatever_the_run_is_like(more, tmp_path):
    step = 3 if "accumulate_grad_batches" in more else 5
    right = fit(tmp_path / "whole", **more)
    first = fit(tmp_path / "a", [Signals(signal.SIGUSR1, step)], **more)
    assert not first["flag"]
    check(first, fit(tmp_path / "a", **more), right, step)
    assert (tmp_path / "a" / ("last.ckpt" if "saving" in more else "preempted.ckpt")).exists()


def on_two(folder, strategy, rank, number, status, saving=None):
    more = {"strategy": strategy, "devices": 2, "saving": saving}
    right = fit(f"{folder}/whole", **more)
    first = fit(f"{folder}/a", [Signals(number, 12 if rank else 4, rank=rank)], **more)
    # The votes of the step were cast before it came; between two epochs there are others.
    check(first, fit(f"{folder}/a", **more), right, 12 if rank else 5, status)
    return first["flag"]


@pytest.mark.long
@pytest.mark.guarantee
@pytest.mark.parametrize(("strategy", "rank"), RANKS)
def test_a_signal_to_one_rank_ends_all_after_the_same_step(strategy, rank, tmp_path):
    assert run(on_two, 2, str(tmp_path), strategy, rank, signal.SIGTERM, 143) == [rank == 0, rank == 1]


@in_own_process
def test_a_closed_terminal_has_a_status_of_its_own(tmp_path):
    first = fit(tmp_path, [Signals(signal.SIGHUP, 5)])
    assert (first["status"], first["step"], first["flag"]) == (129, 5, False)
    assert (tmp_path / "preempted.ckpt").exists()


def fork(*_):
    """Starts a child, and sends it a signal of the run and then the one of its parent."""
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    os.kill(child.pid, signal.SIGUSR1)
    time.sleep(0.2)
    assert child.is_alive()
    child.terminate()
    child.join(10)
    assert child.exitcode == -signal.SIGTERM


@in_own_process
def test_a_child_forked_within_fit_can_be_terminated(tmp_path):
    assert fit(tmp_path, [LambdaCallback(on_train_start=fork)])["status"] is None


class Finalized:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)


@in_own_process
def test_a_signal_in_a_finalizer_ends_the_run_behind_it(tmp_path):
    """Python prints an exception that is raised there, and goes on."""
    ignored = []
    sys.unraisablehook = ignored.append
    assert fit(tmp_path, [LambdaCallback(setup=lambda *_: Finalized())])["status"] == 143
    assert ignored == []


@in_own_process
def test_nothing_can_be_saved(tmp_path):
    words = "SIGTERM ends the run at optimizer step 3 without saving it, because the Trainer has no ModelCheckpoint"
    with pytest.warns(UserWarning, match=words):
        found = fit(tmp_path, [Signals(signal.SIGTERM, 3)], saving={"save_top_k": 0})
    assert (found["status"], list(tmp_path.iterdir())) == (143, [])


@in_own_process
def test_a_signal_that_is_ignored_stays_so(tmp_path):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert fit(tmp_path, [Signals(signal.SIGTERM, 3)])["status"] is None
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


@in_own_process
def test_the_scripts_own_handler_is_called_too_and_put_back(tmp_path):
    called = []

    def handler(number, frame):
        called.append(number)

    signal.signal(signal.SIGUSR1, handler)
    assert fit(tmp_path, [Signals(signal.SIGUSR1, 3)])["status"] == 143
    assert signal.getsignal(signal.SIGUSR1) is handler
    # Of one that comes after the last step the handler knows already.
    assert fit(tmp_path / "b", [Signals(signal.SIGUSR1, 24, "on_train_end")])["status"] is None
    assert called == [signal.SIGUSR1] * 2


# -- Ctrl-C ----------------------------------------------------------------------------------------------------------

ASKED = {"save_on_exception": True, "filename": "{step}", "every_n_epochs": 1, "save_top_k": -1}


@pytest.mark.long
@pytest.mark.guarantee
@pytest.mark.parametrize(
    ("place", "step", "saved"),
    [pytest.param(*place, marks=() if place in TWICE else pytest.mark.exhaustive) for place in PLACES],
)
@in_own_process
def test_ctrl_c_saves_at_the_next_step_boundary_if_asked_to(place, step, saved, tmp_path):
    before, called = signal.getsignal(signal.SIGINT), []
    right = fit(tmp_path / "whole", saving=ASKED)
    first = fit(tmp_path / "a", [Signals(signal.SIGINT, step, place), Recorder(None, called)], saving=ASKED)
    assert signal.getsignal(signal.SIGINT) is before
    paired = ("setup", "on_exception", "teardown")
    assert [name for name in called if name in paired] == [*paired]
    check(first, fit(tmp_path / "a", saving=ASKED), right, saved, status=130)
    assert (tmp_path / "a" / f"step={saved}.ckpt").exists()


@pytest.mark.parametrize(("place", "step"), [("on_train_batch_start", 5), ("on_save_checkpoint", 12)])
@in_own_process
def test_a_second_ctrl_c_ends_within_the_step_or_the_save(place, step, tmp_path):
    with pytest.warns(UserWarning, match="the run is not saved, because a second Ctrl-C came"):
        first = fit(tmp_path, [Signals(signal.SIGINT, step, place, times=2)], saving=ASKED)
    assert (first["status"], first["step"], list(tmp_path.iterdir())) == (130, step, [])


@pytest.mark.parametrize(("place", "saved"), [("on_train_batch_start", 0), ("on_save_checkpoint", 1)])
@in_own_process
def test_ctrl_c_raises_at_once_but_lets_a_save_complete(place, saved, tmp_path):
    first = fit(tmp_path, [Signals(signal.SIGINT, 12 * saved, place)])
    assert (first["status"], first["step"]) == (130, 12 * saved)
    assert len(list(tmp_path.iterdir())) == saved


@in_own_process
def test_ctrl_c_before_training_and_in_the_sanity_check_ends_at_once(tmp_path):
    for place in ("setup", "on_validation_batch_start"):
        callback = LambdaCallback(**{place: lambda *_: os.kill(os.getpid(), signal.SIGINT)})
        first = fit(tmp_path, [callback], saving=ASKED, num_sanity_val_steps=1)
        assert (first["status"], first["step"], list(tmp_path.iterdir())) == (130, 0, [])


@in_own_process
def test_ctrl_c_after_the_last_step_is_not_lost(tmp_path):
    found = fit(tmp_path, [Signals(signal.SIGINT, 24, "on_train_end")], saving=ASKED)
    assert (found["status"], found["step"]) == (130, 24)
    assert (tmp_path / "step=24.ckpt").exists()


@in_own_process
def test_the_same_trainer_fits_again_after_ctrl_c():
    task = Task()
    task.net[1].eval()
    interrupting = Signals(signal.SIGINT, 12, "on_validation_batch_start")
    own = make_trainer(callbacks=interrupting, max_epochs=2)
    with pytest.raises(KeyboardInterrupt):
        own.fit(task, *loaders())
    assert own.interrupted
    assert (task.training, task.net[0].training, task.net[1].training) == (True, True, False)
    assert torch.is_grad_enabled()
    own.fit(task, *loaders())
    assert (own.interrupted, own.current_epoch, own.status.value) == (False, 2, "finished")


class Group(treadle.Callback):
    """Sends Ctrl-C to this process and its children, as a terminal does."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 3:
            workers = multiprocessing.active_children()
            assert len(workers) == 2
            for process in workers:
                os.kill(process.pid, signal.SIGINT)
            time.sleep(0.1)
            assert all(process.is_alive() for process in workers)
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.long
@pytest.mark.parametrize("method", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
@in_own_process
def test_data_workers_stay_until_the_step_is_complete(method, tmp_path):
    workers = {"num_workers": 2, "multiprocessing_context": method}
    right = fit(tmp_path / "whole", saving=ASKED, loading=workers)
    first = fit(tmp_path / "a", [Group()], saving=ASKED, loading=workers)
    check(first, fit(tmp_path / "a", saving=ASKED, loading=workers), right, 4, status=130)
    assert multiprocessing.active_children() == []


@pytest.mark.guarantee
@pytest.mark.parametrize(("strategy", "rank"), RANKS)
def test_ctrl_c_on_one_rank_saves_on_all_after_the_same_step(strategy, rank, tmp_path):
    run(on_two, 2, str(tmp_path), strategy, rank, signal.SIGINT, 130, ASKED)


def fit_after_a_failure(folder):
    os_process.open_scratch(os.getppid())
    os_process.leave_on_sigterm()  # as a rank does whose stage has failed
    return fit(folder, [Signals(signal.SIGTERM, 3)])["step"]


def test_a_stage_that_failed_before_changes_nothing(tmp_path):
    assert run(fit_after_a_failure, 1, str(tmp_path)) == [3]
