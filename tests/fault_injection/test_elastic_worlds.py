"""Machines that leave and join while a run goes on: a smaller or larger world, and each sample of an epoch once."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from support.launches import wait_for
from support.machines import Machines, namespaces
from support.processes import clean_environment, python
from support.restarts import JOB, SETTINGS, final_samples, read_events

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals, /proc and namespaces as on Linux")

QUICKLY = "keep_alive_interval=1,keep_alive_max_attempt=5,last_call_timeout=5"


def settle(machines, **settings):
    """Write the job's settings, and return them."""
    job = {**SETTINGS, "epochs": 2, "samples": 96, "pause": 0.1, **settings}
    (machines.folder / "job.json").write_text(json.dumps(job))
    return job


def is_step(event):
    return event["moment"] == "step"


def worlds(machines):
    """The world size of each attempt that came to train."""
    return [e["world"] for e in read_events(machines.folder) if e["moment"] == "resume" and e["rank"] == 0]


def check(machines, job, sizes):
    """Each sample was taken once per epoch, in worlds of these sizes, and not everything was done a second time."""
    events = list(read_events(machines.folder))
    assert worlds(machines) == sizes, machines.outputs()
    every = list(range(job["samples"]))
    assert final_samples(events) == dict.fromkeys(range(job["epochs"]), every), machines.outputs()
    starts = [event["step"] for event in events if event["moment"] == "resume" and event["rank"] == 0]
    assert all(starts[1:]), "the run began anew"


@pytest.mark.guarantee
@pytest.mark.slow
@pytest.mark.parametrize("how", ["terminate", "kill"])
def test_a_machine_leaves(how, tmp_path):
    """One that is told to leave says so, after the ranks of all machines have saved: no restart is needed for that."""
    command = ["treadle", "launch", "--nnodes", "1:2", "--rdzv-conf", QUICKLY]
    command += ["--max-restarts", str(int(how == "kill"))]
    with Machines(tmp_path, command) as machines:
        job = settle(machines, epochs=1, samples=48, pause=0.05)
        first, second = machines.start(), machines.start()
        machines.await_events(is_step, 10)
        getattr(machines, how)(second)
        assert machines.wait(second) in ((143,) if how == "terminate" else (137, -signal.SIGKILL))
        assert machines.wait(first) == 0, machines.outputs()
        check(machines, job, [2, 1])


@pytest.mark.guarantee
@pytest.mark.slow
def test_a_rank_fails_when_those_of_the_other_machine_have_ended(tmp_path):
    """The machine that waits for the other one's end starts again with it."""
    command = ["treadle", "launch", "--nnodes", "2", "--max-restarts", "1"]
    with Machines(tmp_path, command) as machines:
        job = settle(machines, epochs=1, samples=32, wait_at_the_end=["1"])
        first, second = machines.start(), machines.start()
        machines.await_events(lambda event: event["moment"] == "waits", 1)
        machines.await_events(lambda event: event["moment"] == "done", 1)
        [late] = [event["pid"] for event in read_events(tmp_path) if event["moment"] == "waits"]
        time.sleep(0.5)
        os.kill(late, signal.SIGKILL)
        assert [machines.wait(first, 60), machines.wait(second, 60)] == [0, 0], machines.outputs()
        assert final_samples(read_events(tmp_path)) == {0: list(range(job["samples"]))}


@pytest.mark.slow
def test_a_signal_ends_a_machine_that_waits_for_the_others(tmp_path):
    command = ["treadle", "launch", "--nnodes", "2", "--max-restarts", "1"]
    with Machines(tmp_path, command) as machines:
        settle(machines)
        first, second = machines.start(), machines.start()
        machines.await_events(is_step, 4)
        machines.kill(second)
        wait_for(lambda: "restart 1 of 1" in machines.outputs(), 60, machines.outputs)
        time.sleep(3)
        machines.terminate(first)
        assert machines.wait(first, 30) == 143, machines.outputs()


@pytest.mark.guarantee
@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "how"), [("treadle", "kill"), ("treadle", "cut"), ("torchrun", "kill")])
def test_a_machine_of_another_network_vanishes(launcher, how, tmp_path):
    """torchrun's agent does not notice that a machine is cut off: it waits until the ranks fail, for half an hour."""
    command = ["treadle", "launch"] if launcher == "treadle" else ["torchrun"]
    conf = f"{QUICKLY},is_host=1" if launcher == "torchrun" else QUICKLY
    options = ["--nnodes", "1:2", "--max-restarts", "2", "--rdzv-conf", conf]
    with namespaces() as hosts, Machines(tmp_path, [*command, *options], hosts) as machines:
        job = settle(machines)
        first, second = machines.start(), machines.start()
        machines.await_events(is_step, 10)
        getattr(machines, how)(second)
        assert machines.wait(first) == 0, machines.outputs()
        check(machines, job, [2, 1])


@pytest.mark.guarantee
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["loopback", "namespaces"])
def test_a_machine_joins(kind, tmp_path):
    """The ranks save first, so that nothing is done twice; that is no failure, so no restarts are needed."""
    command = ["treadle", "launch", "--nnodes", "1:2", "--rdzv-conf", QUICKLY]
    places = namespaces() if kind == "namespaces" else contextlib.nullcontext(())
    with places as hosts, Machines(tmp_path, command, hosts) as machines:
        job = settle(machines)
        first = machines.start()
        machines.await_events(is_step, 5)
        second = machines.start()
        assert [machines.wait(first), machines.wait(second)] == [0, 0], machines.outputs()
        check(machines, job, [1, 2])
        taken = [sample for e in read_events(tmp_path) if is_step(e) for sample in e["samples"]]
        assert len(taken) == job["epochs"] * job["samples"]


@pytest.mark.guarantee
@pytest.mark.slow
def test_a_third_machine_joins_two_and_one_of_them_is_told_to_leave(tmp_path):
    command = ["treadle", "launch", "--nnodes", "1:3", "--rdzv-conf", QUICKLY]
    with Machines(tmp_path, command) as machines:
        job = settle(machines, samples=240)
        first, second = machines.start(), machines.start()
        machines.await_events(is_step, 10)
        third = machines.start()
        machines.await_events(lambda event: is_step(event) and event["rank"] == 2, 3)
        machines.terminate(second)
        assert machines.wait(second) == 143
        assert [machines.wait(first), machines.wait(third)] == [0, 0], machines.outputs()
        check(machines, job, [2, 3, 2])


@pytest.mark.slow
def test_step_micro_batches_keep_the_bits_of_a_run_that_loses_a_machine_and_gains_two(tmp_path):
    """A thousand steps on 2, 1 and 3 processes, and a run of one process that nothing disturbs."""
    settings = {"epochs": 100, "samples": 160, "step_micro_batches": 8, "every_n_train_steps": 7, "pause": 0.01}
    done = {}
    for name in ("disturbed", "alone"):
        (tmp_path / name).mkdir()
    command = ["treadle", "launch", "--nnodes", "1:3", "--max-restarts", "1", "--rdzv-conf", QUICKLY]
    with Machines(tmp_path / "disturbed", command) as machines:
        job = settle(machines, **settings)
        first, second = machines.start(), machines.start()
        machines.await_events(lambda event: is_step(event) and event["step"] >= 300, 1, 300)
        machines.kill(second)
        machines.await_events(lambda event: is_step(event) and event["step"] >= 600, 1, 300)
        others = [machines.start(), machines.start()]
        assert [machines.wait(number, 300) for number in (first, *others)] == [0, 0, 0], machines.outputs()
        sizes = worlds(machines)
        assert (sizes[:2], sizes[-1]) == ([2, 1], 3), machines.outputs()  # the two may join one after the other
        for rank in range(3):
            done[rank] = json.loads((machines.folder / f"done-{rank}").read_text())
    (tmp_path / "alone" / "job.json").write_text(json.dumps({**job, "pause": 0}))
    subprocess.run([python(), JOB], cwd=tmp_path / "alone", env=clean_environment(), check=True, timeout=300)
    alone = json.loads((tmp_path / "alone" / "done-0").read_text())
    assert alone["step"] == 1000
    assert done == dict.fromkeys(range(3), alone)
