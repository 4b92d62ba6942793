"""One job per folder of a run: locks of the system, locks without it, and what is not trusted in them."""

import errno
import json
import os
import signal
import time

import pytest
from support.run_folders import at_once, record, state
from treadle.trainer.runs import lock
from treadle.trainer.runs.file_names import LOCK
from treadle.trainer.runs.folder import RunFolder
from treadle.trainer.runs.lock import Holder, RunLock, holder


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


def test_a_folder_that_can_not_be_locked(tmp_path):
    folder = RunFolder.create(tmp_path)
    folder.release()
    (folder.path / LOCK).unlink()
    (folder.path / LOCK).mkdir()
    with pytest.raises(OSError, match=f"cannot lock {folder.path}/lock: Is a directory"):
        RunFolder.open(folder.path)


def write_holder(folder, by="beat", since=0.0, **changed):
    """Write what a process on another machine has written, which may be dead or not."""
    other = Holder("far", 1, since, "far 0", "", "1" * 32, by)
    (folder / LOCK).write_text(json.dumps({**vars(other), **changed}))


HOSTILE = {"token": "../../x", "pid": -1, "host": "\x1b[2J", "since": float("nan"), "began": 3, "place": None}


@pytest.mark.parametrize(("name", "value"), HOSTILE.items(), ids=HOSTILE)
def test_what_stands_in_a_lock_is_not_trusted(name, value, tmp_path):
    RunFolder.create(tmp_path).release()
    path = tmp_path / "default" / "1"
    write_holder(path, **{name: value})
    assert holder(path) is None
    RunFolder.open(path).release()


def refuse(*_):
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


@pytest.fixture(params=[("fcntl", None), ("fcntl.flock", refuse)], ids=["no-module", "no-support"])
def without_locks(request, monkeypatch):
    name, value = request.param
    monkeypatch.setattr(f"treadle.trainer.runs.lock.{name}", value)
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
    write_holder(tmp_path, since=time.time())
    with pytest.raises(ValueError, match=r"process 1 on far.*cannot be checked from this machine, delete .*lock"):
        RunLock(tmp_path)
    silent = time.time() - lock.SILENCE - 1
    os.utime(tmp_path / LOCK, (silent, silent))
    assert holder(tmp_path) is None
    RunLock(tmp_path).release()


def test_who_can_not_see_a_system_lock_leaves_it_alone(without_locks, tmp_path):
    write_holder(tmp_path, "system")
    os.utime(tmp_path / LOCK, (0, 0))
    with pytest.raises(ValueError, match="process 1 on far"):
        RunLock(tmp_path)


def test_who_has_system_locks_respects_one_that_has_not(tmp_path):
    write_holder(tmp_path)
    with pytest.raises(ValueError, match="process 1 on far"):
        RunLock(tmp_path)
    os.utime(tmp_path / LOCK, (0, 0))
    RunLock(tmp_path).release()


@pytest.mark.long
def test_of_many_jobs_one_takes_over_a_dead_lock(tmp_path, monkeypatch):
    def judged(holder, file):
        time.sleep(0.1)  # all see that it is dead before the first one acts
        return holder.host != "far"

    monkeypatch.setattr(lock, "fcntl", None)
    monkeypatch.setattr(Holder, "is_alive", judged)
    write_holder(tmp_path)

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
