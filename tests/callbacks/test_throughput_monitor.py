"""`Throughput`, `ThroughputMonitor` and `measure_flops`, against counts by hand; and what the monitors cost a step."""

import time

import pytest
import torch
from support.callback_runs import Rows, Tiny, fit, loader, trainer
from support.processes import run
from torch.utils.data import DataLoader, TensorDataset
from treadle.callbacks import DeviceStatsMonitor, LearningRateMonitor, ModelCheckpoint, ThroughputMonitor


class Works(Tiny):
    """Its validation takes as long as 20 steps."""

    flops_per_batch = 500.0

    def validation_step(self, batch, batch_idx):
        time.sleep(0.1)


def rows_of(rows, name):
    return [(step, row) for step, row in rows.rows if name in row]


def test_a_run_is_measured(tmp_path):
    rows = Rows()
    monitor = ThroughputMonitor(length_fn=lambda batch: batch[0].numel(), window_size=4, available_flops=1e6)
    # The last batch has one sample.
    fit(tmp_path, monitor, task=Works([1.0], 0.01), logger=rows, log_every_n_steps=2, samples=9)
    found = rows_of(rows, "train/time")
    assert [step for step, _ in found] == [2, 4, 6, 8, 10]
    assert [row["train/batches"] for _, row in found] == [2, 4, 6, 8, 10]
    assert [row["train/samples"] for _, row in found] == [4, 8, 11, 15, 18]
    assert [row["train/lengths"] for _, row in found] == [8, 16, 22, 30, 36]
    assert "train/device/samples_per_sec" not in found[0][1]
    for (_, first), (_, last) in zip([({}, {"train/time": 0.0, "train/samples": 0}), *found], found[1:], strict=False):
        seconds = last["train/time"] - first["train/time"]
        assert last["train/device/samples_per_sec"] == pytest.approx(
            (last["train/samples"] - first["train/samples"]) / seconds, rel=0.01
        )
        assert last["train/device/batches_per_sec"] == pytest.approx(4 / seconds, rel=0.01)
        assert last["train/device/flops_per_sec"] == pytest.approx(4 * 500 / seconds, rel=0.01)
        assert last["train/device/mfu"] == pytest.approx(4 * 500 / seconds / 1e6, rel=0.01)
        assert "train/samples_per_sec" not in last
    assert 0.1 < found[-1][1]["train/time"] < 0.35  # 10 steps of 0.01, and not the 0.4 of two validations
    for step, row in rows_of(rows, "validate/time"):
        assert step in (5, 10)
        assert (row["validate/batches"], row["validate/samples"], row["validate/lengths"]) == (2, 4, 8)
        assert row["validate/device/samples_per_sec"] == pytest.approx(4 / row["validate/time"])
        assert 0.2 <= row["validate/time"] < 0.5


def test_without_a_function_and_without_a_logger(tmp_path):
    made = fit(tmp_path, ThroughputMonitor(window_size=2), log_every_n_steps=5, accumulate_grad_batches=2, max_epochs=4)
    assert made.progress.step == 12
    assert made.logged_metrics["train/samples"] == 34  # at step 10, the first one of the fourth epoch
    assert made.logged_metrics["train/batches"] == 17
    assert "train/device/flops_per_sec" not in made.logged_metrics


def test_test_and_predict_are_measured(tmp_path):
    class Predicts(Tiny):
        def predict_step(self, batch, batch_idx):
            return batch[0]

    rows = Rows()
    made = trainer(tmp_path, ThroughputMonitor(), logger=rows)
    made.test(Predicts(), loader(7), verbose=False)
    made.predict(Predicts(), loader(5))
    assert rows_of(rows, "test/time")[0][1]["test/samples"] == 7
    assert rows_of(rows, "predict/time")[0][1]["predict/device/samples_per_sec"] > 0


def test_it_goes_on_counting_where_a_run_goes_on(tmp_path):
    saver = ModelCheckpoint(tmp_path / "c", every_n_train_steps=4, save_top_k=-1)
    make = lambda: ThroughputMonitor(lambda batch: len(batch[0]), lambda batch: batch[0].numel(), window_size=2)  # noqa: E731
    first, second = Rows(), Rows()
    fit(tmp_path, make(), saver, logger=first, log_every_n_steps=2, max_steps=6)
    fit(tmp_path, make(), logger=second, log_every_n_steps=2, ckpt_path=tmp_path / "c" / "epoch=0-step=4.ckpt")
    before, after = rows_of(first, "train/time"), rows_of(second, "train/time")
    counts = [(step, row["train/samples"], row["train/lengths"]) for step, row in after]
    assert counts == [(6, 12, 24), (8, 16, 32), (10, 20, 40)]
    assert after[0][1]["train/time"] > before[1][1]["train/time"]


def test_arguments(tmp_path):
    with pytest.raises(TypeError, match="batch_size_fn=3"):
        ThroughputMonitor(3)
    with pytest.raises(ValueError, match="log_every_n_steps"):
        fit(tmp_path, ThroughputMonitor(), log_every_n_steps=0)
    with pytest.raises(ValueError, match="flops_per_batch"):
        fit(tmp_path, ThroughputMonitor(available_flops=1e12))


def uneven(root):
    """Train twice: the second time, rank 1 cannot count its items."""
    return [count_items(root, fails) for fails in (False, True)]


def count_items(root, fails):
    """Rank 1's samples have more items than rank 0's."""
    rows = Rows()

    def items(batch):
        if fails and made.global_rank == 1:
            raise KeyError("tokens")
        return float(batch[0].sum())

    made = trainer(
        root,
        ThroughputMonitor(length_fn=items, window_size=2),
        logger=rows,
        log_every_n_steps=2,
        max_epochs=1,
        strategy="ddp",
        devices=2,
    )
    data = torch.arange(1.0, 15.0).reshape(7, 2)  # the last global batch has three samples
    made.fit(Tiny(), DataLoader(TensorDataset(data), 1))
    return made.global_step, rows.rows


def test_two_processes_are_counted_together(tmp_path):
    (first, first_off), (second, second_off) = run(uneven, 2, str(tmp_path))
    assert first[0] == second[0] == first_off[0] == second_off[0] == 4
    assert not any("train/time" in row for _, row in second[1])
    found = [row for _, row in first[1] if "train/time" in row]
    assert [row["train/samples"] for row in found] == [2, 3.5]
    assert [row["train/lengths"] for row in found] == [sum(range(1, 9)) / 2, sum(range(1, 15)) / 2]
    assert [row["train/batches"] for row in found] == [2, 4]
    last = found[-1]
    assert last["train/samples_per_sec"] == pytest.approx(2 * last["train/device/samples_per_sec"])
    assert not any("train/time" in row for _, row in first_off[1])  # one that cannot count turns it off on all


def test_they_cost_a_step_next_to_nothing(tmp_path):
    monitors = [ThroughputMonitor(), DeviceStatsMonitor(), LearningRateMonitor()]
    made = fit(tmp_path, *monitors, logger=Rows(), log_every_n_steps=1000)
    hooks = (made.hooks.on_train_batch_start, made.hooks.on_train_batch_end, made.hooks.on_step_end)
    arguments = ((None, 0), ({}, None, 0), ())
    calls = [(hook, given) for every, given in zip(hooks, arguments, strict=True) for hook in every]
    durations = []
    for _ in range(50):  # in one of which no other process had the core
        began = time.perf_counter()
        for _ in range(100):
            for hook, given in calls:
                hook(*given)
        durations.append(time.perf_counter() - began)
    assert min(durations) / 100 < 10e-6  # 2 µs on a free core
