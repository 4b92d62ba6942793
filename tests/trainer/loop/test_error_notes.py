"""The lines that follow an error in a step or hook: where it was, and what the batch looked like."""

from collections import namedtuple
from unittest.mock import Mock

import numpy
import pytest
import torch
from support.models import Line
from support.trainers import make_trainer
from torch import nn

import treadle

PAIR = [torch.ones(2, 4), torch.zeros(2, dtype=torch.int64)]
LINE = "the batch: [Tensor (2, 4) float32, Tensor (2,) int64]"


class Task(Line):
    features = 4

    def validation_step(self, batch, batch_idx):
        pass

    test_step = predict_step = validation_step


def notes(method, batches=PAIR, callback=None, task=None, stage="fit"):
    """Return the notes of the error that a method of the task, or of a callback, raises."""
    task = task or Task()
    setattr(callback or task, method, Mock(side_effect=KeyError))
    run = make_trainer(num_sanity_val_steps=0, callbacks=callback)
    loaders = ([batches], [batches]) if stage == "fit" else ([batches],)
    with pytest.raises(KeyError) as caught:
        getattr(run, stage)(task, *loaders)
    return getattr(caught.value, "__notes__", [])


@pytest.mark.parametrize(
    ("stage", "method"),
    [
        *[("fit", name) for name in ("training_step", "validation_step", "on_train_batch_start", "on_after_backward")],
        *[("fit", name) for name in ("on_train_batch_end", "on_before_zero_grad", "on_validation_batch_end")],
        *[("fit", name) for name in ("on_after_batch_transfer", "transfer_batch_to_device", "backward")],
        *[("validate", "on_validation_batch_start"), ("test", "test_step"), ("predict", "predict_step")],
    ],
)
def test_every_step_and_batch_hook(stage, method):
    assert LINE in notes(method, stage=stage)


def test_manual_optimization_closures_and_callbacks():
    manual, closure = Task(), Task()
    manual.automatic_optimization = False
    closure.configure_optimizers = lambda: torch.optim.LBFGS(closure.parameters())
    for task in (manual, closure):
        assert LINE in notes("training_step", task=task)
    assert LINE in notes("on_train_batch_end", callback=treadle.Callback())


@pytest.mark.parametrize("method", ["on_train_epoch_start", "on_validation_epoch_end", "on_fit_start"])
def test_no_line_outside_of_batches(method):
    assert not any(note.startswith("the batch") for note in notes(method))


def test_no_line_where_the_data_fail():
    with pytest.raises(KeyError) as caught:
        make_trainer().fit(Task(), map({0: PAIR}.__getitem__, (0, 1)))
    assert not any(note.startswith("the batch") for note in caught.value.__notes__)


Point = namedtuple("Point", "x y")


class Hostile(dict):
    def items(self):
        raise RuntimeError("not now")


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        ({"x": torch.ones(2), "y": ["a", "b"]}, "dict with x Tensor (2,) float32, y [str, str]"),
        ({"x": {"z": torch.ones(1).half()}}, "dict with x (dict with z Tensor (1,) float16)"),
        (Point(torch.ones(()), 3), "Point(x=Tensor () float32, y=int)"),
        ((torch.ones(1), None), "(Tensor (1,) float32, NoneType)"),
        (torch.ones(3, dtype=torch.bool), "Tensor (3,) bool"),
        (numpy.zeros((2, 3)), "ndarray (2, 3) float64"),
        (list(range(20)), "[int, int, int, int, int, int, int, int, and 12 more]"),
        ({"k" * 400: 1}, None),
        (Hostile(x=1), ""),
    ],
)
def test_forms_of_batches(batch, text):
    task = Task()
    task.transfer_batch_to_device = lambda batch, device, dataloader_idx: batch
    lines = [note for note in notes("training_step", batch, task=task) if note.startswith("the batch")]
    if text is None:
        assert len(lines[0]) < 330
    else:
        assert lines == ([f"the batch: {text}"] if text else [])


def test_a_callback_whose_init_does_not_call_that_of_its_base():
    class Mine(treadle.callbacks.EarlyStopping):
        def __init__(self):
            self.patience = 3

    with pytest.raises(AttributeError) as caught:
        make_trainer(callbacks=Mine()).fit(Task(), [PAIR])
    assert caught.value.__notes__[-1] == (
        "Mine.__init__ must call super().__init__() first, with the arguments of EarlyStopping."
    )

    class Plain(treadle.Callback):  # needs none
        def __init__(self):
            self.seen = []

        def on_train_start(self, trainer, pl_module):
            self.seen.append(self.missing)

    with pytest.raises(AttributeError, match="'missing'") as caught:
        make_trainer(callbacks=Plain()).fit(Task(), [PAIR])
    assert not any("super()" in note for note in caught.value.__notes__)


def test_a_monitor_that_a_step_returned_instead_of_logging_it():
    task = Task()
    task.validation_step = lambda batch, batch_idx: {"val_loss": 1}
    run = make_trainer(callbacks=treadle.callbacks.EarlyStopping("val_loss"))
    words = "A step returned a dict with 'val_loss', but returned values are not logged"
    with (
        pytest.warns(UserWarning, match=words),
        pytest.raises(ValueError, match=rf"{words}\. Call self\.log\('val_loss'"),
    ):
        run.fit(task, [PAIR], [PAIR])


def test_a_module_that_is_only_a_hyperparameter(recwarn):
    class Holds(Task):
        def __init__(self, extra, kept):
            super().__init__()
            self.save_hyperparameters()
            self.kept = kept

    make_trainer().fit(Holds(nn.Linear(1, 1), nn.Linear(1, 1)), [PAIR])
    texts = [str(warning.message) for warning in recwarn]
    assert sum("Holds.hparams['extra'] is a module that Holds holds only as a hyperparameter" in t for t in texts) == 1
    assert not any("_hparams" in text or "nn.ModuleList" in text or "hparams['kept']" in text for text in texts)
