"""Run folders: numbers that no two jobs share, a lock that ends with its job, and what is told of a run's end."""

import contextlib
import errno
import json
import os
import re
import resource
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from support.processes import run, script
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from treadle.callbacks import EarlyStopping, ModelCheckpoint, OnExceptionCheckpoint, RunReport
from treadle.callbacks.reporting.run_record import RunRecord
from treadle.engine.checkpoint.store import verify
from treadle.loggers import CSVLogger, TensorBoardLogger
from treadle.trainer.runs import index, lock
from treadle.trainer.runs.file_names import LOCK
from treadle.trainer.runs.folder import RunFolder, check_name
from treadle.trainer.runs.lock import Holder, RunLock, holder

import treadle


def test_a_prepared_folder_is_named_by_its_number(tmp_path):
    with pytest.raises(ValueError, match=r"path=.*must end in the run's number"):
        RunFolder.prepare(tmp_path / "run", "", {})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("nodes", ["2", 0, 1.5])
def test_a_wrong_number_of_machines_is_named(nodes, tmp_path):
    with pytest.raises(ValueError, match=r"num_nodes=.* must be an integer"):
        RunFolder.create(tmp_path, "x", {"num_nodes": nodes})


class Task(treadle.TaskModule):
    """Learns a constant. `at` is called before each step with the steps so far."""

    def __init__(self, at=lambda step: None):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(2, 1)
        self.at = at

    def training_step(self, batch, batch_idx):
        self.at(self.trainer.global_step)
        loss = (self.net(batch[0]) - 1).pow(2).mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", (self.net(batch[0]) - 1).pow(2).mean())

    def test_step(self, batch, batch_idx):
        self.log("test_loss", (self.net(batch[0]) - 1).pow(2).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05)


def data():
    return DataLoader(TensorDataset(torch.linspace(-1, 1, 32).reshape(16, 2)), batch_size=2)


def settings(**more):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    return {"accelerator": "cpu", "max_epochs": 2, "log_every_n_steps": 1, **quiet, **more}


def fit(folder, task=None, ckpt_path=None, **more):
    trainer = treadle.Trainer(**folder.flags(settings(**more)))
    trainer.fit(task or Task(), data(), data(), ckpt_path=ckpt_path)
    return trainer


def record(path):
    return json.loads((Path(path) / "run.json").read_text())


def state(path):
    return index.read(Path(path)).state


# -- numbers ---------------------------------------------------------------------------------------------------------


def at_once(count, work):
    """What `work` returns in so many forks, which begin it at the same moment."""
    go, start = os.pipe()
    readers, children = [], []
    for _ in range(count):
        reader, writer = os.pipe()
        if (child := os.fork()) == 0:
            try:
                os.close(start)
                os.read(go, 1)  # until all ends of it are closed
                os.write(writer, json.dumps(work()).encode())
            finally:
                os._exit(0)
        os.close(writer)
        readers.append(reader)
        children.append(child)
    os.close(go)
    os.close(start)
    found = [os.read(reader, 4096) for reader in readers]
    for reader, child in zip(readers, children, strict=True):
        os.close(reader)
        os.waitpid(child, 0)
    return [json.loads(text) for text in found]


def test_twenty_jobs_at_once_share_no_number(tmp_path, monkeypatch):
    listdir = os.listdir

    def slowly(path):
        found = listdir(path)
        time.sleep(0.1)  # as over a network: all have looked before the first one takes a number
        return found

    monkeypatch.setattr(os, "listdir", slowly)
    paths = at_once(20, lambda: str(RunFolder.create(tmp_path, "many").path))
    assert sorted(int(Path(path).name) for path in paths) == list(range(1, 21))
    assert {Path(path).parent for path in paths} == {tmp_path / "many"}
    assert all(record(path)["number"] == int(Path(path).name) for path in paths)


def test_numbers_go_on_from_the_highest(tmp_path):
    for name in ("3", "17", "notes", "٤", "5.old"):
        (tmp_path / "a" / name).mkdir(parents=True)
    assert RunFolder.create(tmp_path, "a").path == tmp_path / "a" / "18"
    assert RunFolder.create(tmp_path, "b").path == tmp_path / "b" / "1"


@pytest.mark.parametrize("name", ["lauf über alles", "3", "a.b-c=d,e", "🎉", "x" * 200, "-n"])
def test_odd_names(name, tmp_path):
    with RunFolder.create(tmp_path, name) as folder:
        pass
    assert folder.path == tmp_path / name / "1"
    (found,) = index.find(tmp_path)
    assert (found.name, found.number, found.state) == (name, 1, "finished")


@pytest.mark.parametrize(
    "name", ["", " ", ".", "..", ".hidden", "a/b", "a\\b", " a", "a\n", "a\x1b[31m", "a:b", "x" * 201, "é" * 101]
)
def test_names_that_are_refused(name, tmp_path):
    with pytest.raises(ValueError, match="name of a folder"):
        RunFolder.create(tmp_path / "runs", name)
    assert not (tmp_path / "runs").exists()


def test_a_name_is_a_string():
    with pytest.raises(TypeError, match="name=3 must be a string"):
        check_name(3)


def test_where_no_folder_can_be_made_the_text_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    places = [tmp_path / "file" / "runs", Path("/sys/treadle-runs")]
    if os.getuid() != 0:
        (tmp_path / "closed").mkdir(mode=0o555)
        places.append(tmp_path / "closed")
    for place in places:
        with pytest.raises(OSError, match=r"cannot create a run's folder in .*Choose a writable directory"):
            RunFolder.create(place)


# -- one job per folder ----------------------------------------------------------------------------------------------


def holding(work):
    """A fork that does `work`, whose result must be kept, and then sleeps; returns its process id."""
    ready, done = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            kept = work()
            os.write(done, b"1")
            time.sleep(60)
            del kept
        finally:
            os._exit(1)
    os.close(done)
    assert os.read(ready, 1) == b"1", "the fork failed"
    os.close(ready)
    return child


def kill(child):
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_a_second_job_is_refused_with_words_until_the_first_is_killed(tmp_path):
    path = tmp_path / "default" / "1"
    child = holding(lambda: RunFolder.create(tmp_path))
    try:
        assert state(path) == "running"
        began = time.strftime("%Y-%m-%d %H", time.localtime(record(path)["began"]))
        with pytest.raises(ValueError, match=rf"in use by process {child} on {os.uname().nodename}, since {began}"):
            RunFolder.open(path)
        assert state(path) == "running"  # to look, and to try, takes nothing away
    finally:
        kill(child)
    assert state(path) == "killed"
    with RunFolder.open(path) as folder:
        assert state(path) == "running"
        assert record(path)["pid"] == os.getpid()
        with pytest.raises(ValueError, match=f"in use by process {os.getpid()}"):  # within one process too
            RunFolder.open(folder.path)
    assert state(path) == "finished"
    RunFolder.open(path).release()


def test_no_one_is_told_to_remove_a_lock_that_the_system_holds(tmp_path, monkeypatch):
    with RunFolder.create(tmp_path) as folder:
        monkeypatch.setattr(lock, "_describe_place", lambda: "another container on this machine")
        assert holder(folder.path) is not None
        with pytest.raises(ValueError, match="in use by process") as caught:
            RunFolder.open(folder.path)
    assert "delete" not in str(caught.value)


def test_a_forked_worker_does_not_hold_the_lock(tmp_path):
    worker = tmp_path / "worker"

    def work():
        folder = RunFolder.create(tmp_path)
        if os.fork() == 0:  # as a data loader's worker
            worker.write_text(str(os.getpid()))  # it runs, so it has let go of the lock
            time.sleep(60)
            os._exit(0)
        while not (worker.exists() and worker.read_text()):
            time.sleep(0.01)
        return folder

    child = holding(work)
    kill(child)
    try:
        os.kill(int(worker.read_text()), 0)  # lives
        assert state(tmp_path / "default" / "1") == "killed"
        RunFolder.open(tmp_path / "default" / "1").release()
    finally:
        os.kill(int(worker.read_text()), signal.SIGKILL)


def test_only_a_run_folder_is_gone_on_with(tmp_path):
    with pytest.raises(ValueError, match=r"none does not exist\."):
        RunFolder.open(tmp_path / "none")
    with pytest.raises(ValueError, match=r"not a run's folder, because it has no run\.json"):
        RunFolder.open(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_can_not_be_locked(tmp_path):
    folder = RunFolder.create(tmp_path)
    folder.release()
    (folder.path / LOCK).unlink()
    (folder.path / LOCK).mkdir()
    with pytest.raises(OSError, match=f"cannot lock {folder.path}/lock: Is a directory"):
        RunFolder.open(folder.path)


@pytest.mark.parametrize("name", [LOCK, ".run.json.tmp", "run.json", "error.json", "report.html.tmp"])
def test_nothing_is_written_through_a_link(name, tmp_path):
    RunFolder.create(tmp_path / "runs").release()
    path, other = tmp_path / "runs" / "default" / "1", tmp_path / "other"
    other.write_text("precious")
    (path / name).unlink(missing_ok=True)
    (path / name).symlink_to(other)
    with pytest.raises(OSError, match="cannot lock") if name == LOCK else contextlib.nullcontext():
        with RunFolder.open(path) as folder:
            fit(folder, max_epochs=1, limit_train_batches=1)
    assert other.read_text() == "precious"


def test_a_disk_that_is_full_is_said_with_the_place(tmp_path):
    def work():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        try:
            RunFolder.create(tmp_path)
        except OSError as error:
            return str(error)

    (said,) = at_once(1, work)
    assert f"cannot lock {tmp_path}/default/1/lock: File too large" in said


HOSTILE = {"token": "../../x", "pid": -1, "host": "\x1b[2J", "since": float("nan"), "began": 3, "place": None}


@pytest.mark.parametrize(("name", "value"), HOSTILE.items(), ids=HOSTILE)
def test_what_stands_in_a_lock_is_not_trusted(name, value, tmp_path):
    RunFolder.create(tmp_path).release()
    path = tmp_path / "default" / "1"
    good = vars(Holder("far", 1, 0.0, "far 0", "", "1" * 32, "beat"))
    (path / LOCK).write_text(json.dumps({**good, name: value}))
    assert holder(path) is None
    RunFolder.open(path).release()


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"seconds": "x", "began": [], "best": 3, "metrics": 0}'])
def test_a_broken_record_does_not_lose_the_folder(content, tmp_path):
    RunFolder.create(tmp_path).release()
    path = tmp_path / "default" / "1"
    (path / "run.json").write_bytes(content)
    with RunFolder.open(path) as folder:
        fit(folder, max_epochs=1)
    found = record(path)
    assert (found["state"], found["steps"], found["number"]) == ("finished", 8, 1)
    assert found["seconds"] >= 0


# -- where the system keeps no locks ---------------------------------------------------------------------------------


@pytest.fixture(params=["no-module", "no-support"])
def without_locks(request, monkeypatch):
    if request.param == "no-module":
        monkeypatch.setattr(lock, "fcntl", None)
    else:

        def refused(*_):
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

        monkeypatch.setattr(lock.fcntl, "flock", refused)
    monkeypatch.setattr(lock, "BEAT", 0.02)


def test_without_locks_a_second_job_is_refused_until_the_first_is_killed(without_locks, tmp_path):
    child = holding(lambda: RunLock(tmp_path))
    try:
        assert holder(tmp_path).pid == child
        with pytest.raises(ValueError, match=f"in use by process {child}"):
            RunLock(tmp_path)
    finally:
        kill(child)
    assert holder(tmp_path) is None
    held = RunLock(tmp_path)
    assert holder(tmp_path) == held.holder
    held.release()
    assert holder(tmp_path) is None
    RunLock(tmp_path).release()
    assert os.listdir(tmp_path) == [LOCK]


def test_a_holder_elsewhere_lives_by_its_signs(without_locks, tmp_path):
    held = RunLock(tmp_path)
    os.utime(tmp_path / LOCK, (0, 0))
    deadline = time.monotonic() + 5
    while (tmp_path / LOCK).stat().st_mtime == 0:
        assert time.monotonic() < deadline, "no sign of life"
        time.sleep(0.01)
    held.release()
    (tmp_path / LOCK).unlink()
    other = Holder("far", 1, time.time(), "far 0", "", "1" * 32, "beat")
    (tmp_path / LOCK).write_text(json.dumps(vars(other)))
    with pytest.raises(ValueError, match=r"process 1 on far.*cannot be checked from this machine, delete .*lock"):
        RunLock(tmp_path)
    silent = time.time() - lock.SILENCE - 1
    os.utime(tmp_path / LOCK, (silent, silent))
    assert holder(tmp_path) is None
    RunLock(tmp_path).release()


def test_who_can_not_see_a_system_lock_leaves_it_alone(without_locks, tmp_path):
    other = Holder("far", 1, 0.0, "far 0", "", "1" * 32, "system")
    (tmp_path / LOCK).write_text(json.dumps(vars(other)))
    os.utime(tmp_path / LOCK, (0, 0))
    with pytest.raises(ValueError, match="process 1 on far"):
        RunLock(tmp_path)


def test_who_has_system_locks_respects_one_that_has_not(tmp_path):
    other = Holder("far", 1, 0.0, "far 0", "", "1" * 32, "beat")
    (tmp_path / LOCK).write_text(json.dumps(vars(other)))
    with pytest.raises(ValueError, match="process 1 on far"):
        RunLock(tmp_path)
    os.utime(tmp_path / LOCK, (0, 0))
    RunLock(tmp_path).release()


def test_of_many_jobs_one_takes_over_a_dead_lock(tmp_path, monkeypatch):
    def judged(holder, file):
        time.sleep(0.1)  # all see that it is dead before the first one acts
        return holder.host != "far"

    monkeypatch.setattr(lock, "fcntl", None)
    monkeypatch.setattr(Holder, "is_alive", judged)
    dead = Holder("far", 1, 0.0, "far 0", "", "1" * 32, "beat")
    (tmp_path / LOCK).write_text(json.dumps(vars(dead)))

    def take():
        try:
            held = RunLock(tmp_path)
        except ValueError:
            return False
        time.sleep(0.5)
        held.release()
        return True

    assert sorted(at_once(16, take)) == [False] * 15 + [True]
    assert os.listdir(tmp_path) == [LOCK]


# -- how runs end ----------------------------------------------------------------------------------------------------


def test_a_finished_run(tmp_path):
    with RunFolder.create(tmp_path, "a", settings()) as folder:
        folder.write_config("seed: 0\n")
        trainer = fit(folder, callbacks=ModelCheckpoint(monitor="val_loss"))
    found, best = record(folder.path), trainer.checkpoint_callback
    assert (found["state"], found["note"], found["error"]) == ("finished", "finished", None)
    assert (found["steps"], found["epochs"], found["samples"]) == (16, 2, 32)
    value = best.best_model_score.item()
    assert found["best"] == {
        "metric": "val_loss",
        "mode": "min",
        "value": value,
        "checkpoint": os.path.relpath(best.best_model_path, folder.path),
    }
    assert found["metrics"]["val_loss"] == pytest.approx(trainer.callback_metrics["val_loss"].item())
    assert found["began"] <= found["ended"] <= found["updated"]
    assert 0 < found["seconds"] < 60
    assert (folder.path / "config.yaml").read_text() == "seed: 0\n"
    assert (
        json.loads((folder.path / "environment.json").read_text())["torch"].partition("+")[0]
        == (torch.__version__.partition("+")[0])
    )
    files = {path.name for path in folder.path.iterdir()}
    assert {"report.html", "checkpoints", "run.json", "curves.json", "lock"} <= files
    assert sum(name.startswith("events.") for name in files) == 1
    assert not any(name.endswith(".tmp") for name in files)
    curve = json.loads((folder.path / "curves.json").read_text())["charts"]["loss"]["train_loss"]
    assert curve["steps"] == trainer.history["train_loss"].steps == list(range(1, 17))
    assert curve["values"] == pytest.approx(trainer.history["train_loss"].values, rel=1e-6)


def test_the_best_value_is_of_the_callback_that_watches_for_one(tmp_path):
    with RunFolder.create(tmp_path) as folder:
        often, best = ModelCheckpoint(every_n_train_steps=4), ModelCheckpoint(monitor="train_loss", mode="max")
        fit(folder, callbacks=[often, best, EarlyStopping("val_loss")])
    found = record(folder.path)["best"]
    assert (found["metric"], found["mode"], found["value"]) == ("train_loss", "max", best.best_model_score.item())
    assert (folder.path / found["checkpoint"]).samefile(best.best_model_path)
    assert "best train_loss" in (folder.path / "report.html").read_text()


def test_the_best_value_of_early_stopping_and_why_it_stopped(tmp_path):
    with RunFolder.create(tmp_path) as folder:
        stop = EarlyStopping("val_loss", mode="max", patience=1)
        fit(folder, max_epochs=5, callbacks=[stop])
    found = record(folder.path)
    assert found["best"] == {"metric": "val_loss", "mode": "max", "value": stop.best_score.item()}
    assert (found["state"], found["note"]) == ("finished", "stopped early by EarlyStopping")


def inside(folder, work):
    with folder:
        work()


def raises(error, at):
    def act(step):
        if step == at:
            raise error

    return act


@pytest.mark.parametrize(
    ("error", "expected", "said"),
    [
        (lambda: ValueError("bad\nvalue"), "failed: ValueError", "ValueError: bad\nvalue"),
        (lambda: KeyboardInterrupt(), "interrupted", None),
        (lambda: SystemExit(3), "failed: SystemExit", "SystemExit: 3"),
    ],
    ids=["failed", "interrupted", "exit"],
)
@pytest.mark.parametrize("within", [True, False], ids=["with", "plain"])
def test_a_run_that_an_error_ends(error, expected, said, within, tmp_path):
    folder, error = RunFolder.create(tmp_path), error()

    def work():
        fit(folder, Task(raises(error, at=5)))

    with pytest.raises(type(error)):
        inside(folder, work) if within else work()
    found = record(folder.path)
    assert (found["state"], found["error"], found["steps"]) == (expected, said, 5)
    assert found["ended"] is not None
    assert (holder(folder.path) is None) == within  # else the process still has it
    assert state(folder.path) == expected
    folder.release()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (None, "finished"),
        (SystemExit(0), "finished"),
        (SystemExit(2), "failed: SystemExit"),
        (OSError(), "failed: OSError"),
    ],
    ids=["none", "exit-0", "exit-2", "error"],
)
def test_what_ends_the_block_outside_of_a_stage_is_told(error, expected, tmp_path):
    folder = RunFolder.create(tmp_path)

    def work():
        if error is not None:
            raise error

    with contextlib.nullcontext() if error is None else pytest.raises(type(error)):  # it goes its way
        inside(folder, work)
    assert state(folder.path) == expected
    assert holder(folder.path) is None


def test_a_failure_after_a_finished_stage_is_told(tmp_path):
    folder = RunFolder.create(tmp_path)

    def work():
        fit(folder, max_epochs=1)
        assert state(folder.path) == "finished"
        return 1 / 0

    with pytest.raises(ZeroDivisionError):
        inside(folder, work)
    assert state(folder.path) == "failed: ZeroDivisionError"
    assert record(folder.path)["steps"] == 8


def test_another_stage_in_the_folder_keeps_what_training_came_to(tmp_path):
    with RunFolder.create(tmp_path) as folder:
        fit(folder, callbacks=ModelCheckpoint(monitor="val_loss"))
    before, curves = record(folder.path), (folder.path / "curves.json").read_bytes()
    with RunFolder.open(folder.path) as folder:
        treadle.Trainer(**folder.flags(settings())).test(Task(), data(), verbose=False)
    after = record(folder.path)
    assert (after["stage"], after["state"], after["note"]) == ("test", "finished", "test done")
    assert {name: after[name] for name in ("steps", "epochs", "best", "began")} == {
        name: before[name] for name in ("steps", "epochs", "best", "began")
    }
    assert after["metrics"] == {**before["metrics"], "test_loss": after["metrics"]["test_loss"]}
    assert (folder.path / "curves.json").read_bytes() == curves
    assert after["seconds"] > before["seconds"]


def test_a_killed_run_goes_on_in_its_folder_to_the_same_end(tmp_path):
    keeps = {"every_n_train_steps": 1, "monitor": "train_loss"}
    whole = RunFolder.create(tmp_path, "whole")
    never = fit(whole, callbacks=ModelCheckpoint(**keeps))
    weights = never.task.net.weight.detach().clone()

    def killed():
        folder = RunFolder.create(tmp_path, "cut")
        fit(
            folder,
            Task(lambda step: step == 11 and os.kill(os.getpid(), signal.SIGKILL)),
            callbacks=ModelCheckpoint(**keeps),
        )

    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)  # the others are not in the fork
            killed()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    path = tmp_path / "cut" / "1"
    before = record(path)
    assert before["state"] == "running"
    assert state(path) == "killed"
    with RunFolder.open(path) as folder:
        resumed = fit(folder, ckpt_path="auto", callbacks=ModelCheckpoint(**keeps))
    assert torch.equal(resumed.task.net.weight, weights)
    found = record(path)
    assert (found["state"], found["steps"], found["began"]) == ("finished", 16, before["began"])
    assert found["resumed"] > found["began"]
    curves = [json.loads((one / "curves.json").read_text())["charts"]["loss"] for one in (path, whole.path)]
    assert curves[0] == curves[1]  # from the first step on
    assert found["best"]["value"] == record(whole.path)["best"]["value"]
    whole.release()


class Worse(Task):
    """Its first epoch is its best one."""

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", float(self.trainer.current_epoch))


@pytest.mark.parametrize(
    ("saver", "step"),
    [
        ({}, 24),
        ({"save_top_k": 2}, 24),
        ({"save_last": False}, 8),  # as it was asked for
    ],
)
def test_a_resume_goes_on_from_the_last_step_and_not_from_the_best(tmp_path, caplog, saver, step):
    with RunFolder.create(tmp_path) as folder:
        fit(folder, Worse(), callbacks=ModelCheckpoint(monitor="val_loss", **saver), max_epochs=3)
    began = []
    with RunFolder.open(folder.path) as folder, caplog.at_level("INFO", "treadle"):
        task = Worse(began.append)
        again = ModelCheckpoint(monitor="val_loss", **saver)
        resumed = fit(folder, task, ckpt_path="last", callbacks=again, max_epochs=4)
    assert (began[0], resumed.global_step) == (step, 32)
    (said,) = [one for one in caplog.messages if "ckpt_path='last'" in one]
    reached = "" if step == 24 else "; the run had reached step 24"
    assert f"(optimizer step {step}{reached})" in said
    assert Path(again.best_model_path).name == "epoch=0-step=8.ckpt"


@pytest.mark.parametrize(
    ("callbacks", "names"),
    [
        ([{"monitor": "val_loss"}, {"every_n_epochs": 1}], []),
        ([{"monitor": "val_loss", "save_top_k": -1}], []),
        ([{"monitor": "val_loss", "save_weights_only": True}], []),
        ([{"monitor": "val_loss", "save_weights_only": True}, {"monitor": "val_loss", "mode": "max"}], ["last.ckpt"]),
        ([{"monitor": "val_loss"}, {"monitor": "val_loss", "filename": "b", "mode": "max"}], ["last.ckpt"]),
    ],
)
def test_the_last_checkpoint_is_kept_once_where_nothing_else_keeps_the_newest(tmp_path, callbacks, names):
    with RunFolder.create(tmp_path) as folder:
        fit(folder, Worse(), callbacks=[ModelCheckpoint(**one) for one in callbacks], max_epochs=1)
    assert [one.name for one in (folder.path / "checkpoints").glob("last*")] == names


def test_the_page_of_a_resumed_run_tells_the_rate_of_what_was_done_since(tmp_path):
    rate = "samples per second of training"
    with RunFolder.create(tmp_path) as folder:
        fit(folder)
    page = (folder.path / "report.html").read_text()
    assert rate in page
    assert "total time" in page
    with RunFolder.open(folder.path) as folder:
        fit(folder, ckpt_path="last")  # which is the end: there is nothing to do
    page = (folder.path / "report.html").read_text()
    assert rate not in page
    assert "since the resume" in page


# -- what can't end a run --------------------------------------------------------------------------------------------


def test_a_record_that_can_not_be_written_ends_no_run(tmp_path):
    folder = RunFolder.create(tmp_path)
    (folder.path / "run.json").unlink()
    (folder.path / "run.json").mkdir()
    with pytest.warns(UserWarning, match=r"RunRecord failed and is disabled|the end of the run could not be recorded"):
        with folder:
            trainer = fit(folder)
    assert trainer.global_step == 16
    assert holder(folder.path) is None
    assert not [name for name in os.listdir(folder.path) if name.endswith(".tmp")]


def test_values_that_are_not_finite_are_kept_as_words(tmp_path):
    class Odd(Task):
        def training_step(self, batch, batch_idx):
            self.log("odd", float("nan") if self.trainer.global_step % 2 else 1.0)
            self.log("far", float("-inf"))
            return super().training_step(batch, batch_idx)

    with RunFolder.create(tmp_path) as folder:
        fit(folder, Odd(), max_epochs=1)

    def refuse(name):
        raise AssertionError(name)

    found = json.loads((folder.path / "run.json").read_text(), parse_constant=refuse)
    assert (found["metrics"]["odd"], found["metrics"]["far"]) == ("nan", "-inf")
    curves = json.loads((folder.path / "curves.json").read_text(), parse_constant=refuse)["charts"]
    assert curves["odd"]["odd"] == {"steps": [1, 3, 5, 7], "values": [1.0] * 4, "missing": 4}
    assert curves["far"]["far"] == {"steps": [], "values": [], "missing": 8}


# -- what a Trainer gets ---------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    with RunFolder.create(tmp_path) as folder:
        yield folder


def kinds(callbacks):
    return [type(one).__name__ for one in callbacks]


@pytest.mark.parametrize("logger", [None, True, "absent"])
def test_flags_by_default(logger, folder):
    given = {} if logger == "absent" else {"logger": logger}
    flags = folder.flags(given)
    assert flags["default_root_dir"] == str(folder.path)
    assert isinstance(flags["logger"], TensorBoardLogger)
    assert flags["logger"].log_dir == str(folder.path)
    assert kinds(flags["callbacks"]) == ["ModelCheckpoint", "RunReport", "RunRecord"]
    assert flags["callbacks"][0].dirpath == str(folder.path / "checkpoints")
    assert flags["callbacks"][1].dirpath == str(folder.path)
    assert given == ({} if logger == "absent" else {"logger": logger})  # what was given is left alone


def test_flags_leave_what_was_given(folder, tmp_path):
    elsewhere = str(tmp_path / "elsewhere")
    placed, free = ModelCheckpoint(elsewhere), ModelCheckpoint(monitor="x")
    report = RunReport(elsewhere)
    logger = CSVLogger(elsewhere)
    flags = folder.flags({"logger": logger, "callbacks": [placed, free, report], "max_epochs": 3})
    assert flags["logger"] is logger
    assert flags["callbacks"][:3] == [placed, free, report]
    assert kinds(flags["callbacks"][3:]) == ["RunRecord"]
    assert (placed.dirpath, free.dirpath, report.dirpath) == (elsewhere, str(folder.path / "checkpoints"), elsewhere)
    assert flags["max_epochs"] == 3


@pytest.mark.parametrize("kind", [ModelCheckpoint, RunReport])
def test_a_callback_of_another_run_is_refused(kind, folder, tmp_path):
    used = kind()
    folder.flags({"callbacks": used})
    folder.flags({"callbacks": used})  # of the same run it is not
    with RunFolder.create(tmp_path) as second:
        with pytest.raises(ValueError, match=rf"this {kind.__name__} writes to {folder.path}, .*Create a new callback"):
            second.flags({"callbacks": used})


def test_flags_that_turn_things_off(folder):
    off = {"logger": False, "enable_checkpointing": False, "enable_report": False}
    flags = folder.flags(off)
    assert flags["logger"] is False
    assert kinds(flags["callbacks"]) == ["RunRecord"]
    assert kinds(folder.flags({"callbacks": EarlyStopping("x")})["callbacks"])[0] == "EarlyStopping"
    last = folder.flags({"callbacks": OnExceptionCheckpoint(folder.path)})  # saves when all goes wrong
    assert kinds(last["callbacks"])[:2] == ["OnExceptionCheckpoint", "ModelCheckpoint"]
    assert folder.flags({"default_root_dir": folder.path})["default_root_dir"] == str(folder.path)
    with pytest.raises(ValueError, match=r"default_root_dir='/tmp/x' contradicts the folder of this run"):
        folder.flags({"default_root_dir": "/tmp/x"})


@pytest.mark.parametrize("given", [{"barebones": True}, {"fast_dev_run": 2}, {"logger": False}], ids=str)
def test_a_trainer_takes_them(given, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    quiet = {} if "barebones" in given else {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = treadle.Trainer(**folder.flags({"accelerator": "cpu", "max_epochs": 1, **quiet, **given}))
    trainer.fit(Task(), data())
    found = record(folder.path)
    assert (found["state"], found["steps"]) == ("finished", 2 if "fast_dev_run" in given else 8)
    assert (folder.path / "checkpoints").exists() == ("logger" in given)
    assert (folder.path / "report.html").exists() == ("logger" in given)
    assert os.listdir(tmp_path) == ["default"]  # nothing stands beside it


def test_a_logger_elsewhere_takes_nothing_else_with_it(folder, tmp_path):
    fit(folder, max_epochs=1, logger=CSVLogger(tmp_path / "elsewhere"))
    assert {"checkpoints", "report.html", "curves.json"} <= set(os.listdir(folder.path))
    assert sorted(os.listdir(tmp_path / "elsewhere" / "treadle_logs" / "version_0")) == ["hparams.yaml", "metrics.csv"]


def test_the_record_is_kept_up_to_date_within_an_epoch(folder):
    flags = folder.flags(settings(max_epochs=1))
    recorder = next(one for one in flags["callbacks"] if isinstance(one, RunRecord))
    seen = []

    def look(step):
        seen.append((record(folder.path)["state"], record(folder.path)["steps"]))
        if step in (2, 5):
            recorder._due = 0.0  # as if that were long ago

    treadle.Trainer(**flags).fit(Task(look), data())
    assert seen == [("running", steps) for steps in (0, 0, 0, 3, 3, 3, 6, 6)]
    assert record(folder.path)["steps"] == 8


# -- several processes -----------------------------------------------------------------------------------------------


def job(directory):
    chosen = settings(devices=2, strategy="ddp", max_epochs=1, callbacks=ModelCheckpoint(monitor="val_loss"))
    with RunFolder.create(directory, "two", chosen) as folder:
        folder.write_config("devices: 2\n")
        trainer = treadle.Trainer(**folder.flags(chosen))
        trainer.fit(Task(), data(), data())
        return str(folder.path), folder.lock is not None, trainer.checkpoint_callback.dirpath, trainer.log_dir


def test_two_processes_share_one_folder(tmp_path):
    path = tmp_path / "two" / "1"
    home = (str(path), str(path / "checkpoints"), str(path))
    results = run(job, 2, str(tmp_path))
    assert [(one[0], *one[2:]) for one in results] == [home, home]
    assert [locked for _, locked, *_ in results] == [True, False]
    assert os.listdir(tmp_path / "two") == ["1"]
    found = record(path)
    assert (found["state"], found["processes"], found["steps"]) == ("finished", 2, 4)
    assert found["best"]["metric"] == "val_loss"
    assert verify(path / found["best"]["checkpoint"]).step == 4
    assert sum(name.startswith("events.") for name in os.listdir(path)) == 1


def failing(directory, rank):
    chosen = settings(devices=2, strategy="ddp", max_epochs=1)
    with RunFolder.create(directory, settings=chosen) as folder:
        task = Task()
        trainer = treadle.Trainer(**folder.flags(chosen))
        task.at = raises(ValueError(f"rank {rank}'s own"), at=2 if trainer.global_rank == rank else -1)
        trainer.fit(task, data())


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_error_of_any_process_is_shown(rank, tmp_path):
    with pytest.raises(ValueError, match=f"rank {rank}'s own"):
        run(failing, 2, str(tmp_path), rank)
    found = index.read(tmp_path / "default" / "1")
    assert (found.state, found.facts["error"]) == ("failed: ValueError", f"ValueError: rank {rank}'s own")
    with RunFolder.open(found.path) as folder:
        assert not (folder.path / "error.json").exists()
    assert state(found.path) == "finished"


def refused(directory):
    try:
        RunFolder.create(directory, settings={"accelerator": "cpu"})
    except (OSError, RuntimeError) as error:
        return str(error)
    return ""


def test_all_processes_fail_where_rank_zero_can_not_make_it(tmp_path):
    (tmp_path / "file").write_text("")
    words = run(refused, 2, str(tmp_path / "file" / "runs"))
    assert "cannot create a run's folder" in words[0]
    assert re.match("rank 0 failed: .*cannot create a run's folder", words[1])


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
from test_folder import RunFolder, Task, data, settings
import treadle

chosen = settings(devices=2, max_epochs=1)
with RunFolder.create({directory!r}, settings=chosen) as folder:
    treadle.Trainer(**folder.flags(chosen)).fit(Task(), data())
    if {fails}:
        raise ValueError("afterwards")
"""


@pytest.mark.parametrize("fails", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["finished", "failed"])
def test_a_script_that_starts_its_processes_makes_one_folder(fails, tmp_path):
    tests = Path(__file__).parent
    source = SCRIPT.format(tests=str(tests), directory=str(tmp_path), fails=fails)
    done = script(source, env={"PYTHONPATH": str(tests.parents[1]), "CUDA_VISIBLE_DEVICES": ""})
    assert (done.returncode != 0) == fails, done.stderr
    assert os.listdir(tmp_path) == ["default"]
    assert os.listdir(tmp_path / "default") == ["1"]
    found = record(tmp_path / "default" / "1")
    assert (found["processes"], found["steps"]) == (2, 4)
    assert found["state"] == ("failed: ValueError" if fails else "finished")
    assert done.stderr.count(f"run default/1: {tmp_path}") == 1


# -- hostile ---------------------------------------------------------------------------------------------------------


def attacked(path):
    """Reads everything in a folder; returns what Python saw happen meanwhile. The hook stays: a process of its own."""
    seen, on = [], []

    def hook(event, args):
        if on and event in (
            "exec",
            "compile",
            "import",
            "pickle.find_class",
            "os.system",
            "subprocess.Popen",
            "os.exec",
        ):
            seen.append(f"{event} {str(args[0])[:80]}")

    from treadle.cli.commands.runs import main

    assert main(["show", path]) == 0  # what it needs is imported now
    sys.addaudithook(hook)
    on.append(True)
    status = [main(["show", path]), main([str(Path(path).parents[1])])]
    on.clear()
    return seen, status


def test_nothing_in_a_folder_is_run(tmp_path):
    marker = tmp_path / "marker"
    with RunFolder.create(tmp_path / "runs") as folder:
        folder.write_config(f"x: !!python/object/apply:os.system ['touch {marker}']\ny: ${{oc.env:HOME}}\n")
    call = f"cos\nsystem\n(S'touch {marker}'\ntR."
    (folder.path / "curves.json").write_bytes(call.encode())
    (folder.path / "environment.json").write_text(json.dumps({"host": f"$(touch {marker})"}))
    ((seen, status),) = run(attacked, 1, str(folder.path))
    assert seen == []
    assert status == [0, 0]
    assert not marker.exists()
