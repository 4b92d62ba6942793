"""What one rank alone decides: all ranks act on it after the same step, or all get an error. No one is left waiting."""

import os
from functools import partial

import pytest
from support.models import Line, loader, optimize
from support.processes import run
from support.trainers import make_trainer
from treadle.callbacks import Callback, EarlyStopping, LambdaCallback, ModelCheckpoint, Timer

pytestmark = pytest.mark.filterwarnings("ignore")


class Task(Line):
    """Writes down what happens, by optimizer step."""

    def __init__(self, manual):
        super().__init__()
        self.automatic_optimization = not manual
        self.happened = []
        for hook in ("on_train_epoch_start", "on_validation_start", "on_save_checkpoint", "on_train_end"):
            setattr(self, hook, partial(self.note, hook))

    def note(self, hook, *_):
        self.happened.append((hook, self.trainer.global_step))

    def training_step(self, batch, batch_idx):
        self.log("rank", float(self.global_rank * self.trainer.global_step), sync_dist=False)
        return optimize(self, self.net(batch[0]).mean())

    def validation_step(self, batch, batch_idx):
        self.log("val", float(self.global_rank * self.trainer.global_step), sync_dist=False)


def on_rank_one(hook, action):
    """A callback that does something in a hook of the third batch of rank 1."""

    def act(trainer, *others):
        return action(trainer) if trainer.global_rank == 1 and others[-1] == 2 else None

    return LambdaCallback(**{hook: act})


def flags_of(case, rank, folder):
    """Flags and callbacks of a rank."""
    return {
        "stop": {"callbacks": on_rank_one("on_train_batch_end", lambda one: setattr(one, "should_stop", True))},
        "leave": {"callbacks": on_rank_one("on_train_batch_start", lambda one: -1)},
        "timer": {"callbacks": [Timer(duration={"seconds": 0.2 if rank else 3600})], "max_epochs": 2000},
        "max_time": {"max_time": {"seconds": 0.2 if rank else 3600}, "max_epochs": 2000},
        "early stopping": {"callbacks": [EarlyStopping("val", patience=1)], "val_check_interval": 2, "max_epochs": 3},
        "best": {
            "callbacks": [ModelCheckpoint(folder, monitor="val", mode="max")],
            "enable_checkpointing": True,
            "val_check_interval": 2,
        },
    }[case]


CASES = ["stop", "timer", "max_time", "early stopping", "best", "leave"]


def decide(strategy, manual, folder):
    """By case what happens on this rank, or its error."""
    results, rank = {}, int(os.environ["RANK"])
    for case in CASES:
        task = Task(manual)
        one = make_trainer(**{"max_epochs": 1, "devices": 2, "strategy": strategy, **flags_of(case, rank, folder)})
        try:
            one.fit(task, loader(12, 1), loader(4, 1))
            results[case] = task.happened
        except (ValueError, RuntimeError) as error:
            results[case] = f"{type(error).__name__}: {error}"
    return results


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((strategy, manual), marks=pytest.mark.exhaustive if strategy == "fsdp" else ())
        for strategy in ("ddp", "fsdp")
        for manual in (False, True)
    ],
    ids=str,
)
def decided(request, tmp_path_factory):
    return run(decide, 2, *request.param, tmp_path_factory.mktemp("best"))


@pytest.mark.parametrize("case", CASES[:-1])
def test_all_ranks_act_after_the_same_step(decided, case):
    first, second = (rank[case] for rank in decided)
    assert first == second
    assert first[-1][0] == "on_train_end"
    if case in ("stop", "best"):  # the others depend on a clock, or on the epoch
        assert first[-1][1] == (4 if case == "stop" else 6)


def test_all_ranks_refuse_what_they_cannot_agree_on(decided):
    """Flags that differ are refused before the first step, see `preflight/test_rank_consistency.py`."""
    for rank in decided:
        assert "on_train_batch_start returned -1 on rank 1" in rank["leave"]


class Withdraws(Callback):
    """Requests the end of the run before a step, and withdraws the request after the ranks have voted on it."""

    def on_before_backward(self, trainer, pl_module, loss):
        trainer.should_stop = trainer.global_step == 1

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.should_stop = False


def withdraw():
    task, one = Task(manual=False), make_trainer(max_epochs=1, devices=2, callbacks=[Withdraws()])
    one.fit(task, loader(12, 1))
    return task.happened


@pytest.mark.long
def test_a_request_to_stop_that_was_withdrawn_after_the_vote():
    assert run(withdraw, 2) == [[("on_train_epoch_start", 0), ("on_train_end", 6)]] * 2
