"""Several machines, played by several agents on this one: the same host, and hosts apart in network namespaces."""

import ast
import contextlib
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import processes
from support.launches import wait_for
from support.machines import namespaces
from support.processes import clean_environment, python
from treadle.compat.environment import get_free_port

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals, /proc and interfaces as on Linux")

TRAIN = """
import os, sys, time
import torch
from torch.nn.functional import mse_loss
from treadle.strategies import open_world

world = open_world("cpu")
torch.manual_seed(0)
x, y = torch.randn(8, 3), torch.randn(8, 1)
model = torch.nn.Linear(3, 1)
if world.size > 1:
    model = torch.nn.parallel.DistributedDataParallel(model)
own = slice(world.rank * 8 // world.size, (world.rank + 1) * 8 // world.size)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(4):
    if step == 2 and sys.argv[1:] == [str(world.rank)]:
        print("failed at", time.time(), flush=True)
        os._exit(7)
    optimizer.zero_grad()
    mse_loss(model(x[own]), y[own]).backward()
    optimizer.step()
if sys.argv[1:]:
    time.sleep(60)  # what hangs in a collective: gloo would notice by itself
weights = [round(value, 5) for p in model.parameters() for value in p.flatten().tolist()]
place = world.rank, world.size, world.node_rank, world.local_rank, world.local_size
os.write(1, f"{(*place, weights)}\\n".encode())
"""
TREADLE, TORCHRUN = ["-m", "treadle", "launch"], ["-m", "torch.distributed.run", "--rdzv-backend", "c10d"]


def of_two_machines(program, *script):
    """The command of each of two machines that meet at a free port."""
    endpoint = ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{get_free_port()}"]
    return [program, *TREADLE, *endpoint, *script]


@contextlib.contextmanager
def agents(commands, folder):
    started = []
    try:
        for number, command in enumerate(commands):
            with (folder / f"out{number}").open("w") as out:
                started.append(
                    subprocess.Popen(command, env=clean_environment(), stdout=out, stderr=subprocess.STDOUT, text=True)
                )
        yield started
    finally:
        for process in started:
            process.kill()  # its ranks die with it
            process.wait()


def run(commands, folder, timeout=120):
    with agents(commands, folder) as started:
        codes = [process.wait(timeout) for process in started]
    return codes, [(folder / f"out{number}").read_text() for number in range(len(commands))]


def places(*texts):
    return sorted(ast.literal_eval(line) for text in texts for line in re.findall(r"^\(.*\)$", text, re.MULTILINE))


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(TRAIN)
    return str(path)


@pytest.fixture(scope="module")
def alone(script):
    """The weights that one process comes to, without any launcher."""
    done = processes.script(Path(script))
    return places(done.stdout)[0][-1]


@pytest.mark.parametrize(
    ("launcher", "count"),
    [
        pytest.param(TREADLE, 1, id="2x1", marks=pytest.mark.slow),
        pytest.param(TREADLE, 2, id="2x2", marks=pytest.mark.slow),
        pytest.param(TORCHRUN, 1, id="torchrun"),
    ],
)
def test_two_agents_train_what_one_process_does(script, alone, tmp_path, launcher, count):
    command = [python(), *launcher, "--nnodes", "2", "--nproc-per-node", str(count), "--rdzv-id", "one"]
    command += ["--rdzv-endpoint", f"127.0.0.1:{get_free_port()}", script]
    codes, texts = run([command, command], tmp_path)
    assert codes == [0, 0], texts
    seen = places(*texts)
    for number, place in enumerate(seen):
        assert place[:-1] == (number, 2 * count, number // count, number % count, count)
        assert place[-1] == pytest.approx(alone, abs=1e-5)


@pytest.mark.slow
def test_machines_with_numbers(script, alone, tmp_path):
    port = str(get_free_port())
    # Accelerate's spelling; the number of processes is that of both machines.
    options = ["--num_machines", "2", "--num_processes", "3", "--main_process_ip", "127.0.0.1"]
    wrong = [python(), *TREADLE, *options, "--main_process_port", port, "--machine_rank", "0", script]
    codes, texts = run([wrong], tmp_path)
    assert codes == [2]
    assert "--num_processes 3 must be a multiple of the number of machines, 2" in texts[0]
    options[3] = "2"
    command = [python(), *TREADLE, *options, "--main_process_port", port, "--machine_rank"]
    codes, texts = run([[*command, "1", script], [*command, "0", script]], tmp_path)
    assert codes == [0, 0], texts
    assert [place[0] for text in texts for place in places(text)] == [1, 0]


@pytest.mark.long
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_failing_rank_ends_both_machines(script, tmp_path, rank):
    command = of_two_machines(python(), script, str(rank))
    codes, texts = run([command, command], tmp_path)
    ended = time.time()
    assert codes == [7, 7], texts
    failed = re.search(r"failed at ([\d.]+)", "".join(texts))
    assert ended - float(failed[1]) < 10
    reports = sorted(re.search(r"treadle: (rank .*)", text)[1] for text in texts)
    words = f"rank {rank} of 2 failed first: exit status 7"
    assert reports == [words, f"{words} on {socket.gethostname()}"]


@pytest.mark.long
def test_a_signal_to_one_machine_ends_both(script, tmp_path):
    command = of_two_machines(sys.executable, script, "none")  # whose ranks are its own children
    with agents([command, command], tmp_path) as started:
        # Ranks are up when a supervisor has children.
        wait_for(lambda: all(Path(f"/proc/{p.pid}/task/{p.pid}/children").read_text() for p in started), 60)
        time.sleep(1)
        started[1].terminate()
        assert [process.wait(20) for process in started] == [143, 143]
    assert f"SIGTERM was sent to {socket.gethostname()}" in (tmp_path / "out0").read_text()


@pytest.mark.slow
def test_nobody_at_the_endpoint_is_said_in_time(script, tmp_path):
    base = [python(), *TREADLE, "--nnodes", "2", script]
    # 192.0.2.1 is for documentation: a route leads there, nobody answers.
    far = [*base[:-1], "--rdzv-endpoint", "192.0.2.1:29400", "--rdzv-conf", "read_timeout=2", script]
    foreign = [*base[:-1], "--rdzv-endpoint", "127.0.0.1:29400", "--local-addr", "192.0.2.1", script]
    codes, texts = run([far, foreign, base], tmp_path, 60)
    assert codes == [2, 2, 2]
    assert re.search(r"the endpoint 192.0.2.1:29400, .* did not respond|no route to 192.0.2.1", texts[0])
    assert "--local-addr 192.0.2.1 is not an address of this machine" in texts[1]
    assert "needs an endpoint" in texts[2]


@pytest.fixture
def hosts():
    with namespaces() as names:
        yield names


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [TREADLE, TORCHRUN], ids=["treadle", "torchrun"])
def test_two_hosts_whose_names_are_loopback_addresses(launcher, script, alone, hosts, tmp_path):
    command = [python(), *launcher, "--nnodes", "2", "--rdzv-endpoint", "10.213.7.1:29400"]
    commands = []
    for number, host in reversed(list(enumerate(hosts, 1))):
        # torchrun would guess both from the host's name.
        own = ["--local-addr", f"10.213.7.{number}", "--rdzv-conf", f"is_host={number == 1}"]
        commands.append(["ip", "netns", "exec", host, *command, *own * (launcher is TORCHRUN), script])
    codes, texts = run(commands, tmp_path)
    assert codes == [0, 0], texts
    seen = places(*texts)
    assert [place[:3] for place in seen] == [(0, 2, 0), (1, 2, 1)]
    assert seen[1][-1] == pytest.approx(alone, abs=1e-5)
