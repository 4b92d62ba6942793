"""The local launcher, with real processes: what the ranks see, how a run ends, and that nothing outlives it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.processes import clean_environment, python, script
from treadle.strategies.launch import supervisor

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals and /proc as on Linux")

# Ranks of most tests need no torch, so only the supervisor pays for its import.
HEAD = """
import os, signal, sys, time
rank = int(os.environ.get("RANK", -1))
def say(text):
    os.write(1, f"{text}\\n".encode())  # whole lines, also from two processes at once
if rank < 0:
    from treadle.strategies.launch import supervisor
    print("supervisor", os.getpid(), flush=True)
    supervisor.relaunch(2, **{options})
"""
SAY_PID = 'say(f"rank {rank} {os.getpid()}")\n'


class Start:
    """Starts scripts which relaunch themselves in two ranks that run `body`; their streams go to files beside them."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[bytes]] = []

    def __call__(
        self,
        folder: Path,
        body: str,
        *args: str,
        options: str = "{}",
        flags: tuple[str, ...] = (),
        omit: str = "",
        program: str = sys.executable,
    ) -> subprocess.Popen[bytes]:
        folder.mkdir(exist_ok=True)
        (folder / "tmp").mkdir()
        path = folder / "train.py"
        path.write_text(HEAD.replace("{options}", options) + textwrap.dedent(body))
        env = clean_environment({"TMPDIR": str(folder / "tmp")})
        env.pop(omit, None)
        with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
            self.started.append(subprocess.Popen([program, *flags, path, *args], env=env, stdout=out, stderr=err))
        return self.started[-1]


@pytest.fixture
def start() -> Iterator[Start]:
    start = Start()
    yield start
    for process in start.started:
        while process.poll() is None:  # only after a failed test; a second signal kills the ranks at once
            process.terminate()
            time.sleep(0.2)


def pids(folder: Path) -> list[int]:
    """The ids of both ranks, once both have told them."""
    wait_for(lambda: len(re.findall(r"^rank \d", (folder / "out").read_text(), re.MULTILINE)) == 2, 60)
    time.sleep(0.5)  # a signal that comes while torch's agent still starts its threads is given torch's own 30 s (2.13)
    return [int(pid) for pid in re.findall(r"^rank \d (\d+)", (folder / "out").read_text(), re.MULTILINE)]


def gone(pid: int) -> bool:
    """Whether a process has ended; it may still wait to be collected by whoever adopted it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.02)


@pytest.mark.slow
def test_two_launches_at_once_each_see_their_own_ranks(start: Start, tmp_path: Path) -> None:
    body = """
    import torch, torch.distributed as dist
    assert os.getppid() == int(os.environ["TREADLE_SUPERVISOR"])
    dist.init_process_group("gloo")
    total = torch.tensor([float(sys.argv[1]) + rank])
    dist.all_reduce(total)
    names = ["LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "OMP_NUM_THREADS"]
    seen = [os.environ[name] for name in names]
    line = [rank, total.item(), seen, sys.argv[2:], sys.flags.optimize, sys.stdout.write_through, sys.warnoptions]
    say(line)
    say(f"port {os.environ['MASTER_PORT']} run {os.environ['TORCHELASTIC_RUN_ID']}")
    dist.destroy_process_group()
    """
    # An argument that looks like one of the agent's templates must arrive as it was typed.
    extra = ["--lr", "a $$ ${local_rank}"]
    flags = ("-u", "-O", "-W", "ignore::UserWarning")
    runs = [start(tmp_path / i, body, f"{i}0", *extra, flags=flags, omit="OMP_NUM_THREADS") for i in ("1", "2")]
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    meetings = []
    for i, process in zip((1, 2), runs, strict=True):
        folder = tmp_path / str(i)
        assert process.wait(60) == 0, (folder / "err").read_text()
        lines = (folder / "out").read_text().splitlines()
        for rank in (0, 1):
            seen = [str(rank), "2", "2", "0", threads]
            assert str([rank, 20.0 * i + 1, seen, extra, 1, True, ["ignore::UserWarning"]]) in lines
        meetings.append({line for line in lines if line.startswith("port")})
        assert (folder / "err").read_text() == ""
        assert list((folder / "tmp").iterdir()) == []
    assert [len(meeting) for meeting in meetings] == [1, 1]
    assert meetings[0] != meetings[1]


FAILURES = {
    # torch's exit with a group left over aborts now and then ("terminate called ..."), so this rank skips it.
    "raises": ("try: raise ValueError('no such thing')\nexcept ValueError: traceback.print_exc(); os._exit(1)", 1),
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", 137),
    "leaves": ("os._exit(3)", 3),
}
IN_COLLECTIVE = """
import traceback
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
if rank == 0:
    dist.barrier()
"""
STUCK_WITH_A_WORKER = """
import subprocess
if rank == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    worker = subprocess.Popen(["sleep", "60"])
    say(f"worker {worker.pid}")
    time.sleep(60)
while "worker" not in open(sys.argv[1]).read():
    time.sleep(0.01)
"""
FAIL = 'say(f"failed at {time.time()}")\n'


@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=() if how == "killed" else pytest.mark.exhaustive) for how in FAILURES]
)
def test_first_failure_ends_the_others_and_gives_the_status(start: Start, tmp_path: Path, how: str) -> None:
    action, status = FAILURES[how]
    peer = IN_COLLECTIVE if how == "raises" else STUCK_WITH_A_WORKER
    process = start(tmp_path, SAY_PID + peer + FAIL + action, str(tmp_path / "out"), program=python())
    code = process.wait(60)
    ended = time.time()
    out, err = (tmp_path / "out").read_text(), (tmp_path / "err").read_text()
    assert code == status, err
    failed = re.search(r"failed at ([\d.]+)", out)
    assert failed is not None
    assert ended - float(failed[1]) < 5
    report = [line for line in err.splitlines() if line.startswith("treadle:")]
    words = "killed by SIGKILL" if how == "killed" else f"exit status {status}"
    assert report[0].startswith(f"treadle: rank 1 of 2 failed first: {words}")
    assert len(report) == 2
    assert report[1].startswith("treadle: rank 0:")
    assert how == "raises" or report[1] == "treadle: rank 0: killed by SIGKILL, sent by this launcher"
    # The traceback comes once, from the rank itself; the agent's own pages are silenced.
    assert err.count("no such thing") == (2 if how == "raises" else 0)
    assert "closing signal" not in err
    assert "Root Cause" not in err
    assert all(gone(int(pid)) for pid in re.findall(r"^(?:rank \d|worker) (\d+)$", out, re.MULTILINE))
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    ("number", "times", "options"),
    [
        (signal.SIGTERM, 2, "{'grace': 1.0}"),
        pytest.param(signal.SIGUSR1, 1, "{'grace': 1.0}", marks=pytest.mark.exhaustive),
        (signal.SIGINT, 2, "{}"),
    ],
)
def test_signal_goes_to_every_rank_and_sigkill_after_the_grace_or_a_second_ctrl_c(
    start: Start, tmp_path: Path, number: signal.Signals, times: int, options: str
) -> None:
    body = f"""
    def leave(number, frame):
        say(f"rank {{rank}} saved on {{number}}")
        os._exit(0)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, leave if rank == 0 else signal.SIG_IGN)
    {SAY_PID.strip()}
    time.sleep(60)
    """
    process = start(tmp_path, body, options=options)
    ranks = pids(tmp_path)
    began = time.monotonic()
    for _ in range(times):
        process.send_signal(number)
        wait_for(lambda: f"rank 0 saved on {int(number)}\n" in (tmp_path / "out").read_text(), 5)
    assert process.wait(10) == 128 + (signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
    assert time.monotonic() - began < 15  # the ranks sleep for 60
    assert number == signal.SIGINT or time.monotonic() - began > 1
    err = (tmp_path / "err").read_text()
    assert f"treadle: {number.name} was forwarded to 2 ranks\n" in err
    assert "treadle: rank 1: killed by SIGKILL, sent by this launcher\n" in err
    assert "Traceback" not in err
    assert all(gone(pid) for pid in ranks)


def test_no_rank_survives_a_killed_supervisor(start: Start, tmp_path: Path) -> None:
    body = f"""
    from treadle.strategies.processes import die_with_parent
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent(int(os.environ["TREADLE_SUPERVISOR"]))
    {SAY_PID.strip()}
    time.sleep(60)
    """
    process = start(tmp_path, body)
    ranks = pids(tmp_path)
    assert not any(gone(pid) for pid in ranks)
    process.kill()
    process.wait(10)
    wait_for(lambda: all(gone(pid) for pid in ranks), 5)
    assert list((tmp_path / "tmp").iterdir()) == []


def test_rank_that_comes_after_its_supervisor_died_dies_at_once() -> None:
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


def test_module_is_run_again_as_a_module(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    show = 'say(f"{rank} {__spec__.name} {sys.argv[1:]}")'
    (package / "module.py").write_text(HEAD.replace("{options}", "{}") + show)
    command = [python(), "-m", "package.module", "--devices", "2"]
    done = subprocess.run(
        command, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()[1:]) == [f"{rank} package.module ['--devices', '2']" for rank in (0, 1)]


def test_command_survives_changed_directory_and_used_up_arguments(tmp_path: Path) -> None:
    source = """
    import os, sys
    from treadle.strategies.launch import supervisor as launch
    assert "torch.distributed.elastic.agent.server" not in sys.modules  # a second, for which only a supervisor waits
    os.chdir("/")
    sys.argv = sys.argv[:1]
    assert launch.has_script()
    print(launch.build_relaunch_command(2)[1:])
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(source))
    command = [sys.executable, "-X", "dev", "-uO", "train.py", "--epochs", "3"]
    done = subprocess.run(
        command, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    parts = eval(done.stdout)
    assert parts[-3:] == [str(tmp_path / "train.py"), "--epochs", "3"]
    assert {"-O", "-X", "-u", "dev"} <= set(parts[:-3])


@pytest.mark.parametrize("how", ["-c", "-"])
def test_refused_where_there_is_no_script(how: str) -> None:
    source = (
        "from treadle.strategies.launch.supervisor import has_script, relaunch; assert not has_script(); relaunch(2)"
    )
    command = [sys.executable, how, *([source] if how == "-c" else [])]
    env = clean_environment()
    done = subprocess.run(command, input=source, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ValueError: devices=2 runs this script again in 2 processes, but the code came from")
    assert "`torchrun --nproc-per-node 2 train.py`" in last


def test_refused_in_a_test_runner() -> None:
    assert not supervisor.has_script()
    with pytest.raises(ValueError, match="devices=2 runs this script again"):
        supervisor.relaunch(2)


@pytest.mark.parametrize("nproc", [0, -1, True, "2"])
def test_number_of_processes_is_checked(nproc: int) -> None:
    with pytest.raises(ValueError, match="nproc="):
        supervisor.supervise(nproc, ["true"])


def test_supervise_leaves_the_caller_as_it_was(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import os; print(os.environ['TORCHELASTIC_RUN_ID'], os.environ['TORCHELASTIC_SIGNALS_TO_HANDLE'])"
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    # As `nohup` does; a shell without job control has its background jobs ignore SIGQUIT.
    old = {signal.SIGHUP: signal.signal(signal.SIGHUP, signal.SIG_IGN)}
    old[signal.SIGQUIT] = signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    try:
        handlers, variables = [signal.getsignal(number) for number in numbers], dict(os.environ)
        assert supervisor.supervise(1, [sys.executable, "-c", code], run_id="mine") == 0
        assert handlers == [signal.getsignal(number) for number in numbers]
        assert variables == dict(os.environ)
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    assert capfd.readouterr().out == "mine SIGTERM,SIGINT,SIGQUIT,SIGUSR1\n"
