"""Ranks that die with their supervisor, and who removes what a killed rank left: the last of its job, or the next."""

import os
import signal
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
from support.processes import script
from treadle.strategies.processes import os_process
from treadle.strategies.processes.os_process import read_start_time

pytestmark = [pytest.mark.guarantee, pytest.mark.skipif(sys.platform != "linux", reason="/proc as on Linux")]


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os_process, "_unfinished", {})
    root = os_process._find_root()
    root.mkdir(mode=0o700)
    return root


def leave_behind(root, job, unfinished, pid=2**22 + 1):
    """What a rank of ``job`` leaves that was killed while it wrote ``unfinished``; Linux gives nobody the default."""
    began = read_start_time(pid) or "5"
    folder = root / f"{job}-{pid}-{began}"
    folder.mkdir()
    (folder / "listener-abc").touch()
    unfinished.mkdir(exist_ok=True)
    (unfinished / "half").touch()
    status = unfinished.stat()
    (folder / f"{status.st_dev}-{status.st_ino}").symlink_to(unfinished)
    return folder


def test_the_end_of_a_job_removes_what_its_ranks_were_writing(root, tmp_path):
    folder = leave_behind(root, 7, tmp_path / ".last.part")
    os_process.sweep(7)
    assert not (tmp_path / ".last.part").exists()
    assert not folder.exists()
    assert not root.exists()


def test_another_job_leaves_the_directory_which_may_be_written_again(root, tmp_path):
    leave_behind(root, 7, tmp_path / ".last.part")
    os_process.sweep()
    assert (tmp_path / ".last.part" / "half").exists()
    assert not root.exists()


def test_a_directory_that_stands_there_since_is_left_alone(root, tmp_path):
    part = tmp_path / ".last.part"
    leave_behind(root, 7, part)
    part.rename(tmp_path / "last")
    part.mkdir()
    os_process.sweep(7)
    assert part.exists()
    assert (tmp_path / "last" / "half").exists()


def test_a_rank_that_lives_keeps_what_it_has(root, tmp_path):
    folder = leave_behind(root, 7, tmp_path / ".last.part", pid=os.getppid())
    os_process.sweep(7)
    os_process.sweep()
    assert folder.exists()
    assert (tmp_path / ".last.part" / "half").exists()


@pytest.mark.parametrize("alone", [True, False])
def test_the_last_rank_to_leave_removes_what_the_others_left(alone, root, tmp_path, monkeypatch):
    monkeypatch.setattr(os_process, "_opened", [])
    monkeypatch.setattr(os_process.multiprocessing.process.current_process(), "_config", {})
    leave_behind(root, 7, tmp_path / ".last.part")
    if not alone:
        leave_behind(root, 7, tmp_path / ".other.part", pid=os.getppid())
    job = 7
    os_process._opened.append(os_process._Entry(root / f"7-{os.getpid()}-1", job, os.getpid(), "1", has_left=False))
    os_process._opened[0].path.mkdir()
    own = tmp_path / ".own.part"
    own.mkdir()
    os_process.note_unfinished(own)
    os_process.remove_files()
    assert (tmp_path / ".last.part").exists() == (not alone)
    assert own.exists() == (not alone)  # the other may be writing into it
    assert root.exists() == (not alone)


def test_a_root_of_someone_else_is_not_used(root):
    root.chmod(0o777)
    assert os_process._find_root() is None


def test_a_root_that_cannot_be_read_is_not_used(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "file"))
    assert os_process._find_root() is None


WORKERS = """
import os, torch
from multiprocessing.util import get_temp_dir
from treadle.strategies.processes import open_scratch

if __name__ == "__main__":
    open_scratch(os.getppid())
    print(sum(int(batch) for batch in torch.utils.data.DataLoader([1] * 4, num_workers=2)))
    print("treadle-" in get_temp_dir())
"""


@pytest.mark.parametrize(("letters", "ours"), [(20, True), (70, False)])
def test_data_workers_have_sockets_in_a_long_temp_folder_too(letters, ours):
    with tempfile.TemporaryDirectory() as short:
        folder = Path(short, "t" * (letters - len(short) - 1))
        folder.mkdir()
        done = script(WORKERS, env={"TMPDIR": str(folder)})
        assert done.stdout.split() == ["4", str(ours)], done.stderr
        assert list(folder.iterdir()) == []


def test_rank_that_comes_after_its_supervisor_died_dies_at_once():
    source = """
    import os, subprocess, sys, time
    from treadle.strategies.processes import die_with_parent
    die_with_parent(os.getppid())
    die_with_parent(1)  # alive, and not the parent: a program started by a rank is left alone
    print("alive", flush=True)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    die_with_parent(dead.pid)
    time.sleep(60)
    """
    done = script(textwrap.dedent(source), timeout=30)
    assert (done.stdout, done.returncode) == ("alive\n", -signal.SIGKILL)
