"""No step waits for the device: torch raises in the first operation that would."""

import time

import pytest
import torch
from support.gpus import CUDA, Task, accelerator, keep_busy, loader, needs_gpu, trainer
from torch import nn

import treadle


class NoWaits(treadle.Callback):
    """Refuses what waits, from the sixth micro-batch on to the last but two."""

    def __init__(self, steps):
        self.steps = steps
        self.watched = 0

    def on_train_batch_start(self, trainer, task, batch, batch_idx):
        on = 6 <= batch_idx < self.steps - 2
        self.watched += on
        torch.cuda.set_sync_debug_mode("error" if on else "default")

    def teardown(self, trainer, task, stage):
        torch.cuda.set_sync_debug_mode("default")


@needs_gpu
@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"gradient_clip_val": 1.0},
        {"accumulate_grad_batches": 4, "gradient_clip_val": 0.5},
        {"precision": "bf16-mixed"},
        {"on_nonfinite": "ignore"},
        {"enable_progress_bar": True, "max_steps": 50},
        {"callbacks": [treadle.callbacks.OnExceptionCheckpoint("crash")]},
        {"callbacks": [treadle.callbacks.LearningRateMonitor(), treadle.callbacks.ThroughputMonitor()]},
        {"log_every_n_steps": 1000, "logger": True},
        {"strategy": "fsdp"},
    ],
    ids=lambda flags: "-".join(flags) or "plain",
)
def test_a_trainers_steps(flags, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    watch = NoWaits(50)
    callbacks = [*flags.pop("callbacks", []), watch]
    if any(isinstance(callback, treadle.callbacks.ThroughputMonitor) for callback in callbacks):
        flags["logger"] = treadle.loggers.CSVLogger(tmp_path)
    task = Task()
    trainer(callbacks=callbacks, default_root_dir=tmp_path, **flags).fit(task, loader(50, shuffle=True))
    assert watch.watched == 42


class Manual(Task):
    """Steps an optimizer that the Trainer was never shown, or the prepared one."""

    automatic_optimization = False

    def __init__(self, own):
        super().__init__()
        self.own = torch.optim.AdamW(self.parameters(), lr=0.01) if own else None

    def training_step(self, batch, batch_idx):
        optimizer = self.own or self.optimizers()
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        optimizer.step()

    def configure_optimizers(self):
        return None if self.own else super().configure_optimizers()


@needs_gpu
@pytest.mark.parametrize("own", [False, True], ids=["prepared", "own"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_manual_steps(own, precision, tmp_path):
    watch, task = NoWaits(50), Manual(own)
    run = trainer(callbacks=watch, precision=precision, default_root_dir=tmp_path)
    run.fit(task, loader(50))
    assert watch.watched == 42
    assert run.global_step == 50
    assert task.losses[-1] < task.losses[0]


@needs_gpu
@pytest.mark.parametrize("accumulate", [1, 4])
def test_an_own_loops_steps(accumulate):
    own = accelerator(gradient_accumulation_steps=accumulate)
    net = nn.Linear(8, 1)
    model, optimizer, data = own.prepare(net, torch.optim.AdamW(net.parameters()), loader(50, shuffle=True))
    try:
        for number, (x, y) in enumerate(data):
            torch.cuda.set_sync_debug_mode("error" if 6 <= number < 48 else "default")
            with own.accumulate(model):
                own.backward(nn.functional.mse_loss(model(x), y))
                if own.sync_gradients:
                    own.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert number == 49


@needs_gpu
def test_the_host_runs_ahead_of_the_device():
    """A step's call returns while the device is still at it."""

    class Slow(Task):
        def training_step(self, batch, batch_idx):
            keep_busy()
            began.append(time.perf_counter())
            return self.loss(batch)

    began = []
    trainer(limit_train_batches=8).fit(Slow(), loader())
    torch.cuda.synchronize()
    # One step ahead: the votes of the step before the last are read, and no others.
    assert began[5] - began[4] > 0.01


def test_the_bar_shows_numbers_that_are_there():
    bar, shown = treadle.callbacks.ProgressBar(), []

    class Asks(treadle.Callback):
        def on_train_batch_end(self, trainer, task, *_):
            shown.append(bar.get_metrics(trainer, task).get("loss_step"))

    task = Task(slow=True)
    trainer(callbacks=Asks()).fit(task, loader(20))
    known = [value for value in shown if value is not None]
    logged = [value.item() for value in task.losses]
    assert known
    assert set(known) <= set(logged)
    assert CUDA or known[-1] == logged[-1]
