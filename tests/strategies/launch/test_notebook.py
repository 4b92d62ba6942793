"""notebook_launcher and debug_launcher, from where there is no file: standard input, and IPython where it is there."""

import importlib.util
import os
import re
import subprocess
import sys
import textwrap

import pytest
import torch
from support.launches import gone, wait_for
from support.processes import clean_environment, python, run
from treadle.strategies.launch.notebook import debug_launcher, notebook_launcher

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks")

HEAD = """
import os, sys, time
import torch
from treadle.strategies import open_world
from treadle.strategies.launch.notebook import debug_launcher, notebook_launcher
def say(text):
    os.write(1, f"{text}\\n".encode())
"""


def cell(source, command=None, timeout=60):
    """Runs code of which no file is kept, as in a notebook."""
    return subprocess.run(
        command or [python(), "-"],
        input=HEAD + textwrap.dedent(source),
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
    )


TRAIN = """
def train(lr, session=[]):
    world = open_world("cpu")
    torch.manual_seed(0)
    x, y = torch.randn(8, 300), torch.randn(8, 1)
    model = torch.nn.Linear(300, 1)
    if world.size > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    own = slice(world.rank * 8 // world.size, (world.rank + 1) * 8 // world.size)
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for _ in range(3):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x[own]), y[own]).backward()
        optimizer.step()
    weights = sum(p.abs().sum().item() for p in model.parameters())
    say(f"trained {world.rank} of {world.size} {os.getpid()} {weights:.4f}")
"""


@pytest.mark.long
def test_a_function_of_the_session_trains_the_same_in_one_process_and_in_two():
    # Parallel loops and a backward of the session's own, whose threads the forks will not have.
    session = """
    torch.set_num_threads(2)
    torch.ones(500, 500, requires_grad=True).exp().sum().backward()
    say(f"session {os.getpid()}")
    notebook_launcher(train, (0.01,), num_processes=1)
    torch.distributed.is_initialized() and sys.exit("a group for one process")
    notebook_launcher(train, (0.01,), num_processes=2)
    debug_launcher(train, args=(0.01,))
    assert "RANK" not in os.environ
    """
    done = cell(TRAIN + textwrap.dedent(session))
    assert done.returncode == 0, done.stderr
    pid = re.search(r"session (\d+)", done.stdout)[1]
    lines = re.findall(r"trained (\d) of (\d) (\d+) ([\d.]+)", done.stdout)
    assert sorted(line[:2] for line in lines) == [("0", "1"), ("0", "2"), ("0", "2"), ("1", "2"), ("1", "2")]
    assert [line[2] == pid for line in lines] == [line[1] == "1" for line in lines]
    assert len({line[3] for line in lines}) == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("action", "says"),
    [
        pytest.param("raise ValueError('no such thing')", "rank 1 of 2 failed:\nTrace", marks=pytest.mark.exhaustive),
        pytest.param("os.kill(os.getpid(), 9)", "rank 1 of 2 was killed by SIGKILL.", marks=pytest.mark.slow),
        pytest.param("sys.exit(3)", "SystemExit: 3", marks=pytest.mark.slow),
        ("os._exit(4)", "rank 1 of 2 ended with exit status 4."),
    ],
    ids=["raises", "killed", "exits", "leaves"],
)
def test_a_failing_rank_raises_here_and_ends_the_others(action, says):
    source = f"""
    import signal, subprocess
    def bad():
        world = open_world("cpu")
        if world.rank == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            say(f"worker {{subprocess.Popen(['sleep', '60']).pid}}")
        world.barrier()
        if world.rank == 1:
            {action}
        time.sleep(60)
    began = time.monotonic()
    try:
        notebook_launcher(bad, num_processes=2)
    except RuntimeError as error:
        say(f"after {{time.monotonic() - began}}")
        say(error)
    """
    done = cell(source)
    assert done.returncode == 0, done.stderr
    assert says in done.stdout
    assert ("ValueError: no such thing" in done.stdout) == ("raise" in action)
    assert "launchers.py" not in done.stdout
    assert float(re.search(r"after ([\d.]+)", done.stdout)[1]) < 10
    worker = re.search(r"worker (\d+)", done.stdout)[1]
    wait_for(lambda: gone(int(worker)), 2)


def test_ports():
    source = """
    import socket
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for options in ({}, {"use_port": port}, {"use_port": str(port), "num_nodes": 1, "monitor_interval": 0.5}):
        notebook_launcher(lambda: say(f"{os.environ['MASTER_PORT']} {port}"), num_processes=2, **options)
    """
    done = cell(source)
    assert done.returncode == 0, done.stderr
    ports = [line.split() for line in done.stdout.splitlines()]
    assert len(ports) == 6
    assert all(used != "29500" for used, _ in ports)
    assert all(used == free for used, free in ports[2:])


@pytest.mark.long
def test_an_interrupt_ends_the_ranks():
    source = """
    import signal, threading
    def wait():
        say(f"rank {os.getpid()}")
        time.sleep(60)
    threading.Timer(2, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        notebook_launcher(wait, num_processes=2)
    except KeyboardInterrupt:
        say("interrupted")
    """
    done = cell(source, timeout=30)
    assert "interrupted" in done.stdout, done.stderr
    assert all(gone(int(pid)) for pid in re.findall(r"rank (\d+)", done.stdout))


@pytest.mark.skipif(importlib.util.find_spec("IPython") is None, reason="needs IPython")
def test_in_ipython():
    command = [sys.executable, "-m", "IPython", "--simple-prompt", "--no-banner", "--colors=NoColor"]
    done = cell("%cpaste -q\n" + TRAIN + "--\nnotebook_launcher(train, (0.01,), num_processes=2)\n", command)
    assert len(re.findall(r"trained \d of 2", done.stdout)) == 2, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mixed_precision": "bf16"}, r"Accelerator\(mixed_precision='bf16'\)"),
        ({"mixed_precision": "bf17"}, "Did you mean 'bf16'"),
        ({"num_processes": 0}, "num_processes=0 must be"),
        ({"use_port": "http"}, "use_port='http' must be"),
        ({"num_nodes": 2}, "num_nodes=2 is not supported in a notebook.*treadle launch"),
        ({"max_restarts": 1}, "max_restarts=1 is not supported in a notebook"),
    ],
)
def test_what_is_refused(options, says):
    with pytest.raises(ValueError, match=says):
        notebook_launcher(print, **options)


def test_what_was_made_before_is_refused():
    from treadle.strategies import World

    world = World()
    with pytest.raises(ValueError, match="'world', which the function uses, was created in this session"):
        debug_launcher(lambda: print(world))
    with pytest.raises(TypeError, match="must be callable, not an int"):
        debug_launcher(3)


def refused():
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        notebook_launcher(print, num_processes=2)
    return str(caught.value)


def refused_with_a_group():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        del os.environ[name]
    return refused()


def test_a_session_that_has_opened_the_gpus_driver(monkeypatch):
    monkeypatch.setattr(os, "readlink", lambda path: "/dev/nvidia-uvm")
    with pytest.raises(ValueError, match=r"first set os.environ\['PYTORCH_NVML_BASED_CUDA_CHECK'\] = '1'"):
        notebook_launcher(print, num_processes=2)


def test_no_launch_within_a_launch():
    assert run(refused, 1)[0].startswith("this process is already rank 0 of 1")
    assert run(refused_with_a_group, 1)[0].startswith("this session already has a process group")
