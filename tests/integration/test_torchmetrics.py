"""Tasks with torchmetrics objects, in the shapes that the library's own tests of its Lightning integration use."""

import statistics
from unittest import mock

import pytest
import torch
from support.trainers import make_trainer
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanSquaredError, MetricCollection, SumMetric
from torchmetrics.classification import BinaryAccuracy, BinaryAveragePrecision
from torchmetrics.wrappers import MultitaskWrapper
from treadle.loggers import CSVLogger

import treadle

pytestmark = pytest.mark.filterwarnings("ignore:configure_optimizers returned a dict", "ignore:No positive samples")


class Boring(treadle.TaskModule):
    """Loaders are static methods; the optimizer's dict has a key that nobody reads; old hooks are there."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 2)

    def forward(self, x):
        return self.layer(x)

    def step(self, x):
        return (self(x) - 1).square().mean()

    def training_step(self, batch, batch_idx):
        return {"loss": self.step(batch)}

    def validation_step(self, batch, batch_idx):
        return {"x": self.step(batch)}

    def on_training_epoch_end(self, outputs):
        raise AssertionError("called after all")

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.1)
        return {"optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}

    @staticmethod
    def train_dataloader():
        return DataLoader(torch.randn(16, 8), batch_size=2)

    val_dataloader = test_dataloader = train_dataloader


class Negated(SumMetric):
    def update(self, value):
        super().update(-value)


class RowsInMemory(CSVLogger):
    """Writes nothing, so that the rows stay in `experiment.metrics`."""

    def save(self):
        pass


def fit(task, **flags):
    limits = {"limit_train_batches": 2, "limit_val_batches": 2, "limit_test_batches": 2}
    run = make_trainer(**{"max_epochs": 2, "log_every_n_steps": 1, **limits, **flags})
    run.fit(task)
    return run


def test_a_metric_that_is_not_logged_is_the_users_to_reset():
    class Task(Boring):
        def __init__(self):
            super().__init__()
            self.metric, self.sum, self.epochs = SumMetric(), 0.0, 0

        def training_step(self, batch, batch_idx):
            self.metric(batch.sum())
            self.sum += batch.sum()
            return self.step(batch)

        def on_train_epoch_end(self):
            assert torch.allclose(self.sum, self.metric.compute())
            self.sum, self.epochs = 0.0, self.epochs + 1
            self.metric.reset()

    task = Task()
    task.val_dataloader = None
    fit(task)
    assert task.epochs == 2


def counted_reset(metric):
    metric.reset = mock.Mock(side_effect=metric.reset)
    return metric


@pytest.mark.parametrize("options", [{}, {"on_step": True, "on_epoch": False}], ids=["default", "steps only"])
def test_logged_metrics_are_reset_once_after_each_epoch(options):
    class Task(Boring):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 1)
            for stage in ("train", "val", "test"):
                self.add_module(f"acc_{stage}", counted_reset(BinaryAccuracy()))
                self.add_module(f"ap_{stage}", counted_reset(BinaryAveragePrecision()))

        def metrics(self, stage):
            return [self._modules[f"{name}_{stage}"] for name in ("acc", "ap")]

        def work(self, stage, batch):
            labels = (batch.sum(1) > 0).float()
            logits = self(batch).flatten()
            for metric, name in zip(self.metrics(stage), ("acc", "ap"), strict=True):
                metric(logits.detach().sigmoid(), labels.long())
                metric.reset.reset_mock()  # a metric's forward calls it
                self.log(f"{stage}/{name}", metric, **options)
            return nn.functional.binary_cross_entropy_with_logits(logits, labels)

        def training_step(self, batch, batch_idx):
            return self.work("train", batch)

        def validation_step(self, batch, batch_idx):
            return self.work("val", batch)

        def test_step(self, batch, batch_idx):
            return self.work("test", batch)

        def assert_not_reset(self, stage):
            for metric in self.metrics(stage):
                metric.reset.assert_not_called()

        def on_train_epoch_end(self):
            self.assert_not_reset("train")

        def on_validation_epoch_end(self):
            self.assert_not_reset("val")

        def on_test_epoch_end(self):
            self.assert_not_reset("test")

    def assert_reset_once(stage):
        for metric in task.metrics(stage):
            metric.reset.assert_called_once()
            metric.reset.reset_mock()

    task = Task()
    run = fit(task, max_epochs=1, num_sanity_val_steps=0)
    assert_reset_once("train")
    assert_reset_once("val")
    run.validate(task, verbose=False)
    assert_reset_once("val")
    run.test(task, verbose=False)
    assert_reset_once("test")


def test_logged_objects_and_the_rows_of_the_logger(tmp_path):
    class Task(Boring):
        def __init__(self):
            super().__init__()
            self.of_steps, self.of_epochs, self.of_both = SumMetric(), SumMetric(), SumMetric()
            self.sums = []

        def training_step(self, batch, batch_idx):
            self.sums.append(batch.sum().item())
            for metric in (self.of_steps, self.of_epochs, self.of_both):
                metric(batch.sum())
            self.log("of_steps", self.of_steps, on_step=True, on_epoch=False)
            self.log("of_epochs", self.of_epochs, on_step=False, on_epoch=True)
            self.log("both", self.of_both, on_step=True, on_epoch=True)
            return self.step(batch)

    task = Task()
    logger = RowsInMemory(tmp_path)
    run = fit(task, limit_val_batches=0, logger=logger)
    rows = [row for row in logger.experiment.metrics if row["epoch"] == 1]
    first, second = task.sums[2:]
    assert [row.get("of_steps") for row in rows] == [first, second, None]
    assert [row.get("both_step") for row in rows] == [first, second, None]
    assert rows[-1]["of_epochs"] == rows[-1]["both_epoch"] == pytest.approx(first + second, abs=1e-5)
    assert run.logged_metrics["both_epoch"] == pytest.approx(first + second, abs=1e-5)
    assert not any(metric.update_called for metric in (task.of_steps, task.of_epochs, task.of_both))


def feed_sum(metric, batch):
    return metric(batch.sum())


def feed_tasks(metric, batch):
    guess, truth = torch.rand(8), torch.randint(0, 2, (8,))
    return metric({"class": guess, "value": guess}, {"class": truth, "value": truth.float()})


@pytest.mark.parametrize(
    ("make", "feed", "whole"),
    [
        (lambda: MetricCollection([SumMetric(), Negated()]), feed_sum, sum),
        (
            lambda: MultitaskWrapper({"class": BinaryAccuracy(), "value": MeanSquaredError()}),
            feed_tasks,
            statistics.fmean,
        ),
    ],
    ids=["collection", "multitask wrapper"],
)
def test_values_of_several_metrics(make, feed, whole, tmp_path):
    """Those of an epoch are made of those of its steps, by what the metrics are."""

    class Task(Boring):
        def __init__(self):
            super().__init__()
            self.metric = make()

        def training_step(self, batch, batch_idx):
            self.log_dict({f"{name}_step": value for name, value in feed(self.metric, batch).items()})
            return self.step(batch)

        def on_train_epoch_end(self):
            self.log_dict({f"{name}_epoch": value for name, value in self.metric.compute().items()})
            self.metric.reset()

    logger = RowsInMemory(tmp_path)
    fit(Task(), limit_val_batches=0, logger=logger)
    rows = [row for row in logger.experiment.metrics if row["epoch"] == 1]
    names = [name.removesuffix("_step") for name in rows[0] if name.endswith("_step")]
    assert len(names) == 2
    for name in names:
        assert rows[2][f"{name}_epoch"] == pytest.approx(whole(row[f"{name}_step"] for row in rows[:2]), abs=1e-5)


@pytest.mark.filterwarnings("ignore:to_torchscript")
def test_a_task_with_a_metric_is_scripted():
    class Task(Boring):
        def __init__(self):
            super().__init__()
            self.metric = SumMetric()
            self.register_buffer("sum", torch.tensor(0.0))

        def training_step(self, batch, batch_idx):
            self.metric(batch.sum())
            self.sum += batch.sum()
            self.log("sum", self.metric, on_epoch=True, on_step=False)
            return self.step(batch)

    task = Task()
    fit(task, max_epochs=1)
    x = torch.randn(4, 8)
    assert torch.allclose(task(x), task.to_torchscript()(x))
