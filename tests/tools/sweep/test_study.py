"""The study of a sweep: values that hang on seed and number alone, a grid over many processes, options of Optuna."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import optuna
import pytest
from support.processes import clean_environment
from support.studies import TEXT, make
from treadle.tools.sweep.study import Study

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("runs_folder")]


def draw(study, count):
    return [study.draw(study.ask()) for _ in range(count)]


def test_values_hang_on_seed_and_number_alone():
    first = draw(Study(make()), 6)
    (Path("runs") / "other").mkdir()
    study = Study(make(TEXT, "name=other"))
    again = draw(study, 3) + draw(Study(make(TEXT, "name=other")), 3)  # the second half in another session
    assert again == first
    assert len({repr(values) for values in first}) == 6
    (Path("runs") / "third").mkdir()
    assert draw(Study(make(TEXT, "name=third", "seed=1")), 6) != first
    assert Study(make()).draw(2) == first[2]  # what was drawn stays
    (Path("runs") / "killed").mkdir()
    for _ in range(3):
        Study(make(TEXT, "name=killed")).ask()  # and has not drawn
    assert Study(make(TEXT, "name=killed")).draw(2) == first[2]


WORKER = """
import sys
import time
from pathlib import Path
from optuna.trial import TrialState
from treadle.tools.sweep.study import Study
from treadle.tools.sweep.sweep_file import read_sweep
from treadle.tools.sweep.sweep_folder import SweepFolder

sweep = read_sweep("s.yaml")
folder = SweepFolder(sweep)
with folder.working():
    with folder.deciding():
        study = Study(sweep)
    Path(f"ready {sys.argv[1]}").touch()
    while len(list(Path().glob("ready *"))) < 3:  # otherwise the first process may run every trial
        time.sleep(0.01)
    while True:
        with folder.deciding():
            if len(study.list_trials()) == sweep.trials:
                break
            number = study.ask()
            values = study.draw(number)
            study.record_attributes(number, owner=folder.token)
        study.tell(number, TrialState.COMPLETE, float(number))
"""


@pytest.mark.parametrize("storage", ["sqlite", pytest.param("journal", marks=pytest.mark.exhaustive)])
def test_many_processes_run_each_combination_of_a_grid_once(storage):
    text = TEXT.replace("random", "grid").replace("trials: 20\n", "")
    # Every trial waits for the disk several times.
    text = text.replace("{min: 1e-4, max: 1e-1, log: true}", "[1, 2]").replace("max: 64", "max: 32")
    sweep = make(text if storage == "sqlite" else text + "storage: journal\n")
    environment = clean_environment()
    processes = [subprocess.Popen([sys.executable, "-c", WORKER, str(number)], env=environment) for number in range(3)]
    assert [process.wait(240) for process in processes] == [0, 0, 0]
    trials = Study(sweep).list_trials()
    assert [trial.number for trial in trials] == list(range(24))
    assert [trial.params for trial in trials] == [sweep.get_combination(number) for number in range(24)]
    assert set(Counter(str(trial.params) for trial in trials).values()) == {1}
    assert {trial.state for trial in trials} == {optuna.trial.TrialState.COMPLETE}
    assert len({trial.user_attrs["owner"] for trial in trials}) > 1
    assert os.listdir("runs/s/.sweep") == ["lock"]


def test_the_best_trial_has_the_least_value():
    study = Study(make())
    for number in range(4):
        values = study.draw(study.ask())
        study.tell(number, optuna.trial.TrialState.COMPLETE, values["model.width"] + 0.001 * values["model.lr"])
    assert study.find_best().value == min(trial.value for trial in study.list_trials())
