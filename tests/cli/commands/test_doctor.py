"""`treadle doctor`: its screen, its exit status, its launchers, and how it ends where ranks do not come."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import clean_environment, programs, python
from treadle.cli.commands.doctor import format_report, main


def doctor(*options: str, launcher: tuple[str, ...] = (), status: int = 0, env: dict[str, str] | None = None) -> str:
    """What the command prints to its output."""
    command = [*(launcher or (python(),)), "-m", "treadle", "doctor", *options]
    done = subprocess.run(command, env=clean_environment(env), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def test_alone_it_starts_two_ranks(tmp_path: Path) -> None:
    lines = doctor("--dir", str(tmp_path)).splitlines()
    assert lines[0].startswith("good  ranks         2 of 2 on ")
    assert any(line.startswith("good  all-reduce    gloo, latency ") for line in lines)
    assert lines[-1].startswith("no faults, ")
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 40


def test_an_unwritable_run_folder_is_status_1() -> None:
    report = json.loads(doctor("--dir", "/proc/runs", "--json", status=1))
    assert report["result"] == "fault"
    assert [item["subject"] for item in report["findings"] if item["mark"] == "fault"] == ["run folder"]
    assert [facts["rank"] for facts in report["ranks"]] == [0, 1]
    assert not [name for facts in report["ranks"] for name in facts["environment"] if "HOME" in name]


@pytest.mark.parametrize("launcher", ["torchrun", "treadle"])
def test_under_a_launcher_rank_zero_prints_once(launcher: str) -> None:
    program = str(programs() / launcher)
    start = (program, *(["launch"] if launcher == "treadle" else []), "--nproc-per-node", "2")
    out = doctor(launcher=start)
    assert out.count(" ranks  ") == 1
    assert f"started by {launcher}" in " ".join(out.split())
    assert out.count(" all-reduce ") == 1


def test_a_rank_that_never_comes_is_named_within_the_limit() -> None:
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29583"}
    begin = time.monotonic()
    out = doctor("--timeout", "1", status=1, env=place)
    assert "FAULT ranks         rank 1 of 2 did not report" in out
    assert time.monotonic() - begin < 15


def test_a_launch_environment_that_is_incomplete() -> None:
    out = doctor(status=1, env={"WORLD_SIZE": "2"})
    assert "RANK is not set, but WORLD_SIZE=2 is" in " ".join(out.split())


@pytest.mark.exhaustive
def test_a_full_shared_memory() -> None:
    # A new interpreter: `python()` forks from a process outside of the namespace.
    mounted = ("unshare", "-rm", "sh", "-c", 'mount -t tmpfs -o size=1m none /dev/shm && exec "$@"', "sh")
    if os.system("unshare -rm mount -t tmpfs none /dev/shm 2> /dev/null") != 0:
        pytest.skip("this machine gives no mount namespace")
    out = doctor(launcher=(*mounted, sys.executable), status=1)
    assert "FAULT /dev/shm      1.0 MB of 1.0 MB free: data workers crash with a bus error" in out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--tiemout", "3"], "Did you mean '--timeout'"),
        (["--timeout", "0"], "--timeout 0 must be a positive number"),
        (["--nproc-per-node", "1"], "must be at least 2"),
        (["more"], "unrecognized arguments: more"),
    ],
)
def test_wrong_options(options: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(options) == 2
    assert says in capsys.readouterr().err


def test_long_lines_are_wrapped() -> None:
    findings = [{"mark": "fault", "subject": "ranks", "text": "a word " * 30}]
    lines = format_report({"findings": findings}).splitlines()
    assert lines[0].startswith("FAULT ranks         a word")
    assert lines[1].startswith(" " * 20 + "a word") or lines[1].startswith(" " * 20 + "word")
    assert lines[-1] == "1 fault, no notes"
