"""The local launcher, with real processes: what the ranks see, how a run ends, and that nothing outlives it."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest
from support.launches import HEAD, SAY_PID, gone, pids, wait_for
from support.processes import clean_environment, python
from treadle.strategies.launch import Job, supervisor

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals and /proc as on Linux")


def run(command, folder, words=""):
    return subprocess.run(
        command, input=words, cwd=folder, env=clean_environment(), capture_output=True, text=True, timeout=60
    )


@pytest.mark.slow
def test_two_launches_at_once_each_see_their_own_ranks(start, tmp_path):
    body = """
    import torch, torch.distributed as dist
    assert os.getppid() == int(os.environ["TREADLE_SUPERVISOR"])
    dist.init_process_group("gloo")
    total = torch.tensor([float(sys.argv[1]) + rank])
    dist.all_reduce(total)
    names = ["WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "OMP_NUM_THREADS", "MASTER_PORT", "TORCHELASTIC_RUN_ID"]
    say(" ".join([str(total.item()), *(os.environ[name] for name in names)]))
    dist.destroy_process_group()
    """
    runs = [start(tmp_path / i, body, f"{i}0", omit="OMP_NUM_THREADS") for i in ("1", "2")]
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    meetings = set()
    for i, process in zip((1, 2), runs, strict=True):
        folder = tmp_path / str(i)
        assert process.wait(60) == 0, (folder / "err").read_text()
        first, second = (folder / "out").read_text().splitlines()[1:]
        assert first == second
        assert first.split()[:5] == [str(20.0 * i + 1), "2", "2", "0", threads]
        meetings.add(tuple(first.split()[5:]))
        assert (folder / "err").read_text() == ""
        assert list((folder / "tmp").iterdir()) == []
    assert len(meetings) == 2


@pytest.mark.long
def test_no_rank_survives_a_killed_supervisor(start, tmp_path):
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


@pytest.mark.long
def test_module_is_run_again_as_a_module(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    show = 'say(f"{rank} {__spec__.name} {sys.argv[1:]}")'
    (package / "module.py").write_text(HEAD.replace("{options}", "{}") + show)
    done = run([python(), "-m", "package.module", "--devices", "2"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()[1:]) == [f"{rank} package.module ['--devices', '2']" for rank in (0, 1)]


@pytest.mark.long
def test_a_later_trainer_with_one_device_runs_alone_in_each_process(tmp_path):
    source = """
    import os
    import treadle
    from treadle.compat.demos.boring_classes import BoringModel
    flags = {"accelerator": "cpu", "max_steps": 1, "limit_test_batches": 2, "enable_progress_bar": False}
    task = BoringModel()
    treadle.Trainer(devices=2, strategy="ddp", **flags).fit(task)
    trainer = treadle.Trainer(devices=1, num_nodes=1, **flags)
    assert trainer.test(task)
    trainer.fit(task)
    print(os.environ["RANK"], trainer.world_size, os.path.basename(trainer.log_dir))
    """
    (tmp_path / "train.py").write_text(textwrap.dedent(source))
    done = run([sys.executable, "train.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "devices=1: each of the 2 processes of this script runs alone" in done.stderr
    found = sorted(line.split() for line in done.stdout.splitlines() if line.startswith(("0 1", "1 1")))
    assert [words[:2] for words in found] == [["0", "1"], ["1", "1"]]
    assert len({version for *_, version in found}) == 2  # each has a folder of its own


def test_command_survives_changed_directory_and_used_up_arguments(tmp_path):
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
    done = run([sys.executable, "-X", "dev", "-uO", "train.py", "--lr", "a $$ ${local_rank}"], tmp_path)
    assert done.returncode == 0, done.stderr
    parts = eval(done.stdout)
    assert parts[-3:] == [str(tmp_path / "train.py"), "--lr", "a $$ ${local_rank}"]
    assert {"-O", "-X", "-u", "dev"} <= set(parts[:-3])


@pytest.mark.parametrize("how", ["-c", "-"])
def test_refused_where_there_is_no_script(how):
    source = "from treadle.strategies.launch import supervisor as s; assert not s.has_script(); s.relaunch(2)"
    done = run([sys.executable, how, *([source] if how == "-c" else [])], None, source)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ValueError: devices=2 runs this script again in 2 processes, but the code came from")
    assert "`torchrun --nproc-per-node 2 train.py`" in last


def test_refused_in_a_test_runner():
    assert not supervisor.has_script()
    with pytest.raises(ValueError, match="devices=2 runs this script again"):
        supervisor.relaunch(2)


@pytest.mark.parametrize("nproc", [0, -1, True, "2"])
def test_number_of_processes_is_checked(nproc):
    with pytest.raises(ValueError, match="nproc="):
        supervisor.supervise(Job(nproc=nproc, command=["true"]))


@pytest.mark.long
def test_supervise_leaves_the_caller_as_it_was(capfd):
    code = "import os; print(os.environ['TORCHELASTIC_RUN_ID'], os.environ['TORCHELASTIC_SIGNALS_TO_HANDLE'])"
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    # As `nohup` does; a shell without job control has its background jobs ignore SIGQUIT.
    old = {signal.SIGHUP: signal.signal(signal.SIGHUP, signal.SIG_IGN)}
    old[signal.SIGQUIT] = signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    try:
        handlers, variables = [signal.getsignal(number) for number in numbers], dict(os.environ)
        assert supervisor.supervise(Job(nproc=1, command=[sys.executable, "-c", code], run_id="mine")) == 0
        assert handlers == [signal.getsignal(number) for number in numbers]
        assert variables == dict(os.environ)
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    assert capfd.readouterr().out == "mine SIGTERM,SIGINT,SIGQUIT,SIGUSR1,SIGUSR2\n"
