"""`treadle doctor`: its screen, its exit status, its launchers, and the ranks that it names."""

import contextlib
import importlib.metadata
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support.processes import RankError, clean_environment, programs, python, run
from treadle.tools import doctor as command
from treadle.tools.doctor import FAULT, GOOD, NOTE, Finding, format_report, main, merge_findings


def doctor(*options, launcher=(), status=0, env=None):
    """What the command prints to its output."""
    command = [*(launcher or (python(),)), "-m", "treadle", "doctor", *options]
    done = subprocess.run(command, env=clean_environment(env), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
def test_alone_it_starts_two_ranks(tmp_path):
    lines = doctor("--dir", str(tmp_path)).splitlines()
    assert lines[0].startswith("good  ranks         2 of 2 on ")
    versions = f"Python {sys.version.split()[0]}, torch {importlib.metadata.version('torch')}, "
    assert lines[1].startswith(f"good  versions      {versions}")
    assert " 2 ranks on " in "".join(lines)
    assert any(line.startswith("good  all-reduce    gloo, latency ") for line in lines)
    assert lines[-1].startswith("no faults, ")
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 40


@pytest.mark.long
def test_an_unwritable_run_folder_is_status_1():
    report = json.loads(doctor("--dir", "/proc/runs", "--json", status=1))
    assert report["result"] == "fault"
    assert [item["subject"] for item in report["findings"] if item["mark"] == "fault"] == ["run folder"]
    assert [facts["rank"] for facts in report["ranks"]] == [0, 1]
    assert "PyTorch version: " in report["machine"]


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["torchrun", "treadle"])
def test_under_a_launcher_rank_zero_prints_once(launcher):
    program = str(programs() / launcher)
    start = (program, *(["launch"] if launcher == "treadle" else []), "--nproc-per-node", "2")
    out = doctor(launcher=start)
    assert out.count(" ranks  ") == 1
    assert f"started by {launcher}" in " ".join(out.split())
    assert out.count(" all-reduce ") == 1


def test_a_rank_that_never_comes_is_named_within_the_limit():
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29583"}
    begin = time.monotonic()
    out = doctor("--timeout", "1", status=1, env=place)
    assert "FAULT connection    rank 0 of 2: rank 1 of 2 has not connected to rank 0 within" in out
    assert time.monotonic() - begin < 15


@pytest.mark.long
def test_a_rank_that_cannot_reach_rank_zero_or_does_not_know_its_number_says_so():
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29584"}
    out = " ".join(doctor("--timeout", "1", status=1, env=place).split())
    assert "rank 1 can't reach rank 0 at 127.0.0.1:29584 within 1 s. Check whether rank 0 has started" in out
    out = " ".join(doctor("--timeout", "1", status=1, env={**place, "MASTER_ADDR": "nowhere.invalid"}).split())
    assert "rank 1 of 2: the address of rank 0, 'nowhere.invalid', can't be resolved on " in out
    out = " ".join(doctor(status=1, env={"WORLD_SIZE": "2"}).split())
    assert "RANK is not set, but WORLD_SIZE=2 is" in out


@pytest.mark.exhaustive
def test_a_full_shared_memory():
    # A new interpreter: `python()` forks from a process outside of the namespace.
    mounted = ("unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=1m none /dev/shm && exec "$@"', "sh")
    if os.system("unshare -rm mount -t tmpfs none /dev/shm 2> /dev/null") != 0:
        pytest.skip("this machine gives no mount namespace")
    out = doctor(launcher=(*mounted, sys.executable), status=1)
    assert re.search(r"FAULT /dev/shm 1\.0\d MB of 1\.05 MB free: data workers crash with a bus", " ".join(out.split()))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--tiemout", "3"], "Did you mean '--timeout'"),
        (["--timeout", "0"], "--timeout 0 must be a positive number"),
        (["--nproc-per-node", "1"], "must be at least 2"),
        (["more"], "unrecognized arguments: more"),
    ],
)
def test_wrong_options(options, says, capsys):
    assert main(options) == 2
    assert says in capsys.readouterr().err


def test_long_lines_are_wrapped():
    lines = format_report([Finding(FAULT, "ranks", "a word " * 30)]).splitlines()
    assert lines[0].startswith("FAULT ranks         a word")
    assert lines[1].startswith(" " * 20 + "a word") or lines[1].startswith(" " * 20 + "word")
    assert lines[-1] == "1 fault, no notes"


def test_the_ranks_that_a_problem_concerns_are_named():
    fine, small, full = Finding(GOOD, "disk", "fine"), Finding(NOTE, "disk", "small"), Finding(FAULT, "disk", "full")
    assert list(merge_findings([[fine], [fine]])) == [fine]
    assert list(merge_findings([[full], [full]])) == [full]
    assert list(merge_findings([[fine], [small], [full], [full]])) == [Finding(FAULT, "disk", "ranks 2-3: full")]


@pytest.mark.parametrize(
    ("subject", "free", "mark", "says"),
    [
        ("/dev/shm", 64e6, FAULT, "64 MB of 8 GB free: data workers crash with a bus error. Use docker run --shm-size"),
        ("/dev/shm", 500e6, NOTE, "500 MB of 8 GB free"),
        ("run folder", 5e6, FAULT, "5 MB of 8 GB free: too little for checkpoints"),
        ("run folder", 2e9, NOTE, "2 GB of 8 GB free"),
        ("run folder", 7e9, GOOD, "7 GB of 8 GB free"),
    ],
)
def test_free_space(subject, free, mark, says, tmp_path, monkeypatch):
    usage = type(shutil.disk_usage(tmp_path))(int(8e9), int(8e9 - free), int(free))
    monkeypatch.setattr(command.shutil, "disk_usage", lambda path: usage)
    finding = command._check_folder(subject, str(tmp_path))
    assert (finding.mark, says in finding.text) == (mark, True), finding.text


# -- ranks, each of which runs the command ---------------------------------------------------------------------------


def run_in_rank(prepare, limit="20"):
    """The status and the output of the command on this rank, after `prepare` was called on rank 1."""
    if os.environ["RANK"] == "1":
        globals()[prepare]()
    with contextlib.redirect_stdout(io.StringIO()) as out:
        status = main(["--cpu", "--timeout", limit])
    return status, " ".join(out.getvalue().split())


def install_old_numpy():
    """Put another version of numpy's metadata before the installed one."""
    os.makedirs("other/numpy-1.0.1.dist-info")
    Path("other/numpy-1.0.1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 1.0.1\n")
    sys.path.insert(0, os.path.abspath("other"))


def test_a_rank_with_another_version(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (status, out), (other_status, other) = run(run_in_rank, 2, "install_old_numpy")
    assert (status, other_status, other) == (1, 0, "")
    installed = importlib.metadata.version("numpy")
    assert f"FAULT versions numpy {installed} on rank 0, 1.0.1 on rank 1. Install the same versions" in out


def have_old_torch():
    torch.__version__ = "1.0.1"


def test_a_rank_with_another_torch():
    (status, out), (other_status, other) = run(run_in_rank, 2, "have_old_torch", "2")
    assert (status, other_status) == (1, 1)
    assert "FAULT connection rank 0 of 2: " in out
    assert "FAULT connection rank 1 of 2: rank 1 runs torch 1.0.1, treadle " in other


def spoil_sums():
    from treadle.strategies import World

    reduce = World.all_reduce

    def reduce_and_spoil(world, tensor, *options):
        reduce(world, tensor, *options)
        tensor[3:4] += 1
        return tensor

    World.all_reduce = reduce_and_spoil


def test_a_sum_that_is_wrong():
    (status, out), _ = run(run_in_rank, 2, "spoil_sums")
    assert status == 1
    assert "FAULT all-reduce an all-reduce of 8,388,608 values has wrong sums on rank 1." in out


def stop():
    command.check_machine = lambda folder: os.kill(os.getpid(), signal.SIGSTOP)


def exit_with_report(limit):
    status, out = run_in_rank("stop", limit)
    os._exit(9 if status == 1 and "FAULT connection rank 0 of 2: " in out else 1)


def test_a_rank_that_stops_ends_the_others():
    begin = time.monotonic()
    with pytest.raises(RankError, match="exited with status 9"):
        run(exit_with_report, 2, "1")
    assert time.monotonic() - begin < 20
