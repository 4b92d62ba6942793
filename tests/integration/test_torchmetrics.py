"""Tasks with torchmetrics objects, in the shapes that the library's own tests of its Lightning integration use."""

import pytest
import torch
from support.callback_runs import Rows
from support.trainers import make_trainer
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import SumMetric

import treadle

pytestmark = pytest.mark.filterwarnings("ignore:configure_optimizers returned a dict", "ignore:to_torchscript")


class Boring(treadle.TaskModule):
    """Loaders are static methods; the optimizer's dict has a key that nobody reads; old hooks are there."""

    def __init__(self, *metrics):
        super().__init__()
        self.layer, self.sums = nn.Linear(8, 2), []
        for name in metrics:
            self.add_module(name, SumMetric())

    def forward(self, x):
        return self.layer(x)

    def training_step(self, batch, batch_idx):
        self.sums.append(batch.sum().item())
        self.count(batch.sum())
        return {"loss": (self(batch) - 1).square().mean()}

    def on_training_epoch_end(self, outputs):
        raise AssertionError("called after all")

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.1)
        return {"optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}

    @staticmethod
    def train_dataloader():
        return DataLoader(torch.randn(4, 8), batch_size=2)

    test_dataloader = train_dataloader


def test_a_metric_that_is_not_logged_is_the_users_to_reset():
    class Task(Boring):
        def count(self, value):
            self.metric(value)

        def on_train_epoch_end(self):
            assert self.metric.compute().item() == pytest.approx(sum(self.sums[-2:]), abs=1e-5)
            self.metric.reset()

    task = Task("metric")
    make_trainer(max_epochs=2).fit(task)
    assert len(task.sums) == 4


def test_logged_objects_and_the_rows_of_the_logger():
    class Task(Boring):
        def count(self, value):
            for metric in (self.of_steps, self.of_epochs, self.both):
                metric(value)
            self.log("of_steps", self.of_steps, on_step=True, on_epoch=False)
            self.log("of_epochs", self.of_epochs, on_step=False, on_epoch=True)
            self.log("both", self.both, on_step=True, on_epoch=True)

        def test_step(self, batch, batch_idx):
            self.tested(batch.sum())
            self.log("tested", self.tested)

        def on_test_epoch_end(self):
            assert self.tested.update_count == 2

    task, logger = Task("of_steps", "of_epochs", "both", "tested"), Rows()
    run = make_trainer(max_epochs=2, log_every_n_steps=1, logger=logger)
    run.fit(task)
    rows = [row for _, row in logger.rows if row["epoch"] == 1]
    first, second = task.sums[2:]
    assert [row.get("of_steps") for row in rows] == [first, second, None]
    assert [row.get("both_step") for row in rows] == [first, second, None]
    assert rows[-1]["of_epochs"] == rows[-1]["both_epoch"] == pytest.approx(first + second, abs=1e-5)
    assert run.logged_metrics["both_epoch"] == pytest.approx(first + second, abs=1e-5)
    run.test(task, verbose=False)
    assert not any(metric.update_called for metric in (task.of_steps, task.of_epochs, task.both, task.tested))


def test_a_task_with_a_metric_is_scripted():
    class Task(Boring):
        def count(self, value):
            self.log("sum", self.metric, on_epoch=True, on_step=False)
            self.metric(value)

    task = Task("metric")
    make_trainer(max_epochs=1).fit(task)
    x = torch.randn(4, 8)
    assert torch.allclose(task(x), task.to_torchscript()(x))
