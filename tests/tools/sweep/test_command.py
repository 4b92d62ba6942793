"""`treadle sweep`, from its command line to the runs of its trials: killed, interrupted, failing, pruned."""

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path

import optuna
import pytest
from support.command_runs import RUN
from support.launches import wait_for
from support.processes import clean_environment, programs, python
from treadle.cli.commands.runs import main as runs_main
from treadle.tools.sweep.command import main
from treadle.tools.sweep.study import Study
from treadle.tools.sweep.sweep_file import read_sweep
from treadle.trainer.runs import index

from treadle.__main__ import main as treadle_main

CONFIG = RUN.replace("cli_samples.Line", "tasks.Line").replace("max_epochs: 2", "max_epochs: 4")
SWEEP = """
config: run.yaml
method: random
metric: {name: val_loss, goal: minimize}
trials: 3
processes: 2
parameters:
  model.lr: {min: 1e-4, max: 1e-1, log: true}
  data.batch_size: [8, 16]
"""
TASKS = """
import os, time
import cli_samples

class Line(cli_samples.Line):
    def on_train_batch_start(self, batch, batch_idx):
        time.sleep(float(os.environ.get("PAUSE", "0")))
        with open(os.path.join(self.trainer.default_root_dir, "steps"), "a") as file:
            file.write(f"{self.trainer.global_step}\\n")

class Broken(Line):
    def __init__(self, lr: float = 1e-2) -> None:
        super().__init__()
        if lr > 0.01:
            raise RuntimeError("too fast")

class Diverging(Line):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", float("nan"))

class Rated(Line):
    # What is measured is said: the learning rate, on and on.
    def __init__(self, lr: float = 1e-2) -> None:
        super().__init__()
        self.rate = lr

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.rate)
"""


SAMPLES = Path(__file__).parents[2] / "support" / "samples"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "executable", python())  # what trials are run with
    for name, value in clean_environment({"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(SAMPLES)}).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "run.yaml").write_text(CONFIG)
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    (tmp_path / "tasks.py").write_text(TASKS)
    return tmp_path


def write_grid(rates, sizes, prune, processes=1):
    text = (
        SWEEP.replace("random", "grid").replace("trials: 3", prune).replace("processes: 2", f"processes: {processes}")
    )
    Path("sweep.yaml").write_text(text.replace("{min: 1e-4, max: 1e-1, log: true}", rates).replace("[8, 16]", sizes))


@contextmanager
def started(*arguments, pause=0.0):
    """The command as a process; it and all trials are killed at the block's end."""
    command = [programs() / "treadle", "sweep", "--config", "sweep.yaml", *arguments]
    env = clean_environment({"PAUSE": str(pause), "PYTHONPATH": str(SAMPLES)})
    with open("said", "a") as said:
        process = subprocess.Popen(command, env=env, stdout=said, stderr=said, start_new_session=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pid in pids_of_trials():
            kill(pid)


@pytest.fixture
def sweep(capsys):
    """Runs the command in this process; returns its status and what it said."""

    def sweep(*arguments):
        capsys.readouterr()
        status = main(["--config", "sweep.yaml", *arguments])
        said = capsys.readouterr()
        return status, said.out + said.err

    return sweep


def kill(pid):
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def records():
    return {int(path.parent.name): json.loads(path.read_text()) for path in Path("runs/sweep").glob("[0-9]*/run.json")}


def running():
    """The trials that processes work at, which hold the locks of their folders."""
    return [number for number in records() if index.read(f"runs/sweep/{number}").state == "running"]


def pids_of_trials():
    return [records()[number]["pid"] for number in running()]


def wait_until(condition):
    wait_for(condition, 240, Path("said").read_text)


def trials():
    return optuna.load_study(study_name="sweep", storage="sqlite:///runs/sweep/study.db").trials


def finished():
    return [number for number, record in records().items() if record["state"] == "finished"]


def running_with_checkpoint():
    return [n for n in running() if list(Path("runs/sweep", str(n)).glob("checkpoints/*.ckpt"))]


def steps_of(number):
    return [int(line) for line in Path("runs", "sweep", str(number), "steps").read_text().split()]


@pytest.mark.exhaustive
def test_killed_and_resumed_none_is_lost_and_none_runs_twice(sweep):
    count, number, cut_short = 20, "trials=20", set()
    with started(number, pause=0.1) as process:  # one trial's process, then the command and all trials
        wait_until(lambda: running_with_checkpoint())
        cut_short.add(running_with_checkpoint()[0])
        kill(records()[min(cut_short)]["pid"])
        wait_until(lambda: len(finished()) >= count // 3 and running_with_checkpoint())
        cut_short.add(running_with_checkpoint()[0])
        os.killpg(process.pid, signal.SIGKILL)
    assert len(finished()) < count
    with started(number, pause=0.1) as process:  # the command is told to end
        ended = len(finished())
        wait_until(lambda: len(finished()) > ended)
        process.send_signal(signal.SIGTERM)
        assert process.wait(240) == 143
    assert not pids_of_trials()
    status, said = sweep(number)
    assert status == 0, said

    assert {trial.state for trial in trials()} == {optuna.trial.TrialState.COMPLETE}
    assert [trial.number for trial in trials()] == list(range(count))
    assert sorted(trial.user_attrs["run"] for trial in trials()) == sorted(records()) == list(range(1, count + 1))
    assert {record["state"] for record in records().values()} == {"finished"}
    for trial in trials():
        run = trial.user_attrs["run"]
        assert records()[run]["parameters"] == trial.params
        steps, last = steps_of(run), records()[run]["steps"] - 1
        assert set(steps) == set(range(last + 1))
        if run in cut_short:  # it went on from its checkpoint: its first epoch was not done again
            assert steps.count(0) == 1
        assert not list(Path("runs", "sweep", str(run)).glob("config.[0-9]*.yaml"))
    # An interruption changes no value: that of a trial depends on the seed and on its number.
    Path("runs/other").mkdir()
    other = Study(read_sweep("sweep.yaml", ["name=other"]))
    assert [other.draw(other.ask()) for _ in range(count)] == [trial.params for trial in trials()]
    assert sweep(number)[0] == 0
    assert len(trials()) == count


@pytest.mark.exhaustive
def test_a_sweep_is_shared_by_two_commands_and_a_grid_is_run_once():
    write_grid("[1, 2]", "[8, 16]", "", 2)
    Path("run.yaml").write_text(CONFIG.replace("max_epochs: 4", "max_epochs: 1"))
    with started() as first, started() as second:
        assert (first.wait(240), second.wait(240)) == (0, 0), Path("said").read_text()
    combinations = Counter(tuple(trial.params.values()) for trial in trials())
    assert combinations == Counter((lr, size) for lr in (1, 2) for size in (8, 16))
    assert sorted(records()) == [1, 2, 3, 4]
    assert len({trial.user_attrs["owner"] for trial in trials()}) == 2


@pytest.mark.long
def test_failing_trials_are_noted_and_the_others_go_on(sweep, capsys):
    Path("run.yaml").write_text(CONFIG.replace("trainer:", "trainer:\n  enable_checkpointing: false"))
    Path("runs/sweep").mkdir(parents=True)
    status, said = sweep("model.class=tasks.Broken", "trials=5", "trainer.max_epochs=1")
    assert status == 0, said
    broken = [trial for trial in trials() if trial.params["model.lr"] > 0.01]
    assert 0 < len(broken) < 5
    assert [trial for trial in trials() if trial.state is optuna.trial.TrialState.FAIL] == broken
    for trial in broken:
        assert trial.user_attrs["error"] == "RuntimeError: too fast"
        assert index.read(f"runs/sweep/{trial.user_attrs['run']}").state == "failed: RuntimeError"
    assert "failed, after" in said
    assert "RuntimeError: too fast" in Path("runs/sweep/report.html").read_text()
    assert runs_main([]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"sweep/1 +failed: RuntimeError .* lr=0\.01237 batch_size=16", printed)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("metric.name=val_los", "'val_los' was never logged. Logged so far: loss, val_loss. Did you mean 'val_loss'?"),
        pytest.param("model.class=tasks.Diverging", "val_loss is nan", marks=pytest.mark.exhaustive),
    ],
)
def test_a_sweep_whose_trials_all_fail_stops(override, words, sweep):
    status, said = sweep(override, "trials=9", "max_failures=2", "trainer.max_epochs=1")
    assert status == 1
    assert words in said
    assert "no trial has succeeded" in said
    assert 2 <= len(trials()) <= 3


def by_hand(values, epochs):
    """What Optuna's Hyperband makes of trials that report the same value after each epoch."""
    study = optuna.create_study(study_name="sweep", pruner=optuna.pruners.HyperbandPruner(max_resource=epochs))
    for value in values:
        trial = study.ask()
        for epoch in range(1, epochs + 1):
            trial.report(value, epoch)
            if epoch < epochs and trial.should_prune():
                yield "PRUNED"
                break
        else:
            yield "COMPLETE"


@pytest.mark.exhaustive
def test_hyperband_prunes_and_a_pruned_trial_keeps_its_checkpoint(sweep, capsys):
    write_grid("[0.1, 0.2, 0.3, 0.4, 0.5]", "[8]", "prune: hyperband")
    status, said = sweep("model.class=tasks.Rated", "trainer.max_epochs=3")
    assert status == 0, said
    states = [trial.state.name for trial in trials()]
    assert states == list(by_hand([0.1, 0.2, 0.3, 0.4, 0.5], 3))
    assert "PRUNED" in states
    for trial in trials():
        folder = Path("runs/sweep", str(trial.user_attrs["run"]))
        assert list((folder / "checkpoints").glob("*.ckpt"))
        if trial.state is optuna.trial.TrialState.PRUNED:
            assert index.read(folder).state == "pruned"
            assert index.read(folder).facts["epochs"] < 3
            assert len(trial.intermediate_values) == index.read(folder).facts["epochs"]
    assert runs_main(["--state", "pruned"]) == 0
    assert capsys.readouterr().out.count("pruned") == states.count("PRUNED")


@pytest.mark.long
def test_a_trial_that_is_continued_by_hand_counts_with_what_it_reaches_then(sweep, recwarn):
    status, said = sweep("trials=1", "trainer.max_epochs=1", "model.class=tasks.Rated", "metric.goal=maximize")
    assert status == 0, said
    value = records()[1]["objective"]["value"]
    assert treadle_main(["fit", "--from-run", "sweep/1", "ckpt_path=auto", "model.lr=0.5", "trainer.max_epochs=2"]) == 0
    assert (value, records()[1]["objective"]["value"]) == (trials()[0].value, 0.5)
    assert records()[1]["trial"] == 0
    assert not [one for one in recwarn if "TrialCallback" in str(one.message)]


@pytest.mark.long
def test_trials_of_two_processes(sweep):
    write_grid("[0.1, 0.2]", "[8]", "prune: {type: threshold, upper: 0.15}")
    status, said = sweep("model.class=tasks.Rated", "trainer.max_epochs=2", "trainer.devices=2")
    assert status == 0, said
    assert [trial.state.name for trial in trials()] == ["COMPLETE", "PRUNED"]
    ends = [(r["processes"], r["epochs"], r["state"]) for _, r in sorted(records().items())]
    assert ends == [(2, 2, "finished"), (2, 1, "pruned")]
    # Whoever continues a pruned trial by hand wants it to go on.
    assert treadle_main(["fit", "--from-run", "sweep/2", "ckpt_path=auto", "trainer.devices=1"]) == 0
    assert [records()[2][name] for name in ("processes", "epochs", "state")] == [1, 2, "finished"]


# -- what is wrong is said before anything is run --------------------------------------------------------------------


def refused(capsys, *arguments):
    assert main(["--config", "sweep.yaml", *arguments]) == 2
    return capsys.readouterr().err


def test_a_wrong_key_or_value_is_an_error_before_anything_is_run(capsys):
    Path("sweep.yaml").write_text(SWEEP.replace("model.lr", "model.lrr").replace("[8, 16]", "[8, large]"))
    said = refused(capsys)
    assert "sweep.yaml:8: model.lrr: Line has no argument 'lrr'. Did you mean 'lr'?" in said
    Path("sweep.yaml").write_text(SWEEP.replace("[8, 16]", "[8, large]").replace("model.lr", "trainer.max_epoch"))
    said = refused(capsys)
    assert "sweep.yaml:8: trainer.max_epoch: Trainer() has no argument 'max_epoch'. Did you mean 'max_epochs'?" in said
    Path("sweep.yaml").write_text(SWEEP.replace("[8, 16]", "[8, large]"))
    assert "sweep.yaml:9: data.batch_size='large' must be an integer." in refused(capsys)
    Path("sweep.yaml").write_text(SWEEP.replace("data.batch_size", "vars.size"))
    assert "vars.size=8 has no effect, because no reference uses it." in refused(capsys)
    Path("sweep.yaml").write_text(SWEEP)
    assert "trainer.fast_dev_run keeps no runs" in refused(capsys, "trainer.fast_dev_run=true")
    assert not Path("runs").exists()


@pytest.mark.long
def test_a_changed_sweep_says_how_to_begin_anew(sweep, capsys):
    assert main(["--config", "sweep.yaml", "--dry-run"]) == 0
    assert "3 trials by random, 2 at a time, over model.lr, data.batch_size" in capsys.readouterr().out
    assert not Path("runs").exists()
    status, said = sweep("trials=1", "trainer.max_epochs=1")
    assert status == 0, said
    said = refused(capsys, "trainer.max_epochs=2")
    assert "config.trainer.max_epochs: 1 is now 2" in said
    assert "give the sweep another name" in said
    Path("sweep.yaml").write_text(SWEEP.replace("1e-1", "1"))
    assert "parameters.model.lr.max: 0.1 is now 1.0" in refused(capsys, "trainer.max_epochs=1")
    assert "method.type" not in refused(capsys, "trainer.max_epochs=1")
    Path("sweep.yaml").write_text(SWEEP)
    assert sweep("trials=2", "trainer.max_epochs=1", "processes=1")[0] == 0  # more trials are no other sweep
    assert len(trials()) == 2


def test_a_folder_with_other_runs_is_refused(capsys):
    Path("runs/sweep/1").mkdir(parents=True)
    assert "runs/sweep contains runs that are not trials of a sweep" in refused(capsys)


def test_another_study_in_the_storage_is_refused_each_time(capsys):
    optuna.create_study(study_name="sweep", storage="sqlite:///other.db").ask()
    for _ in range(2):
        said = refused(capsys, "storage=sqlite:///other.db")
        assert "contains a study 'sweep' with 1 trial, but" in said
        assert "contains no runs of this study" in said


def test_missing_packages_are_one_error(capsys, monkeypatch):
    monkeypatch.setattr("treadle.common.optional.find_spec", lambda name: None)
    assert "treadle sweep needs the packages 'optuna' and 'plotly'" in refused(capsys)


def test_the_output_may_be_closed(tmp_path):
    code = "from treadle.tools.sweep.scheduler import _print; _print('a'); _print('b'); open('went on', 'w').close()"
    process = subprocess.Popen([python(), "-c", code], cwd=tmp_path, env=clean_environment(), stdout=subprocess.PIPE)
    process.stdout.close()
    assert process.wait(60) == 0
    assert (tmp_path / "went on").exists()
