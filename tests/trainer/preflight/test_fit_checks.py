"""What is easily forgotten is said when a fit begins, and nothing that works is refused."""

import re
import warnings

import pytest
import torch
from support.models import Scored, loader
from support.processes import run
from support.trainers import make_trainer
from torch import nn
from treadle.callbacks import EarlyStopping, ModelCheckpoint
from treadle.trainer.preflight.fit_checks import _is_score, hidden_modules

import treadle


class Task(Scored):
    def configure_optimizers(self):
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


def fit(task, **flags):
    """Train for one epoch; returns the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(**flags).fit(task, loader(), loader())
    return [str(warning.message) for warning in caught]


class Forgetful(Task):
    """Has parameters that nobody trains, and layers that are not registered."""

    def __init__(self):
        super().__init__()
        self.more = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        self.teacher = nn.Linear(2, 1).requires_grad_(False)
        self.blocks = [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))]
        self.net.heads = {"a": [nn.Linear(1, 1)]}
        self.scales = (nn.Parameter(torch.ones(1)), 3)
        # On purpose: frozen, or registered under another name, or no modules.
        self.frozen = [nn.Linear(1, 1).requires_grad_(False), nn.ReLU()]
        self.alias = [self.net, *self.more]
        self.sizes = {"width": 2}


class Sealed(tuple):
    """A tuple that is not a sequence to its users, as e3nn's ``Irrep``."""

    def __len__(self):
        raise NotImplementedError

    def __iter__(self):
        raise NotImplementedError


def test_a_container_is_read_through_its_builtin_type():
    task = Forgetful()
    task.blocks = [Sealed(task.blocks)]
    assert list(hidden_modules(task))[:2] == ["blocks[0][0]", "blocks[0][1]"]


UNTRAINED = (
    "parameters that require gradients are not in any optimizer, so they are not trained: "
    "more.0.weight, more.0.bias, more.1.weight and 1 more."
)
HIDDEN = (
    "modules or parameters in plain lists or dicts are not registered in Forgetful: "
    "blocks[0], blocks[1], scales[0] and 1 more."
)


def test_what_is_not_trained_is_said_once():
    said = fit(Forgetful(), max_epochs=3)
    assert len([one for one in said if one.startswith(UNTRAINED)]) == 1
    assert len([one for one in said if one.startswith(HIDDEN)]) == 1


def on_two():
    said = fit(Forgetful(), strategy="ddp_find_unused_parameters_true")
    return [one[:40] for one in said if one.startswith(("parameters that", "modules or"))]


@pytest.mark.long
def test_rank_zero_says_it():
    assert run(on_two, 2) == [[UNTRAINED[:40], HIDDEN[:40]], []]


@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
def test_nothing_is_said_of_a_task_that_is_whole(strategy):
    assert fit(Task(), strategy=strategy) == []


def test_of_a_task_without_an_optimizer_only_that_is_said():
    task = Task()
    task.configure_optimizers = lambda: None
    (said,) = fit(task)
    assert said.startswith("configure_optimizers returned None, so nothing is trained. Return the optimizer,")
    manual = Task()
    manual.automatic_optimization, manual.configure_optimizers = False, lambda: None
    assert not [said for said in fit(manual) if "returned None" in said]


def with_plateau(optimizer, monitor):
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": monitor}


MISSPELLED = "val_los", "val/loss", "valid_loss"


def test_a_monitor_that_validation_does_not_log_is_said_before_training(tmp_path):
    early, saved, plateau = MISSPELLED
    steps = []

    class Noted(Task):
        def training_step(self, batch, batch_idx):
            steps.append(batch_idx)
            raise KeyError("far enough")

        def configure_optimizers(self):
            return with_plateau(super().configure_optimizers(), plateau)

    callbacks = [EarlyStopping(early), ModelCheckpoint(tmp_path, monitor=saved)]
    trainer = make_trainer(callbacks=callbacks, enable_checkpointing=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(KeyError):
            trainer.fit(Noted(), loader(), loader())
    said = [str(one.message) for one in caught if "sanity check" in str(one.message)]
    owners = [re.match(r"(\w+)'s monitor '(.*?)' was not logged", one).groups() for one in said]
    assert owners == [*zip(("EarlyStopping", "ModelCheckpoint", "ReduceLROnPlateau"), MISSPELLED, strict=True)]
    assert all("which logged val_loss. Did you mean 'val_loss'?" in one for one in said)
    assert steps == [0]


class Late(Task):
    """Logs in training, in its epoch's end, and in validation from the second epoch on."""

    def on_train_epoch_end(self):
        self.log("at_end", 1.0)
        self.log("val_by_hand", 1.0)

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            self.log("val_later", 1.0)


def test_a_run_that_works_is_not_refused():
    for name in ("loss", "at_end", "val_loss"):
        assert fit(Late(), callbacks=EarlyStopping(name)) == []
    for name in ("val_by_hand", "val_later"):
        (said,) = fit(Late(), callbacks=EarlyStopping(name))
        assert "If it is not logged elsewhere" in said


def test_a_monitor_where_nothing_is_logged_is_an_error():
    task, bare = Task(), treadle.Trainer(accelerator="cpu", barebones=True, callbacks=EarlyStopping("val_loss"))
    with pytest.raises(ValueError, match="EarlyStopping's monitor 'val_loss' is never logged, because barebones=True"):
        bare.fit(task, loader(), loader())
    assert task.global_step == 0


SCORES = ["val_acc", "valAcc", "acc@1", "f1_score", "val/auc", "r2"]
SCORES += ["val_iou", "bleu4", "mAP", "map_50", "val-precision"]
OTHERS = ["acc_loss", "precision_error", "val_loss", "accidents", "topology", "remap"]


@pytest.mark.parametrize("name", [*SCORES, *OTHERS])
def test_which_names_are_scores(name):
    assert _is_score(name) == (name in SCORES)


def test_a_forgotten_mode_is_named_once(tmp_path):
    class Scored(Task):
        def validation_step(self, batch, batch_idx):
            self.log_dict({"val_acc": 1.0, "acc_loss": 1.0})

        def configure_optimizers(self):
            return with_plateau(super().configure_optimizers(), "val_acc")

    callbacks = [EarlyStopping("val_acc"), ModelCheckpoint(tmp_path, monitor="val_acc")]
    (said,) = fit(Scored(), callbacks=callbacks, enable_checkpointing=True)
    for owner in ("EarlyStopping", "ModelCheckpoint", "ReduceLROnPlateau"):
        assert f"{owner}'s monitor 'val_acc'" in said
    assert "mode='min' keeps the lowest value" in said
    callbacks = [EarlyStopping("val_acc", mode="max"), ModelCheckpoint(tmp_path, monitor="acc_loss")]
    (said,) = fit(Scored(), callbacks=callbacks, enable_checkpointing=True)  # the scheduler's
    assert "EarlyStopping" not in said
    assert "ModelCheckpoint" not in said
