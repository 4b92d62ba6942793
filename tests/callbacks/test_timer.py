"""`Timer`: what it measures, over resumed runs too, and that all processes stop after the same step."""

from datetime import timedelta

import pytest
from support.callback_runs import Tiny, fit, loader
from support.failing_runs import Fails
from treadle.callbacks import ModelCheckpoint, Timer
from treadle.callbacks.prediction_writer import WriteInterval
from treadle.callbacks.timer import Interval


def test_a_timer_stops_the_run(tmp_path):
    timer = Timer(timedelta(seconds=0.2))
    made = fit(tmp_path, timer, task=Tiny(pause=0.02), samples=1000, validate=False)
    assert 2 <= made.global_step <= 15
    assert timer.time_remaining() == 0
    timer = Timer(timedelta(seconds=0.01), interval="epoch", verbose=False)
    assert fit(tmp_path, timer, task=Tiny(pause=0.01), validate=False, max_epochs=9).global_step == 5


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
    timer = Timer()
    with pytest.raises(RuntimeError, match="planned"):
        fit(tmp_path, timer, Fails("step_end", 3), task=Tiny(pause=0.03), validate=False)
    spent = timer.time_elapsed()
    assert timer.time_remaining() is None
    assert 0.09 <= spent == timer.time_elapsed()  # it stands
    fit(tmp_path, timer, task=Tiny(pause=0.03), validate=False, max_steps=1)
    assert timer.time_elapsed() >= spent + 0.03


def test_no_time_stops_at_once(tmp_path):
    made = fit(tmp_path, Timer(timedelta(0)))
    assert (made.global_step, made.current_epoch) == (0, 0)


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


def test_words_of_intervals() -> None:
    assert (Interval.epoch, WriteInterval.BATCH_AND_EPOCH) == ("epoch", "batch_and_epoch")
    assert (WriteInterval("epoch").on_batch, WriteInterval("epoch").on_epoch) == (False, True)
    assert Timer(duration="00:00:01:00", interval=Interval.epoch).interval == "epoch"
