"""SIGUSR1 before the first step: the job is requeued once, whichever rank got it."""

import os
import signal
import subprocess
import sys
import time

import pytest
from support.processes import clean_environment, programs, python, run
from support.trainers import make_trainer
from treadle.compat.demos.boring_classes import BoringModel
from treadle.strategies import DDP, open_world

import treadle

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals as on Linux")

WAITS = """
import os, time, treadle
from pathlib import Path
from treadle.compat.demos.boring_classes import BoringModel

class Task(BoringModel):
    def setup(self, stage):
        path = Path(f"waits-{os.environ['RANK']}")
        path.with_suffix(".part").write_text(str(os.getpid()))
        path.with_suffix(".part").rename(path)
        time.sleep(60)

treadle.Trainer(accelerator="cpu", devices=2, strategy="ddp", max_steps=2, logger=False).fit(Task())
"""


def write_scontrol(folder):
    (folder / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {folder}/calls\n')
    (folder / "scontrol").chmod(0o755)


@pytest.mark.long
@pytest.mark.parametrize(
    "ranks", [*(pytest.param((rank,), marks=pytest.mark.exhaustive) for rank in (1, 0)), (1, 0)], ids=str
)
def test_the_job_is_requeued_once(tmp_path, ranks):
    (tmp_path / "train.py").write_text(WAITS)
    write_scontrol(tmp_path)
    env = clean_environment({"SLURM_JOB_ID": "7"})
    env["PATH"] = f"{tmp_path}{os.pathsep}{programs()}{os.pathsep}{env['PATH']}"
    command = [python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    process = subprocess.Popen(command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True)
    try:
        paths = [tmp_path / f"waits-{rank}" for rank in (0, 1)]
        end = time.monotonic() + 60
        while not all(path.exists() for path in paths) and time.monotonic() < end:
            time.sleep(0.05)
        for rank in ranks:
            os.kill(int(paths[rank].read_text()), signal.SIGUSR1)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 1
    assert (tmp_path / "calls").read_text() == "requeue 7\n"
    assert err.count("treadle: SIGUSR1 ends the run before its first step, so there is nothing to save") == 1
    assert err.count("treadle: job 7 was requeued") == 1


def claims():
    world = open_world("cpu")
    treadle.Accelerator(cpu=True).wait_for_everyone()
    return [world.claim(name) for name in ("one", "one", "other")]


def test_one_process_claims_a_name():
    first, second = run(claims, 2)
    assert [sorted(pair) for pair in zip(first, second, strict=True)] == [[False, True], [False, False], [False, True]]


@pytest.mark.parametrize("where", ["plugins", "strategy"])
@pytest.mark.parametrize(
    ("options", "sent", "calls", "status"),
    [
        ({}, "SIGUSR1", "requeue 7\n", 143),
        ({"auto_requeue": False}, "SIGUSR1", "", 143),
        (None, "SIGUSR1", "", 143),
        ({"requeue_signal": signal.SIGHUP}, "SIGHUP", "requeue 7\n", 129),
        ({"requeue_signal": signal.SIGHUP}, "SIGUSR1", "", 143),
        ({"requeue_signal": signal.SIGUSR2}, "SIGUSR2", "requeue 7\n", 143),
        ({"requeue_signal": signal.SIGUSR2}, "SIGTERM", "", 143),
    ],
)
def test_lightnings_plugin_sets_the_signal(tmp_path, monkeypatch, options, sent, calls, status, where):
    from treadle.compat.plugins.environments import LightningEnvironment, SLURMEnvironment

    class Signaled(BoringModel):
        def on_train_batch_end(self, *args):
            os.kill(os.getpid(), getattr(signal, sent))

    (tmp_path / "calls").write_text("")
    write_scontrol(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("SLURM_ARRAY_JOB_ID", raising=False)
    environment = LightningEnvironment() if options is None else SLURMEnvironment(**options)
    flags = {"plugins": [environment], "strategy": DDP(cluster_environment=environment)}
    with pytest.raises(treadle.engine.Preempted) as left:
        make_trainer(max_steps=5, **{where: flags[where]}).fit(Signaled())
    assert left.value.code == status
    assert (tmp_path / "calls").read_text() == calls


def test_another_signal_is_refused():
    from treadle.compat.plugins.environments import SLURMEnvironment

    with pytest.raises(ValueError, match=r"requeue_signal=.* must be signal.SIGUSR1, SIGUSR2, SIGHUP or SIGTERM"):
        SLURMEnvironment(requeue_signal=signal.SIGINT)
