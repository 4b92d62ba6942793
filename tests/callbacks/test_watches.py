"""Watching a run: spikes, numbers that are not finite, garbage, and what is saved when an error comes."""

import gc
from pathlib import Path

import pytest
import torch
from callback_runs import Tiny, fit, loader, trainer
from processes import run
from torch import nn
from treadle.callbacks import (
    Callback,
    GarbageCollection,
    LambdaCallback,
    ModelCheckpoint,
    NonFiniteWatch,
    OnExceptionCheckpoint,
    SpikeWatch,
    Timer,
)
from treadle.trainer.default_callbacks import choose_callbacks

import treadle

# -- spikes --------------------------------------------------------------------------------------------------------


class Losses(treadle.TaskModule):
    """Its loss is what it is told, and so is its gradient."""

    def __init__(self, losses):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.losses = losses

    def training_step(self, batch, batch_idx):
        loss = self.losses[self.global_step + (self.current_epoch == 9)]
        return (self.weight - self.weight.detach() + 1) * loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-9)


def losses(**spikes):
    usual = [1 + 0.1 * (n % 3) for n in range(24)]
    for step, value in spikes.items():
        usual[int(step[1:]) - 1] = value
    return usual


def watch(root, values, *callbacks, ckpt_path=None, accumulate=1, **more):
    watching = SpikeWatch(**{"window": 10, "warmup": 4, "every_n_steps": 5} | more)
    made = trainer(root, watching, *callbacks, max_epochs=1, on_nonfinite="ignore", accumulate_grad_batches=accumulate)
    made.fit(Losses(values), loader(24 * accumulate, 1), ckpt_path=ckpt_path)
    return made, watching


@pytest.mark.parametrize("monitor", ["loss", "grad_norm"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_spikes_are_found_and_nothing_else(tmp_path, recwarn, monitor, accumulate):
    values = losses(s2=9.0, s8=5.0, s9=5.0, s14=1.35, s24=float("nan"))  # step 2 is within the warm-up
    _, watching = watch(tmp_path, values, monitor=monitor, accumulate=accumulate)
    assert [step for step, _ in watching.spikes] == [8, 9, 24]
    assert watching.spikes[0][1] == pytest.approx(5.0)
    assert "5 in step 8 (usual: 1.1), 5 in step 9" in str([str(w.message) for w in recwarn])


def test_steps_without_a_loss_are_counted(tmp_path):
    class Manual(Losses):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            loss, optimizer = super().training_step(batch, batch_idx), self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            return loss if batch_idx % 2 else None

    watching = SpikeWatch(window=10, warmup=4, every_n_steps=6)
    with pytest.warns(UserWarning, match=r"loss spiked: 5 in step 14 "):
        trainer(tmp_path, watching, max_epochs=1).fit(Manual(losses(s14=5.0)), loader(24, 1))
    assert watching.spikes == [(14, 5.0)]


def test_what_to_do(tmp_path):
    made, _ = watch(tmp_path, losses(s8=5.0), action="stop")
    assert made.global_step == 11  # what is asked at the end of step 10 is read in the next one
    made, _ = watch(tmp_path, losses(s8=5.0), action="save", dirpath=tmp_path / "s")
    assert [path.name for path in (tmp_path / "s").iterdir()] == ["step=10.ckpt"]
    with pytest.raises(ValueError, match=r"loss spiked: 5 in step 8"):
        watch(tmp_path, losses(s8=5.0), action="raise")
    with pytest.raises(ValueError, match="action='save'"):
        SpikeWatch(dirpath="here")
    with pytest.raises(ValueError, match="loss, grad_norm"):
        SpikeWatch("gradient")


def test_a_run_that_goes_on_finds_the_same(tmp_path):
    saver = ModelCheckpoint(tmp_path / "c", every_n_train_steps=7, save_top_k=-1)
    values = losses(s6=5.0, s16=7.0)
    _, whole = watch(tmp_path, values, saver)
    for path in (tmp_path / "c").iterdir():
        _, again = watch(tmp_path, values, ckpt_path=path)
        assert again.spikes == whole.spikes == [(6, 5.0), (16, 7.0)]


def spikes_on_two(root):
    rank = treadle.strategies.open_world("cpu").rank
    watching = SpikeWatch(window=10, warmup=4, every_n_steps=5, action="stop")
    made = trainer(root, watching, max_epochs=1, strategy="ddp")
    made.fit(Losses(losses(**({"s8": 21.0} if rank else {}))), loader(48, 1))
    return watching.spikes, made.global_step


def test_a_spike_on_one_process_is_known_to_all(tmp_path):
    first, second = run(spikes_on_two, 2, str(tmp_path))
    assert first == second == ([(8, pytest.approx(11.05))], 11)


# -- not finite ----------------------------------------------------------------------------------------------------


class Breaks(treadle.TaskModule):
    def __init__(self, where):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 1)
        self.where = where

    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and self.where == "forward":
            with torch.no_grad():
                self.second.weight.fill_(float("inf"))
        hidden = self.first(batch[0])
        if batch_idx == 2 and self.where == "backward":
            hidden = (hidden * 0).sqrt()
        return self.second(hidden).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("where", "found"),
    [("forward", r"output of second \(Linear\)"), ("backward", r"gradient of the output of first \(Linear\)")],
)
@pytest.mark.parametrize("strategy", ["single", "fsdp"])
def test_the_first_part_that_breaks_is_named(tmp_path, where, found, strategy):
    task = Breaks(where)
    with pytest.raises(ValueError, match=f"{found} is the first .* step 3 "):
        trainer(tmp_path, NonFiniteWatch(), strategy=strategy).fit(task, loader())
    assert not any(part._forward_hooks for part in (task.first, task.second) if strategy == "single")


def test_looking_changes_nothing(tmp_path):
    tasks = Tiny(), Tiny()
    fit(tmp_path, NonFiniteWatch(), task=tasks[0])
    fit(tmp_path, task=tasks[1])
    assert torch.equal(tasks[0].net.weight, tasks[1].net.weight)
    with pytest.raises(ValueError, match="disable both checks"):
        NonFiniteWatch(outputs=False, gradients=False)


# -- garbage -------------------------------------------------------------------------------------------------------


def is_frozen(container):
    return not any(each is container for each in gc.get_objects())  # which lists all objects but the frozen ones


@pytest.fixture
def collector():
    """Python's garbage collector as every test expects it, before and after the test."""
    gc.unfreeze()
    yield
    gc.unfreeze()
    gc.enable()


def test_what_was_there_before_is_frozen_while_a_run_collects(collector):
    callback, before = GarbageCollection(), []
    callback.on_train_start(None, None)
    after = []
    assert (is_frozen(before), is_frozen(after), gc.isenabled()) == (True, False, False)
    callback.teardown(None, None, "fit")
    assert (is_frozen(before), gc.get_freeze_count(), gc.isenabled()) == (False, 0, True)


def test_objects_that_other_code_froze_stay_frozen(collector):
    callback, theirs = GarbageCollection(), []
    gc.freeze()
    before = []
    callback.on_train_start(None, None)
    assert (is_frozen(theirs), is_frozen(before)) == (True, False)
    callback.teardown(None, None, "fit")
    assert (is_frozen(theirs), gc.isenabled()) == (True, True)


def test_several_gpus_collect_together():
    flags = dict.fromkeys(("checkpointing", "progress_bar", "model_summary", "report"), False)
    (added,) = choose_callbacks(None, **flags, in_folder=False, collects_garbage=True)
    assert (type(added), added.every_n_steps) == (GarbageCollection, 100)
    own = GarbageCollection(7)
    assert choose_callbacks(own, **flags, in_folder=False, collects_garbage=True) == [own]
    assert choose_callbacks(None, **flags, in_folder=False) == []


def test_garbage_is_collected_at_chosen_steps(tmp_path, collector):
    class Looks(Callback):
        def on_train_batch_start(self, trainer, *_):
            enabled.append(gc.isenabled())

    steps, enabled = [], []
    made = trainer(tmp_path, GarbageCollection(every_n_steps=4), Looks())

    def collected(phase, info):
        if phase == "start" and made.global_step:
            steps.append(made.global_step)

    gc.callbacks.append(collected)
    try:
        made.fit(Tiny(), loader())
    finally:
        gc.callbacks.remove(collected)
    assert [step for step in steps if step < 10] == [4, 8]
    assert not any(enabled)
    assert gc.isenabled()
    with pytest.raises(ValueError, match="generation"):
        GarbageCollection(generation=3)


# -- errors --------------------------------------------------------------------------------------------------------


def fails_at(step):
    def fail(trainer, *_):
        if trainer.global_step == step:
            raise RuntimeError("planned")

    return LambdaCallback(on_train_batch_start=fail)


def test_a_checkpoint_when_an_error_comes(tmp_path):
    whole, task = Tiny(), Tiny()
    fit(tmp_path, task=whole)
    for step in (3, 7):  # the second one replaces the first
        saver = OnExceptionCheckpoint(tmp_path / "c")
        with pytest.raises(RuntimeError, match="planned"):
            fit(tmp_path, fails_at(step), saver)
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


# -- time ----------------------------------------------------------------------------------------------------------


def test_the_time_of_each_stage(tmp_path):
    timer = Timer()
    made = fit(tmp_path, timer, task=Tiny([1], pause=0.002))
    assert 0 < timer.time_elapsed("validate") < timer.time_elapsed() < 60
    assert timer.end_time("validate") < timer.end_time()
    assert timer.start_time("test") is None
    made.test(Tiny(pause=0.002), loader(), verbose=False)
    assert timer.time_elapsed("test") == timer.end_time("test") - timer.start_time("test") > 0.005
    with pytest.raises(ValueError, match="validate"):
        timer.time_elapsed("validation")
