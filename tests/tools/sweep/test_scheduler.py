"""Which values and how many epochs a trial gets, by many processes at once."""

import os
from pathlib import Path

import optuna
import pytest
from support.studies import TEXT, make
from treadle.cli.config import ConfigError
from treadle.tools.sweep.study import Study
from treadle.tools.sweep.sweep_folder import SweepFolder

pytestmark = pytest.mark.usefixtures("runs_folder")


@pytest.mark.long
def test_hyperband_knows_the_epochs_of_every_process():
    study = Study(make(TEXT + "prune: hyperband\n"))
    assert study.describe_pruner() == {"type": "hyperband", "max_resource": 9}
    assert study.pruner._max_resource == 9
    for more in ("trainer.max_epochs: [3, 9]", "trainer.val_check_interval: [0.5, 1.0]"):
        assert Study(make(f"{TEXT}  {more}\nprune: hyperband\n")).describe_pruner() == {"type": "hyperband"}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("prune: {type: hyperband, reductio_factor: 3}", "hyperband has no option 'reductio_factor'. Did you mean"),
        ("prune: {type: hyperband, reduction_factor: 1}", "prune: hyperband: "),
        ("prune: percentile", "missing"),
        ("storage: postgres://nowhere/x", "can't be opened"),
    ],
)
def test_what_optuna_does_not_take_is_an_error(more, said):
    with pytest.raises(ConfigError, match=said.replace("(", r"\(")):
        Study(make(f"{TEXT}{more}\n"))


def test_options_of_the_method():
    study = Study(make(TEXT.replace("random", "{type: tpe, n_startup_trials: 2}")))
    for number in range(4):
        values = study.draw(study.ask())
        study.tell(number, optuna.trial.TrialState.COMPLETE, values["model.lr"])
    assert study.study.sampler._n_startup_trials == 2
    with pytest.raises(ConfigError, match="tpe has no option 'startup'"):
        Study(make(TEXT.replace("random", "{type: tpe, startup: 2}")))


def test_of_processes_that_were_killed_nothing_stays():
    folder = SweepFolder(make())
    with folder.working():
        dead = Path("runs/s/.sweep/dead")
        dead.mkdir()
        (dead / "lock").write_text("")
        with folder.deciding():
            folder.forget_the_dead()
        assert sorted(os.listdir("runs/s/.sweep")) == sorted(["lock", folder.token])
    assert os.listdir("runs/s/.sweep") == ["lock"]
