"""The folder of a sweep: which run folder a trial gets, who may decide, and what a killed process leaves."""

import subprocess
import sys
import time

import pytest
from support.processes import clean_environment
from support.studies import TEXT, make
from treadle.cli.config import ConfigError
from treadle.tools.sweep.sweep_folder import SweepFolder
from treadle.trainer.runs import RunFolder, index


@pytest.fixture
def folder(runs_folder):
    folder = SweepFolder(make())
    with folder.working():
        yield folder


def test_a_trial_has_the_folder_of_its_number_unless_that_is_taken(folder):
    assert folder.choose_number(0, {None}) == 1
    folder.prepare(1, 0, "seed: 1\n", {"model.lr": 1})
    assert folder.choose_number(0, {None}) == 1  # its own
    assert folder.choose_number(1, {1, None}) == 2
    RunFolder.create("runs", "s").release()  # a run that is no trial takes the next number
    assert folder.choose_number(1, {1}) == 3
    assert folder.choose_number(1, {1, 3}) == 4
    (folder.path / "5").mkdir()
    (folder.path / "5" / "config.yaml").write_text("")  # half made when its process was killed
    assert folder.choose_number(4, {1, 3}) == 5


def test_a_prepared_run_waits_and_is_begun_like_a_new_one(folder):
    folder.prepare(1, 0, "seed: 1\n", {"model.lr": 1})
    run = index.read(folder.path / "1")
    assert (run.state, run.parameters, run.facts["trial"]) == ("waiting", {"model.lr": 1}, 0)
    assert index.config(run) == "seed: 1\n"
    with RunFolder.open(run.path) as begun:
        begun.write_config("seed: 2\n")
    run = index.read(run.path)
    assert (run.state, run.parameters, run.facts["trial"]) == ("finished", {"model.lr": 1}, 0)
    assert "resumed" not in run.facts
    assert not list(run.path.glob("config.*.yaml"))
    folder.prepare(1, 0, "seed: 3\n", {"model.lr": 2})  # it is there
    assert index.config(index.read(run.path)) == "seed: 2\n"


def test_a_waiting_run_that_fails_before_training_says_so(folder):
    folder.prepare(1, 0, "seed: 1\n", {})
    with pytest.raises(RuntimeError), RunFolder.open(folder.path / "1"):
        raise RuntimeError("no")
    assert index.read(folder.path / "1").state == "failed: RuntimeError"


HOLD = """
import sys, time
from treadle.trainer.runs import RunLock
from pathlib import Path
lock = RunLock(Path("runs/s/.sweep"))
print("held", flush=True)
time.sleep(60)
"""


def test_one_process_decides_and_its_death_lets_others(folder):
    holder = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, env=clean_environment())
    assert holder.stdout.readline() == b"held\n"
    began = time.monotonic()
    subprocess.Popen(["sh", "-c", f"sleep 1; kill -9 {holder.pid}"])
    with folder.deciding():
        assert time.monotonic() - began > 0.9
    holder.wait()
    assert folder.find_host(folder.token) is not None
    assert folder.find_host("nobody") is None
    assert folder.find_host("") is None


def test_another_sweep_in_its_place_is_refused(folder):
    assert folder.is_new() is True
    assert folder.is_new() is True
    folder.write_description()
    assert folder.is_new() is False
    with pytest.raises(ConfigError, match=r"parameters.model.width.max: 64 is now 32\nTo start over"):
        SweepFolder(make(TEXT.replace("max: 64", "max: 32"))).is_new()
    (folder.path / "sweep.json").write_text("{")
    with pytest.raises(ConfigError, match=r"sweep.json can't be read"):
        folder.is_new()
