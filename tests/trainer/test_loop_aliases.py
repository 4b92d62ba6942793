"""What public code reads of Lightning's loops and connectors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models import Line, Scored, Stream, loader
from support.trainers import make_trainer
from torch.utils.data import DataLoader, TensorDataset
from treadle.engine.preemption import SLURMEnvironment

import treadle


def counts(progress: Any) -> list[int]:
    return [progress.ready, progress.started, progress.processed, progress.completed]


class Watched(Line):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def note(self, moment: str) -> None:
        loop = self.trainer.fit_loop
        batches = loop.epoch_loop.batch_progress
        self.seen.append((moment, counts(loop.epoch_progress.current), counts(batches.current), counts(batches.total)))

    def on_train_epoch_start(self) -> None:
        self.note("epoch start")

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.note("step")
        assert self.trainer.fit_loop.epoch_loop.batch_idx == batch_idx
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self.trainer.fit_loop.epoch_loop._batches_that_stepped == self.global_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.validates = self.trainer.fit_loop.epoch_loop.val_loop._data_source.is_defined()
        return super().configure_optimizers()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert self.trainer._logger_connector.callback_metrics is not None


def test_progress_is_lightnings() -> None:
    task = Watched()
    run = make_trainer(max_epochs=2, num_sanity_val_steps=0)
    run.fit(task, loader(2))
    assert not task.validates
    assert task.seen == [
        ("epoch start", [1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]),
        ("step", [1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0]),
        ("epoch start", [2, 2, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]),
        ("step", [2, 2, 1, 1], [1, 1, 0, 0], [2, 2, 1, 1]),
    ]
    assert counts(run.fit_loop.epoch_progress.current) == [2, 2, 2, 2]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("end", [None, -1, "stop"])
def test_the_indices_after_an_epoch_are_lightnings(end: Any, stream: bool) -> None:
    class Ends(Watched):
        def note(self, moment: str) -> None:
            loop = self.trainer.fit_loop
            batches = loop.epoch_loop.batch_progress
            if moment != "step" and loop.total_batch_idx >= 0:
                of_batches = [each for count in (batches.current, batches.total) for each in counts(count)[::3]]
                self.seen.append([loop.batch_idx, loop.total_batch_idx, *of_batches])

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if end == -1 and batch_idx == 3 else None

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.trainer.should_stop = end == "stop" and batch_idx == 2

        def on_train_epoch_end(self) -> None:
            self.note("epoch end")

        def on_train_end(self) -> None:
            self.note("end")

    task, run, samples = Ends(), make_trainer(max_epochs=2), TensorDataset(torch.ones(5, 2))
    run.fit(task, DataLoader(Stream(samples) if stream else samples))
    task.note("after")
    expected = {  # Lightning 2.6.6's numbers at the end and start of epochs, at the end of training and afterwards
        None: [[4, 4, 5, 5, 5, 5]] * 2 + [[4, 9, 5, 5, 10, 10]] * 3,
        -1: [[3, 3, 4, 3, 4, 3]] * 2 + [[3, 7, 4, 3, 8, 6]] * 3,
        "stop": [[2, 2, 3, 3, 3, 3]] * 3,
    }[end]
    assert task.seen == expected


def test_what_is_not_there() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'state_dict'.*instead"):
        make_trainer().fit_loop.state_dict()
    with pytest.raises(AttributeError, match=r"epoch_loop cannot be set.*instead"):
        make_trainer().fit_loop.epoch_loop = None


def test_the_cluster_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def environment(**flags: Any) -> Any:
        return make_trainer(**flags)._accelerator_connector.cluster_environment

    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    assert environment() is None
    for passed in (SLURMEnvironment(auto_requeue=False), treadle.strategies.LaunchEnvironment.read(variables)):
        assert environment(plugins=passed) is passed
        assert environment(plugins=[treadle.strategies.TorchSyncBatchNorm(), passed]) is passed
    monkeypatch.setattr(SLURMEnvironment, "detect", lambda: True)
    assert isinstance(environment(), SLURMEnvironment)


def test_the_indices_of_listed_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_trainer()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    world = run.accelerator.world
    for devices, size, rank, index, expected in (
        ("2,3", 2, 1, 3, [2, 3]),
        (2, 2, 1, 1, [0, 1]),
        ([2, 3], 2, 1, 0, [0, 1]),  # SLURM shows each task only its own GPU
        ([3], 1, 0, 3, [3]),
    ):
        run.changed_flags["devices"] = devices
        for name, value in (("local_size", size), ("local_rank", rank), ("device", torch.device("cuda", index))):
            object.__setattr__(world, name, value)
        assert run.device_ids == expected
        assert run._accelerator_connector._parallel_devices == [torch.device("cuda", number) for number in expected]


def test_lightnings_names_of_a_strategy() -> None:
    task, run = Watched(), make_trainer()
    assert (run.strategy.model, run.strategy.optimizers) == (None, [])
    assert run._accelerator_connector._parallel_devices == [torch.device("cpu")]
    run.fit(task, loader(2), loader(2))
    assert task.validates
    strategy = run.strategy
    assert strategy.root_device == torch.device("cpu")
    assert (strategy.global_rank, strategy.local_rank, strategy.world_size, strategy.is_global_zero) == (0, 0, 1, True)
    assert strategy.model is run.model
    assert [type(optimizer) for optimizer in strategy.optimizers] == [torch.optim.SGD]
    strategy.barrier("here")
    assert strategy.broadcast({"a": 1}) == {"a": 1}
    assert strategy.reduce_boolean_decision(True)
    assert not strategy.reduce_boolean_decision(False, all=False)


class Scheduled(Watched):
    """Sizes its schedule by the training loader, as it is looked up in three ways."""

    def configure_optimizers(self) -> Any:
        run = self.trainer
        run.fit_loop.setup_data()
        source = run._data_connector._train_dataloader_source
        loaders = [run.train_dataloader, source.dataloader(), run.fit_loop._data_source.dataloader()]
        self.lengths = [len(each) for each in (*loaders, *run.fit_loop._combined_loader.flattened)]
        return super().configure_optimizers()

    def note(self, moment: str) -> None:
        loop = self.trainer.fit_loop
        if moment == "step":
            self.seen.append([
                loop.batch_idx, loop.total_batch_idx, loop._should_accumulate(),
                loop.epoch_loop.batch_progress.is_last_batch, self.trainer._logger_connector.should_update_logs,
            ])  # fmt: skip


def test_where_a_step_stands() -> None:
    task, run = Scheduled(), make_trainer(max_epochs=2, accumulate_grad_batches=2, log_every_n_steps=2)
    run.fit(task, loader(3, 1))
    assert task.lengths == [3, 3, 3, 3]
    assert task.seen == [
        [0, 0, True, False, False],
        [1, 1, False, False, False],
        [2, 2, False, True, True],  # the last group is shorter
        [0, 3, True, False, False],
        [1, 4, False, False, False],
        [2, 5, False, True, True],
    ]


def test_limits_and_modes_that_are_set_hold() -> None:
    run = make_trainer()
    run.fit_loop.epoch_loop.max_steps = 7
    run.test_loop.inference_mode = False
    assert (run.max_steps, run.inference_mode, run.fit_loop._combined_loader) == (7, False, None)
    with pytest.raises(AttributeError, match=r"epoch_loop\._batches_that_stepped cannot be set"):
        run.fit_loop.epoch_loop._batches_that_stepped = 5
    with pytest.raises(AttributeError, match=r"trainer\.predict_loop has no attribute 'predictions'"):
        _ = run.predict_loop.predictions


def test_loaders_of_an_evaluation() -> None:
    class Asks(treadle.Callback):
        def on_test_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.test_loop.setup_data()
            self.seen = trainer.test_loop.max_batches, len(trainer.test_loop._data_source.dataloader())
            moved = trainer.strategy.batch_to_device([torch.ones(1)], torch.device("cpu"))
            self.moved = moved[0].device.type

    asks = Asks()
    make_trainer(callbacks=[asks]).test(Scored(), loader(2), verbose=False)
    assert (asks.seen, asks.moved) == (([1], 1), "cpu")


def test_tensors_of_all_processes() -> None:
    strategy = make_trainer().strategy
    value = torch.tensor(2.0)
    assert [strategy.reduce(value), strategy.reduce(value, reduce_op="sum"), strategy.all_gather(value)] == [2.0] * 3
    assert strategy.reduce("text") == "text"
    with pytest.raises(ValueError, match=r"reduce_op='max' must be \"mean\" or \"sum\""):
        strategy.reduce(value, reduce_op="max")
    with pytest.raises(ValueError, match="needs a prepared task"):
        strategy.batch_to_device([value])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_optimizer_step_belongs_to_the_batch_before_it_is_counted(accumulate: int) -> None:
    seen = []

    class Steps(Watched):
        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            loop = self.trainer.fit_loop
            seen.append((loop.batch_idx, loop.total_batch_idx, *counts(loop.epoch_loop.batch_progress.total)))

    make_trainer(max_epochs=2, accumulate_grad_batches=accumulate).fit(Steps(), loader(4, 1))
    assert seen == [(i % 4, i, i + 1, i + 1, i, i) for i in range(accumulate - 1, 8, accumulate)]


def test_a_second_fit_draws_the_order_of_a_plain_loop() -> None:
    class Reads(Line):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            order.append(batch[0].tolist())
            return super().training_step(batch, batch_idx)

    def shuffled() -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.arange(16.0).view(8, 2)), batch_size=2, shuffle=True)

    order: list[Any] = []
    task, run = Reads(), make_trainer(max_epochs=1)
    torch.manual_seed(0)
    run.fit(task, shuffled())
    run.fit_loop.max_epochs = run.fit_loop.epoch_progress.current.ready + 2
    run.fit(task, shuffled())
    assert (run.max_epochs, run.current_epoch, run.global_step) == (3, 3, 12)
    torch.manual_seed(0)
    assert order == [batch[0].tolist() for _ in range(3) for batch in shuffled()]
