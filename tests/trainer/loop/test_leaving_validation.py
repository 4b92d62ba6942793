"""A signal within an evaluation: all ranks leave before the same batch, and a resumed run does a validation again."""

import os
import signal
import time

import pytest
import torch
from support.failing_runs import OtherWeights
from support.models import gathered
from support.processes import run
from support.trainers import make_trainer
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import SumMetric
from treadle.callbacks import EMAWeightAveraging, ModelCheckpoint
from treadle.engine import Preempted

import treadle

STEPS = 3  # of an epoch
VALIDATED = {1: 40, 2: 400}  # by processes, of which several need time to agree


class Task(treadle.TaskModule):
    """Its validation draws random numbers and moves a buffer; it may be slow, on one rank more than on another."""

    def __init__(self, pause=0.0):
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.register_buffer("validated", torch.zeros(()))
        self.pause, self.seen = pause, []

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def look(self, batch_idx):
        self.seen.append(batch_idx)
        time.sleep(self.pause * (1 + self.global_rank / 4))

    def validation_step(self, batch, batch_idx):
        self.look(batch_idx)
        self.validated += 1
        self.log("val", self.net(batch).square().mean() + torch.rand(()))

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        self.look(batch_idx)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.05)


class SendsOnce(treadle.Callback):
    """Sends a signal to this process within the validation after some step, and counts the batches of validations."""

    def __init__(self, number, batch=4, rank=0, step=STEPS):
        self.number, self.batch, self.rank, self.step, self.batches = number, batch, rank, step, 0

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state_dict):
        self.batches = state_dict["batches"]

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
        self.batches += 1
        here = trainer.global_step == self.step and batch_idx == self.batch and trainer.global_rank == self.rank
        if here and self.number is not None:
            os.kill(os.getpid(), self.number)

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start


def loaders(world):
    sizes = (STEPS * 2, VALIDATED[world])
    return [DataLoader(torch.arange(float(n))[:, None], 2 // world, shuffle=True) for n in sizes]


def fit(folder, number=None, rank=0, pause=0.0, callbacks=(), task=None, **flags):
    task, sends = task or Task(pause), SendsOnce(number, rank=rank)
    saving = ModelCheckpoint(folder, filename="{step}", save_on_exception=True)
    flags = {"max_epochs": 2, "num_sanity_val_steps": 0, "enable_checkpointing": None, **flags}
    own = make_trainer(callbacks=[sends, saving, *callbacks], **flags)
    status, began = None, time.monotonic()
    try:
        own.fit(task, *loaders(own.world_size), ckpt_path="auto")
    except (Preempted, KeyboardInterrupt) as error:
        status = getattr(error, "code", 130)
    return {
        "weights": [gathered(p).clone() for p in task.parameters()],
        "status": status,
        "step": own.global_step,
        "seen": task.seen,
        "batches": sends.batches,
        "values": {name: value.item() for name, value in own.callback_metrics.items()},
        "validated": task.validated.item(),
        "drawn": torch.rand(()).item(),
        "seconds": time.monotonic() - began,
        "training": (task.training, torch.is_grad_enabled()),
    }


def check(first, second, right, status):
    assert (first["status"], first["step"], first["training"]) == (status, STEPS, (True, True))
    assert second["status"] is None
    for name in ("step", "values", "validated", "drawn", "batches"):
        assert second[name] == right[name], name
    assert all(map(torch.equal, second["weights"], right["weights"]))


@pytest.mark.guarantee
@pytest.mark.parametrize(
    ("flags", "number", "status"),
    [
        ({}, signal.SIGTERM, 143),
        pytest.param({}, signal.SIGINT, 130, marks=pytest.mark.exhaustive),
        pytest.param({"val_check_interval": 1}, signal.SIGTERM, 143, marks=pytest.mark.exhaustive),
        pytest.param({"val_check_interval": 1}, signal.SIGINT, 130, marks=pytest.mark.exhaustive),
        pytest.param({"max_epochs": 1}, signal.SIGTERM, 143, marks=pytest.mark.exhaustive),
        ({"max_epochs": 1}, signal.SIGINT, 130),
    ],
    ids=str,
)
def test_a_signal_leaves_the_validation_at_the_next_batch(number, status, flags, tmp_path):
    right = fit(tmp_path / "whole", **flags)
    first = fit(tmp_path / "a", number, **flags)
    assert first["seen"][-5:] == [0, 1, 2, 3, 4]
    check(first, fit(tmp_path / "a", **flags), right, status)


def leave_on_two(folder, strategy, rank, number, status):
    flags = {"devices": 2, "strategy": strategy}
    right = fit(f"{folder}/whole", **flags)
    first = fit(f"{folder}/a", number, rank, pause=0.02, **flags)
    check(first, fit(f"{folder}/a", **flags), right, status)
    return first["seen"], first["seconds"]


@pytest.mark.long
@pytest.mark.guarantee
@pytest.mark.parametrize(
    ("strategy", "rank", "number", "status"),
    [
        ("ddp", 1, signal.SIGTERM, 143),
        pytest.param("ddp", 0, signal.SIGINT, 130, marks=pytest.mark.exhaustive),
        pytest.param("fsdp", 0, signal.SIGUSR1, 143, marks=pytest.mark.exhaustive),
    ],
)
def test_all_ranks_leave_before_the_same_batch(strategy, rank, number, status, tmp_path):
    (seen, seconds), (other, _) = run(leave_on_two, 2, str(tmp_path), strategy, rank, number, status)
    assert seen == other
    assert 5 <= len(seen) < VALIDATED[2] // 2
    assert seconds < 15


def leave_stage(stage, rank):
    task = Task(0.02)
    own = make_trainer(callbacks=[SendsOnce(signal.SIGTERM, rank=rank, step=0)], devices=2)
    with pytest.raises(Preempted) as caught:
        getattr(own, stage)(task, loaders(2)[1])
    return caught.value.code, task.seen


@pytest.mark.long
@pytest.mark.parametrize(
    "stage", ["validate", *(pytest.param(one, marks=pytest.mark.exhaustive) for one in ("test", "predict"))]
)
def test_an_evaluation_alone_ends_too(stage, tmp_path):
    (code, seen), other = run(leave_stage, 2, stage, 1)
    assert (code, seen) == other
    assert code == 143
    assert 5 <= len(seen) < VALIDATED[2] // 2


def test_a_sanity_check_ends_and_saves_nothing(tmp_path):
    callbacks = [SendsOnce(signal.SIGTERM, step=0), ModelCheckpoint(tmp_path)]
    task, own = Task(), make_trainer(callbacks=callbacks, num_sanity_val_steps=-1, enable_checkpointing=None)
    with pytest.raises(Preempted):
        own.fit(task, *loaders(1))
    assert task.seen == [0, 1, 2, 3, 4]
    assert list(tmp_path.iterdir()) == []


class Counting(Task):
    def __init__(self):
        super().__init__()
        self.count = SumMetric()

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.count(self.net(batch))

    def on_validation_epoch_end(self):
        self.log("count", self.count.compute())
        self.count.reset()


@pytest.mark.long
@pytest.mark.parametrize(
    ("task", "callback", "seen"),
    [
        (Task, lambda: EMAWeightAveraging(decay=0.9), 5),  # whose averages are taken out before the run is saved
        (Task, OtherWeights, VALIDATED[1] // 2),  # which nobody else can take out, so the validation is completed first
        (Counting, treadle.Callback, 5),  # no batch is counted twice
    ],
    ids=["averages", "other weights", "metric object"],
)
def test_what_a_validation_holds_is_right_after_it_was_left(tmp_path, task, callback, seen):
    right = fit(tmp_path / "whole", task=task(), callbacks=[callback()])
    first = fit(tmp_path / "a", signal.SIGTERM, task=task(), callbacks=[callback()])
    assert len(first["seen"]) == seen
    check(first, fit(tmp_path / "a", task=task(), callbacks=[callback()]), right, 143)
