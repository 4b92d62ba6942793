"""What public code reads of Lightning's loops and connectors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quiet import trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import treadle


def counts(progress: Any) -> list[int]:
    return [progress.ready, progress.started, progress.processed, progress.completed]


class Watched(treadle.TaskModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1)
        self.seen: list[Any] = []

    def note(self, moment: str) -> None:
        loop = self.trainer.fit_loop
        batches = loop.epoch_loop.batch_progress
        self.seen.append((moment, counts(loop.epoch_progress.current), counts(batches.current), counts(batches.total)))

    def on_train_epoch_start(self) -> None:
        self.note("epoch start")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.note("step")
        assert self.trainer.fit_loop.epoch_loop.batch_idx == batch_idx
        return self.net(batch[0]).mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self.trainer.fit_loop.epoch_loop._batches_that_stepped == self.global_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.validates = self.trainer.fit_loop.epoch_loop.val_loop._data_source.is_defined()
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.net(batch[0]).mean())
        assert self.trainer._logger_connector.callback_metrics is not None


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(2, 2)), batch_size=2)


def test_progress_is_lightnings() -> None:
    task = Watched()
    run = trainer(max_epochs=2, num_sanity_val_steps=0)
    run.fit(task, loader())
    assert not task.validates
    assert task.seen == [
        ("epoch start", [1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]),
        ("step", [1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0]),
        ("epoch start", [2, 2, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1]),
        ("step", [2, 2, 1, 1], [1, 1, 0, 0], [2, 2, 1, 1]),
    ]
    assert counts(run.fit_loop.epoch_progress.current) == [2, 2, 2, 2]


def test_a_raised_limit_goes_on_with_the_run() -> None:
    task, run = Watched(), trainer(max_epochs=1)
    run.fit(task, loader(), loader())
    assert task.validates
    run.fit_loop.max_epochs = run.fit_loop.epoch_progress.current.ready + 2
    run.fit(task, loader(), loader())
    assert (run.max_epochs, run.current_epoch, run.global_step) == (3, 3, 3)


def test_what_is_not_there() -> None:
    with pytest.raises(AttributeError, match=r"no 'advance'.*instead"):
        trainer().fit_loop.advance()
    with pytest.raises(AttributeError, match=r"epoch_loop can't be set.*instead"):
        trainer().fit_loop.epoch_loop = None


def test_the_devices_before_a_run() -> None:
    assert trainer()._accelerator_connector._parallel_devices == [torch.device("cpu")]


def test_lightnings_names_of_a_strategy() -> None:
    task, run = Watched(), trainer(max_epochs=1)
    assert (run.strategy.model, run.strategy.optimizers) == (None, [])
    run.fit(task, loader())
    strategy = run.strategy
    assert strategy.root_device == torch.device("cpu")
    assert (strategy.global_rank, strategy.local_rank, strategy.world_size, strategy.is_global_zero) == (0, 0, 1, True)
    assert strategy.model is run.model
    assert [type(optimizer) for optimizer in strategy.optimizers] == [torch.optim.SGD]
    strategy.barrier("here")
    assert strategy.broadcast({"a": 1}) == {"a": 1}
    assert strategy.reduce_boolean_decision(True)
    assert not strategy.reduce_boolean_decision(False, all=False)
