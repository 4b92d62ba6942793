"""Pruning of hand-written studies: reported, decided and raised, on one process and on two."""

from datetime import timedelta

import optuna
import pytest
from support.models import Line, loader
from support.processes import run
from support.trainers import make_trainer
from treadle.callbacks import ModelCheckpoint
from treadle.integrations import PruningCallback, PyTorchLightningPruningCallback

import treadle


class Fixed(Line):
    """Measures what it is told to: a value for each validation."""

    def __init__(self, values):
        super().__init__()
        self.values = values

    def on_validation_epoch_end(self):
        value = 99.0 if self.trainer.sanity_checking else self.values.pop(0)
        self.log("score", value + self.trainer.global_rank * 2.0, sync_dist=True)

    def validation_step(self, batch, batch_idx):
        pass


def fit(trial, values, folder, **flags):
    callbacks = [PruningCallback(trial, "score"), ModelCheckpoint(folder, save_top_k=-1)]
    flags = {"max_epochs": 3, "enable_checkpointing": True, "num_sanity_val_steps": 1, **flags}
    trainer = make_trainer(callbacks=callbacks, **flags)
    try:
        trainer.fit(Fixed(list(values)), loader(8), loader(8))
    except optuna.TrialPruned as error:
        return str(error), trainer.global_step
    return "", trainer.global_step


def threshold():
    return optuna.create_study(pruner=optuna.pruners.ThresholdPruner(upper=5.0))


@pytest.mark.parametrize(
    ("flags", "reported"),
    [
        ({}, {0: 1.0, 1: 2.0, 2: 3.0}),
        pytest.param({"check_val_every_n_epoch": 2, "max_epochs": 4}, {1: 1.0, 3: 2.0}, marks=pytest.mark.exhaustive),
        ({"val_check_interval": 0.5, "max_epochs": 2}, {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0}),
        ({"val_check_interval": 1, "max_epochs": 1}, {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0}),
        ({"val_check_interval": timedelta(0, 0, 1), "max_epochs": 1}, {0: 1.0, 1: 2.0, 2: 3.0, 3: 4.0}),
    ],
    ids=["each", "every second", "two in each", "each batch", "at all times"],
)
def test_each_validation_is_reported_once(flags, reported, tmp_path):
    study = threshold()
    trial = study.ask()
    assert fit(trial, [1.0, 2.0, 3.0, 4.0], tmp_path, **flags)[0] == ""
    assert study.trials[0].intermediate_values == reported


def test_a_pruned_trial_keeps_its_checkpoints(tmp_path):
    study = threshold()
    assert fit(study.ask(), [1.0, 6.0, 1.0], tmp_path) == ("pruned at epoch 1: score was 6", 8)
    assert study.trials[0].intermediate_values == {0: 1.0, 1: 6.0}
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["epoch=0-step=4.ckpt", "epoch=1-step=8.ckpt"]


def on_ranks(folder):
    """Two trials, of which the second is pruned; the ranks log 1 more and 1 less than what counts."""
    world = treadle.Accelerator(cpu=True)
    study = threshold() if world.is_main_process else None
    ends = []
    for values in ([0.0, 1.0, 2.0], [0.0, 7.0, 1.0]):
        trial = study.ask() if study is not None else None
        ends.append(fit(trial, values, f"{folder}/{len(ends)}"))
        if study is not None:
            state = optuna.trial.TrialState.PRUNED if ends[-1][0] else optuna.trial.TrialState.COMPLETE
            study.tell(trial, None if ends[-1][0] else values[-1], state)
    return ends, [] if study is None else [(t.state.name, t.intermediate_values) for t in study.trials]


@pytest.mark.long
def test_all_ranks_are_pruned_at_the_same_step(tmp_path):
    (ends, trials), (other_ends, _) = run(on_ranks, 2, str(tmp_path))
    assert ends == other_ends
    assert [words for words, _ in ends] == ["", "pruned at epoch 1: score was 8"]
    steps = [step for _, step in ends]
    assert steps[1] == steps[0] * 2 // 3
    assert trials == [("COMPLETE", {0: 1.0, 1: 2.0, 2: 3.0}), ("PRUNED", {0: 1.0, 1: 8.0})]
    assert len(list((tmp_path / "1").glob("*.ckpt"))) == 2


def lonely(folder):
    with pytest.raises(Exception, match="is allowed only on ranks other than zero"):
        fit(None, [1.0, 2.0, 3.0], folder)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_rank_zero_needs_the_trial(ranks, tmp_path):
    run(lonely, ranks, str(tmp_path))


def test_a_value_that_is_never_logged_is_an_error():
    trainer = make_trainer(callbacks=[PruningCallback(threshold().ask(), "scor")])
    with pytest.raises(ValueError, match=r"'scor' was never logged\. Logged so far: score\. Did you mean 'score'\?"):
        trainer.fit(Fixed([1.0, 2.0]), loader(), loader())


def test_optunas_own_name_is_the_same_class():
    assert PyTorchLightningPruningCallback is PruningCallback
    callback = PyTorchLightningPruningCallback(threshold().ask(), monitor="score")
    callback.check_pruned()
    callback.pruned = "pruned"
    with pytest.raises(optuna.TrialPruned):
        callback.check_pruned()


def test_a_missing_optuna_is_one_error(monkeypatch):
    monkeypatch.setattr("treadle.common.optional.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"PruningCallback needs the package 'optuna'.*treadle\[sweep\]"):
        PruningCallback(None, "score")
