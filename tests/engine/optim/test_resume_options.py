"""A resume whose script builds another optimizer or schedule than the saved run: what is said, and what holds."""

import copy
import math
import warnings
from functools import partial

import pytest
import torch
from support.differences import differences
from support.models import Line, loader, take_step
from support.processes import run
from support.trainers import make_trainer
from torch import nn
from torch.optim import lr_scheduler as schedules
from treadle.callbacks import ModelCheckpoint

from treadle import Accelerator
from treadle.optim import lr_schedule

BEFORE, AFTER, SHORT, LONG = 6, 9, 15, 30


def warmed(optimizer, length):
    parts = [schedules.LinearLR(optimizer, 0.1, total_iters=4), schedules.CosineAnnealingLR(optimizer, length - 4)]
    return schedules.SequentialLR(optimizer, parts, milestones=[4])


def chained(optimizer, length):
    parts = [schedules.LinearLR(optimizer, 0.1, total_iters=length), schedules.ExponentialLR(optimizer, 0.9)]
    return schedules.ChainedScheduler(parts, optimizer)


class Ramp:
    """A schedule's function that has a state."""

    def __init__(self, length):
        self.length = length

    def __call__(self, step):
        return 1 - step / (2 * self.length)


KINDS = {
    "cosine": lambda o, n: schedules.CosineAnnealingLR(o, n, eta_min=0.001),
    "one cycle": lambda o, n: schedules.OneCycleLR(o, [0.1, 0.2], total_steps=n),
    "linear": lambda o, n: schedules.LinearLR(o, 0.2, total_iters=n),
    "milestones": lambda o, n: schedules.MultiStepLR(o, [n // 5, n // 5, n // 3]),
    "restarts": lambda o, n: schedules.CosineAnnealingWarmRestarts(o, n // 5, 2),
    "cycles": lambda o, n: schedules.CyclicLR(o, [0.01, 0.02], [0.1, 0.2], n // 5, cycle_momentum=False),
    "sequence": warmed,
    "chain": chained,
    "callable": lambda o, n: schedules.LambdaLR(o, [Ramp(n), Ramp(n)]),
    "by name": lambda o, n: lr_schedule("warmup_stable_decay", o, n, warmup_steps=2, decay_steps=0.8),
}
FUNCTION = {"function": lambda o, n: schedules.LambdaLR(o, lambda step: 0.5 * (1 + math.cos(step / n)))}
SAID = {
    "cosine": "CosineAnnealingLR: T_max 15 in the checkpoint, 30 in this script",
    "one cycle": "OneCycleLR: total_steps 15 in the checkpoint, 30 in this script",
    "linear": "LinearLR: total_iters 15 in the checkpoint, 30 in this script",
    "milestones": r"MultiStepLR: milestones \[3, 3, 5\] in the checkpoint, \[6, 6, 10\] in this script",
    "restarts": "CosineAnnealingWarmRestarts: T_0 3 in the checkpoint, 6 in this script",
    "cycles": "CyclicLR: total_size 6.* in the checkpoint, 12.* in this script",
    "sequence": r"SequentialLR: _schedulers\[1\].T_max 11 in the checkpoint, 26 in this script",
    "chain": r"ChainedScheduler: _schedulers\[0\].total_iters 15 in the checkpoint, 30 in this script",
    "callable": r"LambdaLR: lr_lambdas\[0\].length 15 in the checkpoint, 30 in this script",
    "by name": r"LambdaLR: lr_lambdas\[0\].decay_start 3 in the checkpoint, 6 in this script",
    "function": r"LambdaLR: lr \[.*\] in the checkpoint, \[.*\] from this script's function at step 6",
}


def train(build, length, steps, source=None, target=None, layers=2, apart=True, lr=0.1, late=False, decay=0.01, **load):
    """Returns the learning rates of both groups before each step, the first one included."""
    accelerator = Accelerator(cpu=True, strategy=load.pop("strategy", "auto"))
    torch.manual_seed(0)
    model = accelerator.prepare(nn.Sequential(*[nn.Linear(2, 2), nn.Linear(2, 1)][:layers]))
    parts = accelerator.unwrap_model(model)
    groups = [{"params": part.parameters(), "lr": lr * number} for number, part in enumerate(parts, 1)]
    optimizer = torch.optim.AdamW(groups if apart else parts.parameters(), lr=lr, weight_decay=decay)
    if late:  # as many scripts do: the schedule is built on what prepare returned
        optimizer = accelerator.prepare(optimizer)
        schedule = accelerator.prepare(build(optimizer, length))
    else:
        optimizer, schedule = accelerator.prepare(optimizer, build(optimizer, length))
    if source is not None:
        accelerator.load_state(source, **load)
    rates = []
    for _ in range(steps):
        rates.append([group["lr"] for group in optimizer.param_groups])
        take_step(accelerator, model, optimizer, torch.ones(2, 2))
        schedule.step()
    if target is not None:
        accelerator.save_state(target)
    return rates


@pytest.mark.parametrize("late", [False, True], ids=["built before", "built on the prepared"])
@pytest.mark.parametrize("kind", KINDS | FUNCTION)
def test_the_scripts_schedule_is_the_one_from_scratch(tmp_path, kind, late):
    build = (KINDS | FUNCTION)[kind]
    train(build, SHORT, BEFORE, target=tmp_path / "s", late=late)
    whole = train(build, LONG, BEFORE + AFTER, late=late)
    assert train(build, LONG, AFTER, tmp_path / "s", late=late, schedule="script") == whole[BEFORE:]


@pytest.mark.parametrize("kind", KINDS | FUNCTION)
def test_an_unchanged_script_goes_on_exactly_and_without_a_word(tmp_path, kind):
    build = (KINDS | FUNCTION)[kind]
    whole = train(build, SHORT, BEFORE + AFTER)
    train(build, SHORT, BEFORE, target=tmp_path / "s")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for more in ({}, {"schedule": "saved"}, {"schedule": "script"}):
            assert train(build, SHORT, AFTER, tmp_path / "s", **more) == whole[BEFORE:]


@pytest.mark.parametrize("kind", KINDS)
def test_the_saved_schedule_holds_and_both_values_are_said(tmp_path, kind):
    build = KINDS[kind]
    whole = train(build, SHORT, BEFORE + AFTER)
    train(build, SHORT, BEFORE, target=tmp_path / "s")
    if kind == "one cycle":
        with pytest.raises(ValueError, match=rf"ends before this script's:\n.*{SAID[kind]}\n"):
            train(build, LONG, AFTER, tmp_path / "s")
    else:
        with pytest.warns(UserWarning, match=SAID[kind]) as said:
            assert train(build, LONG, AFTER, tmp_path / "s") == whole[BEFORE:]
        assert sum("in this script" in str(one.message) for one in said) == 1
        assert not [one for one in said if "Functions are not saved" in str(one.message)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train(build, LONG, AFTER, tmp_path / "s", schedule="saved") == whole[BEFORE:]


def test_functions_are_the_scripts_and_that_is_said(tmp_path):
    build = FUNCTION["function"]
    train(build, SHORT, BEFORE, target=tmp_path / "s")
    with pytest.warns(UserWarning, match=SAID["function"]):
        rates = train(build, LONG, AFTER, tmp_path / "s")
    assert rates[1:] == train(build, LONG, BEFORE + AFTER)[BEFORE + 1 :]


def test_other_options_are_said_and_what_is_saved_holds_in_every_resume(tmp_path):
    steady = partial(train, lambda optimizer, _: schedules.ConstantLR(optimizer, 1.0), SHORT, 2)
    steady(target=tmp_path / "0")
    text = (
        r"AdamW group 0: weight_decay 0.01 in the checkpoint, 0.5 in this script\n"
        r"  AdamW group 0: lr 0.1 in the checkpoint, 0.3 in this script\n"
        r"(.*\n)*  AdamW group 1: lr 0.2 in the checkpoint, 0.6 in this script"
    )
    for number in range(2):  # the second resume is of a checkpoint that the changed script saved
        with pytest.warns(UserWarning, match=text):
            rates = steady(tmp_path / str(number), tmp_path / str(number + 1), lr=0.3, decay=0.5)
        assert rates == [[0.1, 0.2]] * 2
    rates = steady(tmp_path / "2", tmp_path / "3", lr=0.3, decay=0.5, schedule="script")
    assert rates == [[0.3, 0.6]] * 2
    with pytest.warns(UserWarning, match="weight_decay 0.01 in the checkpoint, 0.5") as said:
        steady(tmp_path / "3", lr=0.3, decay=0.5)
    assert not [one for one in said if ": lr" in str(one.message)]


def test_a_schedule_by_measurements_stays_as_saved(tmp_path):
    accelerator = Accelerator(cpu=True)

    def prepared(patience, lr):
        accelerator.free_memory()
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        schedule = schedules.ReduceLROnPlateau(optimizer, patience=patience, factor=0.5)
        return accelerator.prepare(model, optimizer, schedule)

    _, optimizer, schedule = prepared(1, 0.4)
    for _ in range(4):
        schedule.step(1.0)
    assert optimizer.param_groups[0]["lr"] == 0.2
    accelerator.save_state(tmp_path / "s")
    _, optimizer, schedule = prepared(3, 0.8)
    with pytest.warns(UserWarning, match="ReduceLROnPlateau: patience 1 in the checkpoint, 3 in this script"):
        accelerator.load_state(tmp_path / "s")
    assert optimizer.param_groups[0]["lr"] == 0.2
    with pytest.warns(UserWarning, match="ReduceLROnPlateau depends on past metrics"):
        accelerator.load_state(tmp_path / "s", schedule="script")
    assert optimizer.param_groups[0]["lr"] == 0.2


def test_a_schedule_that_can_not_be_brought_there_changes_nothing(tmp_path):
    build = KINDS["one cycle"]
    train(build, LONG, 20, target=tmp_path / "s")
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.AdamW([{"params": part.parameters()} for part in model], lr=0.1)
    model, optimizer, _ = accelerator.prepare(model, optimizer, build(optimizer, SHORT))
    before = copy.deepcopy((optimizer.param_groups, model.state_dict()))
    with pytest.raises(ValueError, match="can't advance this script's OneCycleLR to step 20 of the checkpoint"):
        accelerator.load_state(tmp_path / "s", schedule="script")
    assert differences((optimizer.param_groups, model.state_dict()), before) == []
    with pytest.raises(ValueError, match="schedule='mine' is not one of"):
        accelerator.load_state(tmp_path / "s", schedule="mine")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["cosine", "linear", "callable"])
@pytest.mark.parametrize("apart", [False, True], ids=["in its group", "in a group of its own"])
def test_parameters_that_were_added_do_not_put_the_schedule_back(tmp_path, kind, apart):
    """With strict=False; the rate must not begin anew while the schedule goes on from its step."""
    build = KINDS[kind] if kind != "callable" else lambda o, n: schedules.LambdaLR(o, Ramp(n))

    train(build, SHORT, BEFORE, target=tmp_path / "s", layers=1, apart=apart)
    with pytest.warns(UserWarning, match="State that does not fit is not restored"):
        resumed = train(build, SHORT, AFTER, tmp_path / "s", apart=apart, strict=False)
    assert resumed == train(build, SHORT, BEFORE + AFTER, apart=apart)[BEFORE:]


def two(root, strategy):
    build = KINDS["one cycle"]
    train(build, SHORT, BEFORE, target=f"{root}/s", strategy=strategy)
    whole = train(build, LONG, BEFORE + AFTER, strategy=strategy)
    return train(build, LONG, AFTER, f"{root}/s", strategy=strategy, schedule="script") == whole[BEFORE:]


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.exhaustive)])
def test_on_two_processes(tmp_path, strategy):
    assert run(two, 2, str(tmp_path), strategy) == [True, True]


# -- with a Trainer ------------------------------------------------------------------------------------------------


class Scheduled(Line):
    """Four steps an epoch, and a rate that ends with ``max_epochs``."""

    def training_step(self, batch, batch_idx):
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        length = self.trainer.max_epochs if self.interval == "epoch" else self.trainer.estimated_stepping_batches
        schedule = schedules.CosineAnnealingLR(optimizer, length)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": self.interval}}


def fit(root, epochs, interval, lr=0.1, **resume):
    task = Scheduled()
    task.interval, task.lr, task.rates = interval, lr, []
    trainer = make_trainer(max_epochs=epochs, callbacks=ModelCheckpoint(root / "c"), enable_checkpointing=True)
    trainer.fit(task, loader(8), **resume)
    return task.rates


@pytest.mark.long
@pytest.mark.parametrize("interval", ["epoch", "step"])
def test_a_fit_with_more_epochs(tmp_path, interval):
    whole = fit(tmp_path / "whole", 6, interval)
    fit(tmp_path, 3, interval)
    (path,) = (tmp_path / "c").iterdir()
    with pytest.warns(UserWarning, match=r"T_max (3|12) in the checkpoint, (6|24) in this script"):
        rates = fit(tmp_path / "saved", 6, interval, ckpt_path=path)
    assert rates[-1] > 0.05  # it has climbed again, as was said
    assert fit(tmp_path / "script", 6, interval, ckpt_path=path, schedule="script") == whole[12:]
    with pytest.warns(UserWarning, match="SGD: lr 0.1 in the checkpoint, 0.2 in this script"):
        fit(tmp_path / "other", 6, interval, lr=0.2, ckpt_path=path)


def test_a_schedule_without_a_resume_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"schedule='script' applies only to a resumed run. Set ckpt_path too"):
        fit(tmp_path, 1, "step", schedule="script")
