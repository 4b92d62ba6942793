"""A save that only some ranks make is an error that names them; one to which ranks come late is a save."""

import time
from datetime import timedelta

import pytest
import torch
from processes import run
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from treadle.callbacks import LambdaCallback
from treadle.strategies import open_world
from treadle.strategies.distributed import matching_calls

import treadle
from treadle import Accelerator


class Task(treadle.TaskModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def quick():
    """The same, without the patience that a real run needs."""
    matching_calls._FIRST_LOOK, matching_calls._STANDING = 0.2, 0.3


def fit(root, strategy, hook, ranks):
    quick()

    def save(trainer, *_):
        if trainer.global_rank in ranks:
            trainer.save_checkpoint(f"{root}/s")

    quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "logger", "enable_checkpointing"), False)
    saver = LambdaCallback(**{hook: save})
    trainer = treadle.Trainer(accelerator="cpu", strategy=strategy, max_epochs=2, callbacks=saver, **quiet)
    trainer.fit(Task(), DataLoader(TensorDataset(torch.randn(16, 2)), 2))
    time.sleep(20)  # the others are here still when it is said


ALONE = (
    r"trainer.save_checkpoint needs all processes, but rank {} called it and rank {} continued "
    r"to a later"
)


@pytest.mark.parametrize("hook", [pytest.param("on_step_end", marks=pytest.mark.exhaustive), "on_train_epoch_end"])
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.exhaustive)])
def test_a_save_on_one_rank_within_fit(tmp_path, strategy, hook):
    with pytest.raises(RuntimeError, match=ALONE.format(0, 1)):
        run(fit, 2, str(tmp_path), strategy, hook, (0,))


def test_the_other_rank_may_be_the_one(tmp_path):
    with pytest.raises(RuntimeError, match=ALONE.format(1, 0)):
        run(fit, 2, str(tmp_path), "ddp", "on_step_end", (1,))


def own_loop(root, strategy, what):
    quick()
    accelerator = Accelerator(cpu=True, strategy=strategy)
    model = nn.Linear(2, 1)
    if what != "nothing prepared":
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(3):
            accelerator.backward(model(torch.ones(2, 2)).sum())
            optimizer.step()
            optimizer.zero_grad()
            if what == "step" and step == 1 and accelerator.is_main_process:
                accelerator.save_state(f"{root}/s")
    first = accelerator.is_main_process
    if what == "barrier":
        if first:
            accelerator.save_state(f"{root}/s")
        accelerator.wait_for_everyone()
    elif what == "another call":
        accelerator.save_state(f"{root}/s") if first else accelerator.save_model(model, f"{root}/m")
    elif first:  # and the other one ends
        accelerator.save_model(model, f"{root}/m") if strategy == "fsdp" else accelerator.save_state(f"{root}/s")


@pytest.mark.parametrize(
    ("strategy", "what", "text"),
    [
        ("ddp", "step", "accelerator.save_state needs all processes, but rank 0 .* rank 1 continued"),
        pytest.param(
            "fsdp",
            "step",
            "accelerator.save_state needs all processes, but rank 0 .* rank 1 continued",
            marks=pytest.mark.exhaustive,
        ),
        ("ddp", "barrier", "rank 1 continued to a later step or exchange. Call it on every rank"),
        (
            "fsdp",
            "another call",
            r"rank 0 .* rank 1 called accelerator.save_model|rank 1 .* rank 0 called .*save_state",
        ),
        pytest.param(
            "fsdp",
            "end",
            "accelerator.save_model needs all processes, but rank 0 called it and rank 1 ended",
            marks=pytest.mark.exhaustive,
        ),
        ("auto", "nothing prepared", "accelerator.save_state needs all processes, but rank 0 .* rank 1 ended"),
    ],
)
def test_a_save_on_one_rank_in_an_own_loop(tmp_path, strategy, what, text):
    with pytest.raises(RuntimeError, match=text):
        run(own_loop, 2, str(tmp_path), strategy, what)


def late(root, strategy):
    """In each step one rank is busy by itself, now one and now the other; after that both save."""
    quick()
    accelerator = Accelerator(cpu=True, strategy=strategy)
    model = accelerator.prepare(nn.Linear(2, 1))
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(4):
        accelerator.backward(model(torch.ones(2, 2)).sum())
        optimizer.step()
        optimizer.zero_grad()
        if accelerator.process_index == step % 2:
            for _ in range(4):
                if strategy == "ddp":  # a whole replica, which may be evaluated on one rank
                    with torch.no_grad():
                        model(torch.ones(2, 2))
                time.sleep(0.3)
        accelerator.save_state(f"{root}/{step}")
    return accelerator.steps


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.exhaustive)])
def test_ranks_may_come_late(tmp_path, strategy):
    assert run(late, 2, str(tmp_path), strategy) == [4, 4]


def again(root):
    quick()
    world = open_world("cpu", timeout=timedelta(seconds=1.0))
    said = []
    if world.is_main:
        try:
            world.meet("a save")
        except RuntimeError as error:
            said.append(str(error))
    else:
        time.sleep(1.5)  # busy with something of its own
    world.meet("the next save")
    world.meet("the next save")
    return said


def test_the_wait_ends_with_the_timeout_and_a_later_call_is_met(tmp_path):
    (said,), nothing = run(again, 2, str(tmp_path))
    assert "a save needs all processes, but rank 0 called it and rank 1 did not call it within 1 s" in said
    assert nothing == []
