"""What the Trainer tells a profiler, and the verdict on what a run waits for."""

import time
from collections import Counter

import pytest
import torch
from support.profiled import Net, Notes, loader, trainer_in
from torch.utils.data import DataLoader, Dataset

import treadle as tl
from treadle.profilers import PassThroughProfiler, PyTorchProfiler, SimpleProfiler


class Sleeper(tl.Callback):
    """Sleeps in a hook."""

    def __init__(self, seconds=0.0):
        self.seconds = seconds

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        time.sleep(self.seconds)


def test_every_phase_is_measured_in_order_and_properly_nested(tmp_path):
    notes = Notes()
    trainer = trainer_in(
        tmp_path, profiler=notes, callbacks=[Sleeper()], log_every_n_steps=2, accumulate_grad_batches=2,
        gradient_clip_val=1.0, num_sanity_val_steps=0, enable_checkpointing=True,
    )  # fmt: skip
    trainer.fit(Net(), loader(8), loader(4))
    stack, seen = [], [name for kind, name in notes.events if kind == "start"]
    for kind, name in notes.events:
        if kind == "start":
            stack.append(name)
        elif kind == "stop":
            assert stack.pop() == name
    assert stack == []
    first = seen[seen.index("data") :]
    hook = "hook Sleeper.on_train_batch_end"
    micro = ["data", "forward", "backward"]
    assert first[:11] == ["data", "step", "forward", "backward", hook, *micro, "agree", "clip", "optimizer"]
    assert first[11:16] == ["zero_grad", hook, "hook ModelCheckpoint.on_step_end", "data", "step"]
    counts = Counter(seen)
    assert counts["forward"] == counts["backward"] == counts[hook] == 4
    assert counts["step"] == counts["optimizer"] == counts["zero_grad"] == counts["clip"] == 2
    assert counts["data"] == 5  # and the end of the epoch
    assert counts["validation"] == counts["training"] == counts["logging by step"] == 1
    assert counts["checkpoint"] == 1
    assert counts["validation_step"] == 2
    assert [kind for kind, _ in notes.events].count("step") == 2


def test_nothing_is_left_behind_and_nothing_there_without_one(tmp_path):
    seen = {}

    class Look(tl.Callback):
        def on_train_batch_end(self, trainer, task, *rest):
            own = trainer.accelerator
            owners = (own, own.accumulation, own.strategy, own.optimizers[0], trainer.logbook, trainer.sources.train)
            seen.setdefault(trainer.profiled is not None, {name for owner in owners for name in vars(owner)})

    for profiler in (None, SimpleProfiler()):
        trainer = trainer_in(tmp_path, profiler=profiler, callbacks=[Look()])
        task = Net()
        trainer.fit(task, loader(), loader())
        assert trainer.profiled is None
        assert not {"method", "save_state", "prepare_optimizer"} & set(vars(trainer.accelerator))
        assert "backward" not in vars(trainer.accelerator.accumulation)
        assert not {"write_step", "write_row"} & set(vars(trainer.logbook))
        trainer.fit(task, loader(), loader())
    assert seen[True] - seen[False] >= {"backward", "method", "step", "write_row", "_begin"}
    assert isinstance(trainer_in(tmp_path).profiler, PassThroughProfiler)


def test_training_is_the_same_with_and_without(tmp_path):
    states = []
    for profiler in (None, "simple", "advanced", "events", PyTorchProfiler(schedule=None, export_to_chrome=False)):
        tl.seed_everything(1)
        task = Net()
        trainer_in(tmp_path, profiler=profiler).fit(task, loader(shuffle=True), loader())
        states.append(task.state_dict())
    for state in states[1:]:
        assert all(torch.equal(state[name], states[0][name]) for name in state)


class Slow(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        time.sleep(0.003)
        return (torch.ones(4),)


@pytest.mark.parametrize("waits", ["data", "evaluation", "hook"])
def test_the_verdict_names_what_the_run_waits_for(waits, tmp_path, capsys):
    profiler = SimpleProfiler()
    trainer = trainer_in(tmp_path, profiler=profiler, callbacks=Sleeper(0.006 if waits == "hook" else 0.0))
    if waits == "evaluation":
        trainer.validate(Net(), DataLoader(Slow(), 2))
    else:
        trainer.fit(Net(), DataLoader(Slow(), 2) if waits == "data" else loader(24))
    text = capsys.readouterr().err
    action, advice = {
        "data": ("data", "The dataloader reads in this process. Set num_workers"),
        "evaluation": ("data of validate", "The dataloader reads in this process. Set num_workers"),
        "hook": ("hook Sleeper.on_train_batch_end", "of the time in hook Sleeper.on_train_batch_end"),
    }[waits]
    assert profiler.actions[action].exclusive >= 12 * 0.006  # it can't be shorter than it slept
    assert advice in text
    assert ("this run waits for data" in text) == (waits != "hook")


def test_each_stage_has_its_report_also_one_that_fails(tmp_path, capsys):
    trainer = trainer_in(tmp_path, profiler="simple")
    trainer.fit(Net(), loader(), loader())
    trainer.validate(dataloaders=loader())
    assert {"validation_step", "data of validate"} <= set(trainer.profiler.actions)
    text = capsys.readouterr().err
    assert text.index("Profile of fit") < text.index("Profile of validate")

    class Broken(Net):
        def training_step(self, batch, batch_idx):
            with self.trainer.profiler.profile("broken"):
                raise RuntimeError("here")

    trainer = trainer_in(tmp_path, profiler="simple")
    with pytest.raises(RuntimeError, match="here"):
        trainer.fit(Broken(), loader())
    assert "broken" in capsys.readouterr().err
    assert trainer.profiled is None
