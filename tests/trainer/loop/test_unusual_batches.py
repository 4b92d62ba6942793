"""Batches that are None, steps that read their batches themselves, and hooks of the task that the data module has."""

import itertools
import warnings
from functools import partial

import pytest
import torch
from support.models import gathered, optimize
from support.processes import run
from support.trainers import make_trainer
from torch import nn
from torch.utils.data import DataLoader

import treadle

X = torch.randn(48, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
BROKEN = {"some": {*range(4, 8), *range(20, 24)}, "a whole step": {*range(8, 24)}, "the end": {*range(40, 48)}}


class Task(treadle.TaskModule):
    def __init__(self, weighted=False):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(3, 1).double()
        self.weighted, self.ends = weighted, []

    def training_step(self, batch, batch_idx):
        loss = optimize(self, (self.net(batch) - batch.sum(1, keepdim=True)).square().mean())
        return {"loss": loss, "weight": float(len(batch))} if self.weighted else loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        assert (outputs is None) == (batch is None)
        self.ends.append((batch_idx, batch is None))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


def trainer(**flags):
    return make_trainer(**{"max_epochs": 2, "enable_report": False, **flags})


def collate_without(broken):
    return lambda rows: None if set(rows) <= broken else X[rows]


def train_plainly(broken, k, ranks):
    """Return the weights of a loop over the joint batches without the broken ones, and its number of steps."""
    task, steps = Task(), 0
    optimizer = task.configure_optimizers()
    shares = [list(range(first, first + 4)) for first in range(0, 48, 4)]
    for first in (*range(0, 12, k * ranks), *range(0, 12, k * ranks)):
        rows = [row for share in shares[first : first + k * ranks] if not set(share) <= broken for row in share]
        if rows:
            optimizer.zero_grad()
            task.training_step(X[rows], 0).backward()
            optimizer.step()
            steps += 1
    return task.net.weight.detach(), steps


def check_with_none(names, ranks=1, strategy="auto", weights=(False, True), late=False, **flags):
    for name, k, weighted in itertools.product(names, (1, 3), weights):
        task, broken = Task(weighted), BROKEN[name]
        fitter = trainer(accumulate_grad_batches=k, devices=ranks, strategy=strategy, **flags)
        if late:  # as on accelerators, whose votes are read one step late
            task.on_train_start = partial(setattr, fitter.accelerator.accumulation.agreement, "immediate", False)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fitter.fit(task, DataLoader(range(48), 4, collate_fn=collate_without(broken)))
        weight, steps = train_plainly(broken, k, ranks)
        missed = sum(is_none for _, is_none in task.ends)
        assert len(task.ends) == 24 // ranks
        assert bool(missed) == any("yielded None instead of a batch" in str(w.message) for w in caught)
        assert fitter.global_step == steps
        assert float((gathered(task.net.weight) - weight).abs().max()) < 1e-12, (name, k, weighted)


@pytest.mark.long
@pytest.mark.guarantee
@pytest.mark.parametrize("flags", [{}, {"on_nonfinite": "ignore"}, {"strategy": "fsdp"}], ids=str)
def test_a_batch_that_is_none_leaves_the_mean_of_the_others(flags):
    check_with_none(BROKEN, **flags)


@pytest.mark.guarantee
@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
def test_a_step_without_a_loss_adds_nothing_to_its_group(strategy):
    task, reference = Task(), Task()
    task.training_step = lambda batch, index: None if index % 2 else Task.training_step(task, batch, index)
    optimizer = reference.configure_optimizers()
    with pytest.warns(UserWarning, match="training_step returned None"):
        trainer(accumulate_grad_batches=2, max_epochs=1, strategy=strategy).fit(task, DataLoader(X, 4))
    for first in range(0, 48, 8):
        optimizer.zero_grad()
        (reference.training_step(X[first : first + 4], 0) / 2).backward()
        optimizer.step()
    assert float((gathered(task.net.weight) - reference.net.weight).abs().max()) < 1e-12


def check_on_two(strategy):
    check_with_none(["some", "the end"], 2, strategy)
    if strategy == "ddp":
        check_with_none(BROKEN, 2, strategy, (True,), late=True)


@pytest.mark.long
@pytest.mark.guarantee
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.exhaustive)])
def test_a_rank_whose_batch_is_none_takes_part_without_weight(strategy):
    """Also where votes are read one step late, as on accelerators."""
    run(check_on_two, 2, strategy)


def test_manual_optimization_skips_none():
    task = Task()
    task.automatic_optimization = False
    with pytest.warns(UserWarning, match="yielded None instead of a batch"):
        trainer().fit(task, DataLoader(range(48), 4, collate_fn=collate_without(BROKEN["some"])))
    weight, _ = train_plainly(BROKEN["some"], 1, 1)
    assert torch.equal(task.net.weight, weight)


@pytest.mark.parametrize("step", ["training_step", "validation_step"])
def test_a_step_that_reads_its_batches_itself_is_refused(step):
    reading = type("Reading", (Task,), {step: lambda self, dataloader_iter: next(dataloader_iter)})
    with pytest.raises(ValueError, match=f"Reading.{step} has the argument dataloader_iter, but a step gets one batch"):
        trainer().fit(reading(), DataLoader(X, 4))


class Both(Task):
    def train_dataloader(self):
        raise AssertionError("the data module's is used")

    on_after_batch_transfer = train_dataloader


class BothData(treadle.DataModule):
    def train_dataloader(self):
        return DataLoader(range(8), 4, collate_fn=collate_without(set()))

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch


def test_a_method_that_the_data_modules_replaces_is_said():
    task = Both()
    with pytest.warns(UserWarning, match="Both and BothData both define") as caught:
        trainer().fit(task, datamodule=BothData())
    assert len(task.ends) == 4
    texts = [str(w.message) for w in caught]
    for method in ("train_dataloader", "on_after_batch_transfer"):
        (text,) = (text for text in texts if f"both define {method}." in text)
        assert f"precedence, and Both.{method} is not called" in text


def test_limits_that_overfit_batches_overrides_are_said():
    with pytest.warns(
        UserWarning, match="overfit_batches=2 overrides limit_val_batches=0.*limit_train_batches instead"
    ):
        trainer(overfit_batches=2, limit_val_batches=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer(overfit_batches=2)
        trainer(overfit_batches=2, limit_train_batches=2)
