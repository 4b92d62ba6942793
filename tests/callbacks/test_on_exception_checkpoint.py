"""`ModelCheckpoint(save_on_exception=True)`: what a failing run leaves behind goes on as if it had never failed."""

import os
import random
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from support.callback_runs import Tiny, fit
from support.failing_runs import Fails, Task, loaders, made, saver
from support.processes import run
from treadle.callbacks import LambdaCallback, ModelCheckpoint, OnExceptionCheckpoint
from treadle.engine.checkpoint import store

import treadle

PLACES = ("forward", "backward", "ctrl_c", "batch_end", "step_end", "validation", "epoch_end", "epoch_start")


def facts(trainer, task):
    state = trainer.accelerator.optimizers[0].state_dict()
    return {
        "weights": {name: value.tolist() for name, value in task.state_dict().items()},
        "optimizer": [v.tolist() for slot in state["state"].values() for v in slot.values()],
        "rate": state["param_groups"][0]["lr"],
        "progress": {**trainer.progress.state_dict(), "seconds": 0.0},
        "values": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "random": (torch.rand(2).tolist(), random.random(), np.random.rand()),
        "stopping": trainer.early_stopping_callback.state_dict(),
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What the run that never failed comes to, and its samples."""
    treadle.seed_everything(1)
    root = tmp_path_factory.mktemp("whole")
    task, own = Task(), made(root, saver(root))
    own.fit(task, *loaders())
    assert not (root / "c").exists() or not list((root / "c").iterdir())
    return facts(own, task), task.order


# 4 batches of an epoch make 2 steps; 6 steps in all.
@pytest.mark.parametrize("step", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("place", PLACES)
def test_a_run_goes_on_as_if_it_had_never_failed(tmp_path, whole, place, step):
    within = step == 3
    if within and place in ("validation", "epoch_end", "epoch_start"):
        step = 4
    expected, order = whole
    treadle.seed_everything(1)
    task, fails = Task(), Fails("backward", step, KeyboardInterrupt) if place == "ctrl_c" else Fails(place, step)
    with pytest.raises(fails.error, match="planned") as caught:
        made(tmp_path, fails, saver(tmp_path)).fit(task, *loaders())
    batch = ["the batch: [Te"] if place in ("forward", "backward", "batch_end", "validation") else []
    if place != "ctrl_c":
        assert [note[:14] for note in caught.value.__notes__] == ["in fit, epoch ", *batch]
    assert len(list((tmp_path / "c").iterdir())) == (not (place == "step_end" and within))
    path = next((tmp_path / "c").iterdir(), None)
    if place == "step_end" and within:  # what other callbacks have done in it is not known
        assert path is None
        return
    assert store.read_manifest(path).step == step
    treadle.seed_everything(99)
    again = Task()
    own = made(tmp_path, saver(tmp_path))
    own.fit(again, *loaders(), ckpt_path="last")
    assert facts(own, again) == expected
    assert again.order == order[2 * step :]


@pytest.mark.parametrize("step", [2, *(pytest.param(step, marks=pytest.mark.exhaustive) for step in (4, 6))])
def test_a_validation_that_failed_is_made_up_for_before_the_next_step(tmp_path, step):
    flags = {"accumulate_grad_batches": 1, "val_check_interval": 2, "max_epochs": 2}
    validated = []

    notes = LambdaCallback(on_validation_end=lambda t, _: t.sanity_checking or validated.append(t.global_step))

    def train(root, *callbacks, ckpt_path=None):
        treadle.seed_everything(1 if ckpt_path is None else 7)
        task, own = Task(), made(root, *callbacks, notes, saver(tmp_path), **flags)
        own.fit(task, *loaders(), ckpt_path=ckpt_path)
        return facts(own, task)

    expected = train(tmp_path)
    assert validated == [2, 4, 6, 8]
    with pytest.raises(RuntimeError):
        train(tmp_path, Fails("validation", step))
    validated.clear()
    found = train(tmp_path, ckpt_path="last")
    assert validated == [2, 4, 6, 8][step // 2 - 1 :]
    assert found == expected


class Breaks(Task):
    """Its weights are lost without an error; that comes later."""

    def on_train_batch_start(self, batch, batch_idx):
        if self.trainer.global_step == 2:
            with torch.no_grad():
                self.net[0].weight[0, 0] = float("nan")
            raise RuntimeError("planned")


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    with pytest.raises(RuntimeError, match="planned") as caught:
        made(tmp_path, saver(tmp_path)).fit(Breaks(), *loaders())
    assert "net.0.weight contains NaN or infinity after optimizer step 2" in caught.value.__notes__[-1]
    assert list((tmp_path / "c").iterdir()) == []


def test_a_disk_that_refuses_does_not_hide_the_error(tmp_path):
    def lose(text):
        (tmp_path / "c").rmdir()
        (tmp_path / "c").write_text("")
        return RuntimeError(text)

    with pytest.raises(RuntimeError, match="planned") as caught:
        made(tmp_path, Fails("backward", 3, lose), saver(tmp_path)).fit(Task(), *loaders())
    assert "ModelCheckpoint.on_exception raised" in caught.value.__notes__[-1]


def test_what_is_saved_already_is_not_saved_again(tmp_path):
    often = ModelCheckpoint(tmp_path / "c", every_n_train_steps=1, save_top_k=-1, save_on_exception=True)
    with pytest.raises(RuntimeError):
        made(tmp_path, Fails("forward", 3), often).fit(Task(), *loaders())
    assert sorted(store.read_manifest(path).step for path in (tmp_path / "c").iterdir()) == [1, 2, 3]


def test_weights_only(tmp_path):
    with pytest.raises(RuntimeError):
        made(tmp_path, Fails("forward", 3), saver(tmp_path, save_weights_only=True)).fit(Task(), *loaders())
    (path,) = (tmp_path / "c").iterdir()
    assert [*store.read_manifest(path).files] == ["model.safetensors"]
    store.verify(path)


def test_no_error_no_checkpoint_and_no_fit_no_checkpoint(tmp_path):
    kept = saver(tmp_path)
    own = made(tmp_path, kept)
    own.fit(Task(), *loaders())
    with pytest.raises(RuntimeError):
        own.validate(Task(), [torch.zeros(1)], verbose=False)
    assert list((tmp_path / "c").iterdir()) == []


def two(root, rank):
    """Rank ``rank`` fails; what the others come to then."""
    treadle.seed_everything(1)
    fails = Fails("forward", 2 if int(os.environ["RANK"]) == rank else -1)
    try:
        made(root, fails, saver(root), strategy="ddp").fit(Task(norm=False), *loaders())
    except RuntimeError as error:
        return str(error)


def go_on(root):
    task, own = Task(norm=False), made(root, saver(root), strategy="ddp")
    own.fit(task, *loaders(), ckpt_path="last")
    return own.global_step, {name: value.tolist() for name, value in task.state_dict().items() if name != "seen"}


@pytest.mark.long
@pytest.mark.guarantee
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_of_two_processes_rank_zero_saves_and_nobody_waits(tmp_path, rank):
    assert "planned" in run(two, 2, tmp_path, rank, timeout=60)[rank]
    (path,) = (tmp_path / "c").iterdir()
    assert store.read_manifest(path).step == 2
    first, second = run(go_on, 2, tmp_path)
    assert first == second
    assert first[0] > 2


def sharded(root):
    own = made(root, saver(root), Fails("batch_end", 2), strategy="fsdp")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(RuntimeError, match="planned"):
            own.fit(Task(norm=False), *loaders())
    return [str(warning.message) for warning in caught]


def test_a_sharded_model_can_not_be_saved_by_rank_zero_alone(tmp_path):
    first, _ = run(sharded, 2, tmp_path)
    assert any("save_on_exception=True saves this run after Ctrl-C, but not after an error" in text for text in first)
    assert list((tmp_path / "c").iterdir()) == []


def test_a_checkpoint_when_an_error_comes(tmp_path):
    whole, task = Tiny(), Tiny()
    fit(tmp_path, task=whole)
    for step in (3, 7):  # the second one replaces the first
        saver = OnExceptionCheckpoint(tmp_path / "c")
        with pytest.raises(RuntimeError, match="planned"):
            fit(tmp_path, Fails("batch_end", step), saver)
        assert [path.name for path in (tmp_path / "c").iterdir()] == ["on_exception.ckpt"]
    made = fit(tmp_path, OnExceptionCheckpoint(tmp_path / "c"), task=task, ckpt_path="auto")
    assert Path(made.ckpt_path).name == "on_exception.ckpt"
    assert torch.equal(task.net.weight, whole.net.weight)
    assert saver.ckpt_path == str(tmp_path / "c" / "on_exception.ckpt")
    with pytest.raises(ValueError, match="filename"):
        OnExceptionCheckpoint(tmp_path, "")
    with pytest.raises(ValueError, match=r"filename='a-\{epoch\}' contains a field"):
        OnExceptionCheckpoint(tmp_path, "a-{epoch}")


def test_it_is_in_addition_to_other_checkpoints(tmp_path):
    both = treadle.Trainer(callbacks=OnExceptionCheckpoint(tmp_path), default_root_dir=tmp_path)
    assert [type(c) for c in both.checkpoint_callbacks] == [OnExceptionCheckpoint, ModelCheckpoint]
    assert type(both.checkpoint_callback) is ModelCheckpoint
    alone = treadle.Trainer(callbacks=OnExceptionCheckpoint(tmp_path), enable_checkpointing=False)
    assert len(alone.checkpoint_callbacks) == 1
