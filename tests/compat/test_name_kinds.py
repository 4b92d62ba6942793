"""Names that the peers use for two things lead to the right one, and kinds of names are those of the peers."""

import importlib
import typing

import pytest
import torch
from support.trainers import NO_OUTPUT
from torch import nn
from treadle.callbacks import Callback
from treadle.compat.utilities.seed import isolate_rng
from treadle.compat.utilities.types import OptimizerConfig, OptimizerLRSchedulerConfig

import treadle

# Classes of one name in Lightning 2.6.6: where it is a callback of the Trainer, and where it is something else.
CALLBACKS = {
    "ModelSummary": (
        ["callbacks", "callbacks.model_summary"],
        ["utilities.model_summary", "utilities.model_summary.model_summary"],
    ),
    "ThroughputMonitor": (
        ["callbacks", "callbacks.throughput_monitor"],
        ["fabric.utilities", "fabric.utilities.throughput"],
    ),
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_a_name_of_two_things(name) -> None:
    callbacks, others = CALLBACKS[name]
    for paths, is_callback in ((callbacks, True), (others, False)):
        for path in paths:
            kind = getattr(importlib.import_module(f"treadle.compat.{path}"), name)
            assert isinstance(kind, type)
            assert issubclass(kind, Callback) is is_callback, path


def test_types_of_configure_optimizers_can_be_called() -> None:
    class Task(treadle.TaskModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(1, 1)

        def training_step(self, batch, batch_idx):
            return self.net(batch).sum()

        def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
            optimizer = torch.optim.SGD(self.parameters(), 1.0)
            assert OptimizerConfig(optimizer=optimizer) == {"optimizer": optimizer}
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            return OptimizerLRSchedulerConfig(optimizer=optimizer, lr_scheduler={"scheduler": schedule})

    assert typing.is_typeddict(OptimizerLRSchedulerConfig)
    task = Task()
    trainer = treadle.Trainer(max_epochs=1, accelerator="cpu", **NO_OUTPUT)
    trainer.fit(task, torch.utils.data.DataLoader(torch.ones(1, 1)))
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1)


def test_isolated_random_numbers() -> None:
    torch.manual_seed(0)
    with isolate_rng(include_cuda=False):
        inside = torch.rand(1)
    assert torch.equal(torch.rand(1), inside)
