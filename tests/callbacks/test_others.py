"""The smaller callbacks, and the base class."""

import os
import time
from datetime import timedelta

import pytest
import torch
from callback_runs import Rows, Tiny, fit, loader, trainer
from processes import run
from treadle.callbacks import (
    HOOKS,
    Callback,
    LambdaCallback,
    LearningRateMonitor,
    ModelCheckpoint,
    Timer,
)
from treadle.trainer.loop import fit_loop

# -- LearningRateMonitor -------------------------------------------------------------------------------------------


class Scheduled(Tiny):
    """Halves its rate at each epoch, and at each step where told so."""

    def __init__(self, interval=None, name=None, groups=1, optimizer="SGD"):
        super().__init__([1.0])
        self.how = interval, name, groups, optimizer

    def configure_optimizers(self):
        interval, name, groups, kind = self.how
        parameters = list(self.parameters())
        parts = [{"params": parameters[:1], "lr": 0.5}, {"params": parameters[1:], "name": "bias"}]
        extra = {"momentum": 0.9} if kind == "SGD" else {}
        given = parts if groups == 2 else parameters
        optimizer = getattr(torch.optim, kind)(given, lr=1.0, weight_decay=0.25, **extra)
        if interval is None:
            return optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": interval, "name": name},
        }


@pytest.mark.parametrize(
    ("interval", "scheduler", "rows"),
    [
        (None, None, [(s, 1.0) for s in (0, 2, 4, 5, 6, 8, 10)]),
        (None, "epoch", [(0, 1.0), (5, 0.5)]),
        (None, "step", [(s, 0.5 ** (s - 1)) for s in (2, 4, 6, 8, 10)]),
        ("step", "epoch", [(2, 1.0), (4, 1.0), (6, 0.5), (8, 0.5), (10, 0.5)]),
        ("epoch", "step", [(0, 1.0), (5, 0.5**5)]),
        ("epoch", None, [(0, 1.0), (5, 1.0)]),
    ],
)
def test_the_rate_a_step_is_taken_with(tmp_path, interval, scheduler, rows):
    logger, monitor = Rows(), LearningRateMonitor(interval)
    made = fit(tmp_path, monitor, task=Scheduled(scheduler), logger=logger, log_every_n_steps=2)
    assert logger.of("lr-SGD") == rows
    assert monitor.lrs == {"lr-SGD": [rate for _, rate in rows]}
    assert made.callback_metrics["lr-SGD"].item() == rows[-1][1]


def test_groups_names_momentum_and_weight_decay(tmp_path):
    logger, monitor = Rows(), LearningRateMonitor("epoch", log_momentum=True, log_weight_decay=True)
    fit(tmp_path, monitor, task=Scheduled("epoch", "rate", groups=2), logger=logger, max_epochs=1)
    row = {name: value for name, value in logger.rows[0][1].items() if name != "epoch"}
    assert row == {
        "rate/pg1": 0.5,
        "rate/pg1-momentum": 0.9,
        "rate/pg1-weight_decay": 0.25,
        "rate/bias": 1.0,
        "rate/bias-momentum": 0.9,
        "rate/bias-weight_decay": 0.25,
    }
    assert list(monitor.lrs) == ["rate/pg1", "rate/bias"]
    logger = Rows()
    monitor = LearningRateMonitor("epoch", log_momentum=True)
    fit(tmp_path, monitor, task=Scheduled(optimizer="Adam"), logger=logger, max_epochs=1)
    assert logger.of("lr-Adam-momentum") == [(0, 0.9)]


def test_two_schedulers_of_one_optimizer(tmp_path):
    class Two(Tiny):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            kinds = torch.optim.lr_scheduler
            first = {"scheduler": kinds.StepLR(optimizer, 1, 0.5), "interval": "step"}
            return [optimizer], [first, {"scheduler": kinds.StepLR(optimizer, 1, 0.1), "name": "both"}]

    logger = Rows()
    fit(tmp_path, LearningRateMonitor(), task=Two(), logger=logger, log_every_n_steps=5)
    assert [step for step, _ in logger.of("both")] == [0, 5]
    assert [step for step, _ in logger.of("lr-SGD")] == [5, 10]


def test_rates_without_a_logger(tmp_path):
    with pytest.raises(ValueError, match="needs a logger"):
        fit(tmp_path, LearningRateMonitor())
    with pytest.raises(ValueError, match="Did you mean 'epoch'"):
        LearningRateMonitor("epochs")


def test_rates_of_steps_where_no_step_is_logged(tmp_path):
    for scheduler, interval in ((None, None), ("step", None), ("epoch", "step")):
        with pytest.raises(ValueError, match=r"log_every_n_steps=0 .* logs lr-SGD at that interval"):
            fit(tmp_path, LearningRateMonitor(interval), task=Scheduled(scheduler), logger=Rows(), log_every_n_steps=0)
    for scheduler, interval in (("epoch", None), (None, "epoch")):
        monitor = LearningRateMonitor(interval)
        fit(tmp_path, monitor, task=Scheduled(scheduler), logger=Rows(), log_every_n_steps=0)
        assert len(monitor.lrs["lr-SGD"]) == 2


# -- Timer ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("duration", ["00:00:01:30", timedelta(seconds=90), {"minutes": 1, "seconds": 30}])
def test_durations(duration):
    assert Timer(duration).time_remaining() == 90


def test_a_timer_stops_the_run(tmp_path):
    timer = Timer(timedelta(seconds=0.2))
    made = fit(tmp_path, timer, task=Tiny(pause=0.02), samples=1000, validate=False)
    assert 2 <= made.global_step <= 15
    assert timer.time_remaining() == 0
    timer = Timer(timedelta(seconds=0.01), interval="epoch", verbose=False)
    assert fit(tmp_path, timer, task=Tiny(pause=0.01), validate=False, max_epochs=9).global_step == 5


def test_a_timer_counts_over_resumed_runs(tmp_path):
    kept = ModelCheckpoint(tmp_path / "c")
    first = Timer()
    fit(tmp_path, first, kept, task=Tiny(pause=0.02), validate=False, max_epochs=1)
    assert first.time_remaining() is None
    again = Timer()
    fit(tmp_path, again, validate=False, ckpt_path=kept.best_model_path)
    assert again.time_elapsed() > 0.1
    before = again.time_elapsed()
    time.sleep(0.02)
    assert again.time_elapsed() == before


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_a_run_whose_time_is_over_takes_no_step_when_it_is_started_again(tmp_path, interval):
    steps = []
    for _ in range(3):
        timer = Timer(timedelta(seconds=0.05), interval, verbose=False)
        kept = ModelCheckpoint(tmp_path / "c", every_n_train_steps=1, save_last=True)
        flags = {"validate": False, "max_epochs": 9, "ckpt_path": "auto"}
        steps.append(fit(tmp_path, timer, kept, task=Tiny(pause=0.02), **flags).global_step)
    assert steps[0] < 45
    assert steps == [steps[0]] * 3


def test_a_timer_that_looks_when_epochs_end_lets_a_resumed_one_end(tmp_path):
    kept = ModelCheckpoint(tmp_path / "c", every_n_train_steps=3)
    fit(tmp_path, Timer(), kept, task=Tiny(pause=0.01), validate=False, max_steps=3)
    timer = Timer(timedelta(seconds=0.01), "epoch", verbose=False)
    assert fit(tmp_path, timer, validate=False, max_epochs=9, ckpt_path=kept.best_model_path).global_step == 5


def test_the_time_until_an_error_counts_and_no_time_after_it(tmp_path):
    class Fails(Callback):
        def on_step_end(self, trainer, task):
            if trainer.global_step == 3:
                raise RuntimeError("planned")

    timer = Timer()
    with pytest.raises(RuntimeError, match="planned"):
        fit(tmp_path, timer, Fails(), task=Tiny(pause=0.03), validate=False)
    spent = timer.time_elapsed()
    assert 0.09 <= spent == timer.time_elapsed()  # it stands
    fit(tmp_path, timer, task=Tiny(pause=0.03), validate=False, max_steps=1)
    assert timer.time_elapsed() >= spent + 0.03


class Late(Timer):
    """Its clock runs ahead on rank 1."""

    def time_elapsed(self):
        return super().time_elapsed() + (100 if self.ahead else 0)


def two_clocks(root):
    timer = Late(timedelta(seconds=50))
    made = trainer(root, timer)
    timer.ahead = made.global_rank == 1
    made.fit(Tiny(), loader(20))
    return made.global_step


def test_two_processes_stop_after_the_same_step(tmp_path):
    first, second = run(two_clocks, 2, str(tmp_path))
    assert first == second <= 2


# -- LambdaCallback, and the base ----------------------------------------------------------------------------------


def test_functions_as_a_callback(tmp_path):
    seen = []
    made = LambdaCallback(
        setup=lambda trainer, task, stage: seen.append(stage), on_step_end=lambda t, _: seen.append(t.global_step)
    )
    fit(tmp_path, made, max_epochs=1)
    assert seen == ["fit", 1, 2, 3, 4, 5]
    with pytest.raises(TypeError, match=r"'on_train_epoch_ends' is not a hook. Did you mean 'on_train_epoch_end'"):
        LambdaCallback(on_train_epoch_ends=print)
    with pytest.raises(TypeError, match="must be a function"):
        LambdaCallback(on_fit_end=3)
    assert vars(LambdaCallback(setup=None, on_fit_end=print)) == {"on_fit_end": print}  # Lightning's default is None


class Named(Callback):
    """Says when it is called."""

    def __init__(self, name, seen, after=0):
        self.name, self.seen, self.after_task = name, seen, after

    def on_train_epoch_end(self, trainer, pl_module):
        self.seen.append(self.name)


def test_order(tmp_path):
    seen = []

    class Says(Tiny):
        def on_train_epoch_end(self):
            seen.append("task")

    callbacks = [Named("late", seen, 2), Named("a", seen), Named("soon", seen, 1), Named("b", seen)]
    fit(tmp_path, *callbacks, task=Says(), max_epochs=1)
    assert seen == ["a", "b", "task", "soon", "late"]


class Stateful(Callback):
    def __init__(self, name=None):
        self.name, self.count = name, 0

    @property
    def state_key(self):
        return self.name or super().state_key

    def on_step_end(self, trainer, pl_module):
        self.count += 1

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state_dict):
        self.count = state_dict["count"]


def test_states_by_name(tmp_path):
    path = tmp_path / "x.ckpt"
    made = fit(tmp_path, Stateful("one"), Stateful(), max_epochs=1)
    made.save_checkpoint(path)
    one, other = Stateful("one"), Stateful()
    fit(tmp_path, other, one, ckpt_path=path)
    assert (one.count, other.count) == (10, 10)
    with pytest.raises(ValueError, match=r"two callbacks.*'Stateful'"):
        fit(tmp_path, Stateful(), Stateful(), ModelCheckpoint(tmp_path / "c"))


def test_loggers_are_told_of_checkpoints(tmp_path):
    rows = Rows()
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1)
    fit(tmp_path, saver, logger=rows, max_epochs=2)
    assert [os.path.basename(path) for path in rows.saved] == ["epoch=0-step=4.ckpt", "epoch=1-step=8.ckpt"]


def test_the_list_of_hooks():
    named = {name for name in vars(Callback) if name.startswith("on_")} | {"setup", "teardown"}
    assert set(HOOKS) == named
    assert all(getattr(Callback, name).__doc__ for name in HOOKS)
    assert all(name in fit_loop.__doc__ for name in HOOKS)


def test_no_time_stops_at_once(tmp_path):
    made = fit(tmp_path, Timer(timedelta(0)))
    assert (made.global_step, made.current_epoch) == (0, 0)
