"""Flags of the Trainer that have no test file of their own; what each does, and what it can't be combined with."""

import inspect
import time

import pytest
import torch
from support.callback_runs import Rows
from support.models import Line, LoggedLine
from support.processes import run
from support.trainers import make_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import treadle


class Task(LoggedLine):
    """Has a batch norm, and notes its validations: the step, and the time since the fit began."""

    pause = 0.0

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        self.validated, self.times = [], []

    def on_fit_start(self):
        self.began = time.monotonic()

    def training_step(self, batch, batch_idx):
        time.sleep(self.pause)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        if not self.trainer.sanity_checking:
            self.validated.append(self.global_step)
            self.times.append(time.monotonic() - self.began)


def loader(count=16):
    return DataLoader(TensorDataset(torch.randn(count, 2, generator=torch.Generator().manual_seed(1))), batch_size=2)


# -- barebones -------------------------------------------------------------------------------------------------------


def test_barebones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bare = treadle.Trainer(barebones=True, max_epochs=1, accelerator="cpu")
    task = Task()
    bare.fit(task, loader(), loader(2))
    assert list(tmp_path.iterdir()) == []
    assert (bare.callbacks, bare.loggers, bare.callback_metrics) == ([], [], {})
    assert task.validated == [8]  # no sanity check


@pytest.mark.parametrize("flag", ["logger", "enable_checkpointing", "enable_progress_bar", "fast_dev_run", "profiler"])
def test_what_barebones_leaves_out(flag):
    with pytest.raises(ValueError, match=rf"barebones=True cannot be combined with {flag}=.*Remove one of the two"):
        treadle.Trainer(barebones=True, **{flag: "simple" if flag == "profiler" else True})


# -- val_check_interval ----------------------------------------------------------------------------------------------


def test_an_interval_of_zero_is_no_error_if_nothing_is_trained():
    """Programs that compute val_check_interval=min(every, max_steps) also run without training."""
    task = Task()
    before = [weight.clone() for weight in task.parameters()]
    trainer = make_trainer(max_steps=0, val_check_interval=0, check_val_every_n_epoch=None, num_sanity_val_steps=0)
    trainer.fit(task, loader(), loader(2))
    assert (task.validated, trainer.val_check_interval) == ([], 0)
    assert all(torch.equal(*pair) for pair in zip(before, task.parameters(), strict=True))
    assert len(trainer.validate(task, loader(2))) == 1


# -- validation by the clock -----------------------------------------------------------------------------------------


def by_the_clock(interval, pause, **flags):
    task = Task()
    task.pause = pause
    make_trainer(val_check_interval=interval, num_sanity_val_steps=0, **flags).fit(task, loader(), loader(2))
    return task


def test_validation_by_the_clock():
    task = by_the_clock({"seconds": 0.1}, 0.03)
    assert task.validated
    # Gaps between two validations would not do: one that starts late on a busy machine shortens the next gap.
    assert all(at >= 0.099 * count for count, at in enumerate(task.times, 1))
    assert by_the_clock({"hours": 1}, 0.0).validated == []


def by_the_clock_on_two():
    pause = 0.02 + 0.02 * int(treadle.PartialState().process_index)
    flags = {"max_time": {"seconds": 2}, "max_epochs": -1, "strategy": "ddp"}
    return by_the_clock("00:00:00:01", pause, **flags).validated


@pytest.mark.long
def test_two_processes_validate_after_the_same_step():
    first, second = run(by_the_clock_on_two, 2)
    assert first == second
    assert first


# -- batch norm over all processes -----------------------------------------------------------------------------------


def normed(**flags):
    task = Task()
    make_trainer(strategy="ddp", **flags).fit(task, loader())
    return task.net[1].running_mean


def on_two_processes():
    with pytest.raises(ValueError, match="sync_batchnorm=True needs strategy='ddp', not 'fsdp'"):
        make_trainer(strategy="fsdp", sync_batchnorm=True)
    return {
        "normed": [normed(sync_batchnorm=True), normed(plugins=[treadle.strategies.TorchSyncBatchNorm()])],
        "own sampler": read_by(False),
        "distributed sampler": read_by(True),
    }


@pytest.fixture(scope="module")
def two_ranks():
    return run(on_two_processes, 2)


def test_sync_batchnorm(two_ranks):
    first, second = (rank["normed"] for rank in two_ranks)
    assert all(map(torch.equal, first, second))
    make_trainer(sync_batchnorm=True).fit(Task(), loader())  # one process has all samples


# -- logging ---------------------------------------------------------------------------------------------------------


class Logs(treadle.callbacks.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.log("of_a_batch", float(batch_idx))

    def on_train_epoch_end(self, trainer, pl_module):
        self.log_dict({"of_an_epoch": 3.0, "another": 4.0})


def test_callbacks_log_as_the_task_does():
    logger, logs = Rows(), Logs()
    own = make_trainer(logger=logger, callbacks=logs, log_every_n_steps=4)
    own.fit(Task(), loader())
    assert logger.of("of_a_batch") == [(4, 3.0), (8, 7.0)]
    assert [own.callback_metrics[name] for name in ("of_an_epoch", "another")] == [3.0, 4.0]
    with pytest.raises(RuntimeError, match=r"Logs.log was called outside of a stage"):
        logs.log("late", 1.0)


# -- algorithms, and the user's own sharding -------------------------------------------------------------------------


@pytest.fixture
def algorithms_as_before():
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    torch.backends.cudnn.benchmark = benchmark


class Puts(Task):
    """Its step uses an operation that has no deterministic form."""

    def training_step(self, batch, batch_idx):
        torch.zeros(4).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
        return super().training_step(batch, batch_idx)


@pytest.mark.usefixtures("algorithms_as_before")
def test_deterministic():
    with pytest.raises(RuntimeError, match=r"put_ does not have a deterministic implementation"):
        make_trainer(deterministic=True).fit(Puts(), loader())
    with pytest.warns(UserWarning, match=r"put_ does not have a deterministic implementation"):
        make_trainer(deterministic="warn").fit(Puts(), loader())
    make_trainer().fit(Puts(), loader())  # None leaves what is set
    assert torch.are_deterministic_algorithms_enabled()
    make_trainer(deterministic=False).fit(Puts(), loader())
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.usefixtures("algorithms_as_before")
def test_benchmark():
    for flags, expected in (
        ({"benchmark": True}, True),
        ({}, True),
        ({"deterministic": True}, False),  # it may choose another algorithm in each run
        ({"deterministic": True, "benchmark": True}, True),
        ({"benchmark": False}, False),
    ):
        make_trainer(**flags)
        assert torch.backends.cudnn.benchmark is expected, flags


def test_float32_matmul_precision():
    before = torch.get_float32_matmul_precision()
    try:
        make_trainer(float32_matmul_precision="high")
        with pytest.raises(ValueError, match=r"'hihg' is not one of highest, high, medium. Did you mean 'high'"):
            make_trainer(float32_matmul_precision="hihg")
        make_trainer()  # None leaves what is set
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


def test_limits_of_tests():
    class Tests(Task):
        def test_step(self, batch, batch_idx):
            self.validated.append(batch_idx)

    for limit, expected in ((3, 3), (0.5, 4), (1.0, 8), (100, 8)):
        task = Tests()
        make_trainer(limit_test_batches=limit).test(task, loader(), verbose=False)
        assert task.validated == list(range(expected))


def read_by(flags):
    seen, task = [], Line()
    task.training_step = lambda batch, batch_idx: seen.append(batch[:, 0].tolist()) or task.net(batch).mean()
    one = make_trainer(strategy="ddp", use_distributed_sampler=flags)
    own = torch.arange(4.0) if flags else torch.arange(4.0) + 10 * one.global_rank
    one.fit(task, DataLoader(own.expand(2, 4).T, batch_size=1 if flags else 2))
    return seen


def test_use_distributed_sampler(two_ranks):
    assert [rank["own sampler"] for rank in two_ranks] == [[[0, 1], [2, 3]], [[10, 11], [12, 13]]]
    assert [rank["distributed sampler"] for rank in two_ranks] == [[[0], [2]], [[1], [3]]]


def test_the_signature_has_the_flags_alone():
    """Parsers make an option of each parameter; what collects unknown names is none of them."""
    for signature in (inspect.signature(treadle.Trainer), inspect.signature(treadle.Trainer.__init__)):
        assert [*signature.parameters][-1] == "grace"
        assert "max_epochs" in signature.parameters
