"""The search for a batch size: which sizes are tried, where the result goes, and memory that runs out."""

import math

import pytest
import torch
from support.processes import run
from support.searched_runs import QUIET_ON_CPU, Data, Task, Unbuilt, dataset
from torch.utils.data import DataLoader, TensorDataset
from treadle.callbacks import BatchSizeFinder

import treadle
from treadle.data import BudgetBatchSampler
from treadle.tuner import Tuner


@pytest.mark.parametrize(
    ("settings", "most", "data", "tried", "expected"),
    [
        pytest.param({}, 10, 1000, [2, 4, 8, 16], 8, id="power"),
        pytest.param({"init_val": 64}, 10, 1000, [64, 32, 16, 8], 8, id="power-down"),
        pytest.param({"init_val": 3, "max_trials": 2}, 99, 1000, [3, 6], 6, id="trials"),
        pytest.param({"max_val": 20}, 99, 1000, [2, 4, 8, 16, 20], 20, id="max_val"),
        pytest.param({}, 99, 12, [2, 4, 8, 12], 12, id="data"),
        pytest.param({"init_val": 32}, 99, 12, [32], 12, id="data-at-once"),
        pytest.param({"mode": "binsearch", "margin": 0.0}, 11, 1000, [2, 4, 8, 16, 12, 10, 11], 11, id="binsearch"),
        pytest.param({"mode": "binsearch", "margin": 0.2}, 11, 1000, [2, 4, 8, 16, 12, 10, 11], 8, id="margin"),
        pytest.param({"mode": "binsearch", "margin": 0.2}, 99, 12, [2, 4, 8, 12], 12, id="no-margin-without-an-end"),
        pytest.param({"mode": "binsearch", "init_val": 9, "margin": 0}, 3, 99, [9, 4, 2, 3], 3, id="binsearch-down"),
    ],
)
def test_which_sizes_are_tried(settings, most, data, tried, expected):
    sizes = []

    def fits(size):
        sizes.append(size)
        return None if size > most else data

    finder = BatchSizeFinder(**settings)
    assert finder.search(fits, finder.max_val or 8192) == expected
    assert sizes == tried


def test_a_data_module_gets_its_batch_size_and_the_global_batch_stays():
    data, task = Data(batch_size=12), Task(fits=10)
    task.val_dataloader = list
    del task.hparams["batch_size"], task.batch_size
    trainer = treadle.Trainer(**QUIET_ON_CPU, max_epochs=1, accumulate_grad_batches=2, limit_val_batches=0)
    size = Tuner(trainer).scale_batch_size(task, datamodule=data, keep_global_batch=True, mode="binsearch", margin=0)
    assert (size, trainer.accumulate_grad_batches) == (8, 3)  # 10 would fit, and does not divide 24
    trainer.fit(task, data)
    assert data.hparams.batch_size == 8
    assert task.sizes == [8, 8, 8, 8]
    assert trainer.global_step == 2


@pytest.mark.parametrize(
    ("longest", "settings", "fits", "budget"),
    [
        pytest.param(30, {}, 1000, 960, id="doubled"),
        # 1,019 allows 33 of the long samples, which cost 990.
        pytest.param(30, {"mode": "binsearch", "margin": 0}, 1000, 1019, id="binsearch"),
        pytest.param(30, {"max_val": 500}, 1000, 500, id="max_val"),
        pytest.param(30, {"init_val": 800}, 100, 100, id="down"),
        pytest.param(30, {}, 10**6, 20 * 30, id="all"),
    ],
)
def test_a_budget_is_scaled_from_the_largest_sample_to_all_samples(longest, settings, fits, budget):
    class Budgeted(Task):
        def train_dataloader(self):
            lengths = [1 + (longest - 1) * (number % 2) for number in range(20 if fits == 10**6 else 4000)]
            self.built = [*getattr(self, "built", []), self.batch_size]
            rows = TensorDataset(torch.randn(len(lengths), 3), torch.randn(len(lengths), 1), torch.tensor(lengths))
            return DataLoader(rows, batch_sampler=BudgetBatchSampler(lengths, self.batch_size))

        def training_step(self, batch, index):
            *batch, lengths = batch
            if len(lengths) * lengths.max() > self.fits:
                raise MemoryError("no room")
            return (self.net[0](batch[0]) - batch[1]).pow(2).mean()

        val_dataloader = None

    task = Budgeted(fits=fits)
    trainer = treadle.Trainer(**QUIET_ON_CPU, max_epochs=1, limit_val_batches=0, limit_train_batches=1)
    assert Tuner(trainer).scale_batch_size(task, **settings) == task.batch_size == budget
    trainer.fit(task)


@pytest.mark.parametrize("method", ["validate", "test", "predict"])
def test_sizes_for_evaluation(method):
    class Evaluated(Task):
        def validation_step(self, batch, index=0):
            if len(batch[0]) > 10:
                raise MemoryError
            self.log("n", float(len(batch[0])))

        test_step = validation_step

        def predict_step(self, batch, index):
            return self.validation_step(batch, index)

        test_dataloader = predict_dataloader = Task.val_dataloader

    task, trainer = Evaluated(), treadle.Trainer(**QUIET_ON_CPU, max_epochs=1)
    kind = {"validate": "val"}.get(method, method)
    assert Tuner(trainer).scale_batch_size(task, method=method) == 8
    assert task.batch_size == task.hparams["batch_size"] == 8
    task.batch_size = 4
    trainer = treadle.Trainer(**QUIET_ON_CPU, max_epochs=1, callbacks=[BatchSizeFinder()])
    getattr(trainer, method)(task)
    assert task.batch_size == 8
    with pytest.raises(ValueError, match=f"{kind}_dataloader\\(\\) with batch_size=self.batch_size"):
        getattr(trainer, method)(task, DataLoader(dataset(), 4))


def sizes_on_two(kind, strategy, fits, only_on):
    treadle.seed_everything(0)
    task = kind()
    task.fits, task.only_on = fits, only_on
    finder = BatchSizeFinder(max_trials=5, keep_global_batch=True)
    trainer = treadle.Trainer(**QUIET_ON_CPU, max_epochs=1, devices=2, strategy=strategy, callbacks=[finder])
    task.batch_size = 16
    trainer.fit(task)
    return task.batch_size, trainer.accumulate_grad_batches, trainer.global_step, task.losses


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "strategy", "fits", "only_on"),
    [
        pytest.param(Task, "ddp", 5, 1, id="ddp-one-rank"),
        pytest.param(Unbuilt, "fsdp", 5, 1, id="fsdp-unbuilt-one-rank", marks=pytest.mark.exhaustive),
        pytest.param(Task, "fsdp", 5, None, id="fsdp-all", marks=pytest.mark.slow),
    ],
)
def test_memory_runs_out_on_two_processes(kind, strategy, fits, only_on):
    first, second = run(sizes_on_two, 2, kind, strategy, fits, only_on, timeout=60)
    assert first[:3] == second[:3] == (4, 4, 1)
    assert all(map(math.isfinite, first[3] + second[3]))
