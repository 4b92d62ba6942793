"""A `TaskModule`, callbacks and meters in a Fabric's loop work as in Lightning's."""

from __future__ import annotations

import copy
import csv

import pytest
import torch
from support.processes import run
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from treadle.compat.fabric.utilities.seed import reset_seed
from treadle.compat.fabric.utilities.throughput import ThroughputMonitor
from treadle.compat.utilities.model_summary.model_summary import UNKNOWN_SIZE, ModelSummary, summarize
from treadle.loggers import CSVLogger

import treadle
from treadle import Fabric


class Line(treadle.TaskModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 1)
        self.inner = Inner()
        self.ended = 0

    def training_step(self, batch, batch_idx):
        loss = self.net(batch).mean()
        self.inner.note()
        self.log("loss", loss)
        self.log("hidden", 1.0, logger=False)
        self.log_dict({"a": 1, "b": torch.tensor([2.0])})
        return loss

    def on_train_epoch_end(self):
        self.ended += 1

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.5)


class Inner(treadle.TaskModule):
    def note(self):
        self.log("inner", 3)


def test_a_task_logs_and_steps_through_fabric(tmp_path) -> None:
    task = Line()
    assert task.fabric is None
    fabric = Fabric(accelerator="cpu", devices=1, loggers=CSVLogger(tmp_path))
    raw = task.configure_optimizers()
    model, optimizer = fabric.setup(task, raw)
    assert task.fabric is fabric
    assert task.inner.fabric is fabric
    assert task.logger is fabric.logger
    assert (task.current_epoch, task.global_rank, task.trainer.world_size) == (0, 0, 1)
    before = task.net.bias.item()
    for index, (batch,) in enumerate(fabric.setup_dataloaders(DataLoader(TensorDataset(torch.ones(4, 2)), 2))):
        loss = model.training_step(batch, index)
        task.manual_backward(loss)
        task.clip_gradients(task.optimizers(), gradient_clip_val=0.1, gradient_clip_algorithm="value")
        assert task.optimizers() is optimizer
        assert task.optimizers(use_pl_optimizer=False) is raw
        optimizer.step()
        optimizer.zero_grad()
    assert task.net.bias.item() == pytest.approx(before - 2 * 0.5 * 0.1)
    task.backward(model.training_step(batch, 2))
    assert task.net.bias.grad.item() == 1
    fabric.call("on_train_epoch_end")
    assert task.ended == 1
    fabric.logger.save()
    rows = list(csv.DictReader((tmp_path / "treadle_logs" / "version_0" / "metrics.csv").open()))
    assert len(rows) == 9  # per batch: inner, loss, and one row for log_dict
    assert "hidden" not in rows[0]
    assert (rows[0]["inner"], rows[2]["a"], rows[2]["b"]) == ("3", "1", "2.0")
    assert rows[1]["loss"] == str(pytest.approx(float(rows[1]["loss"])).expected)


def test_what_a_task_can_not_do_in_a_fabrics_loop() -> None:
    task = Line()
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.setup(task)
    with pytest.raises(ValueError, match=r"self.log\('x'\) got a str"):
        task.log("x", "text")
    with pytest.raises(ValueError, match=r"shape \(2,\)"):
        task.log("x", torch.ones(2))
    with pytest.raises(AttributeError, match="'limit_train_batches' in a Fabric's loop"):
        _ = task.trainer.limit_train_batches
    assert copy.deepcopy(task).fabric is None
    task.fabric = None
    with pytest.raises(RuntimeError, match="not attached"):
        _ = task.trainer
    task.fabric = fabric
    assert task.inner.fabric is fabric


class Notes:
    def __init__(self):
        self.calls = []

    def on_after_setup(self, fabric, module):
        self.calls.append(("setup", fabric, module))

    def on_after_optimizer_step(self, strategy, optimizer):
        self.calls.append(("step", strategy, optimizer))


@pytest.mark.parametrize("closure", [False, True])
def test_callbacks(closure) -> None:
    notes, net = Notes(), nn.Linear(2, 1)
    fabric = Fabric(accelerator="cpu", devices=1, callbacks=[notes, object()])
    raw = torch.optim.SGD(net.parameters(), 0.1)
    model, optimizer = fabric.setup(net, raw)
    assert notes.calls == [("setup", fabric, model)]

    def step():
        loss = model(torch.ones(1, 2)).sum()
        fabric.backward(loss)
        return loss

    if closure:
        optimizer.step(step)
    else:
        step()
        optimizer.step()
    assert notes.calls[1:] == [("step", fabric.strategy, raw)]


class Recorder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 1)

    def forward(self, x, index, scale=None):
        self.seen = (x.dtype, index.dtype, scale.dtype)
        return self.net(x)

    def training_step(self, x, index, scale=None):
        return self(x, index, scale)


@pytest.mark.parametrize(
    ("precision", "dtype", "stored"),
    [
        ("32-true", torch.float64, torch.float32),
        ("bf16-mixed", torch.bfloat16, torch.float32),
        ("16-mixed", torch.float16, torch.float32),
        ("16-true", torch.float16, torch.float16),
        ("64-true", torch.float64, torch.float64),
    ],
)
def test_inputs_are_cast_and_outputs_cast_back(precision, dtype, stored) -> None:
    model = Fabric(accelerator="cpu", devices=1, precision=precision).setup(Recorder())
    assert (model.device, model.dtype) == (torch.device("cpu"), stored)
    x = torch.ones(1, 2, dtype=torch.float32 if precision == "32-true" else torch.float64)
    scale = torch.ones(1, dtype=torch.float64)
    for call in (model, model.training_step):
        output = call(x, torch.tensor([1]), scale=scale)
        expected = x.dtype if precision == "32-true" else dtype
        assert model.seen == (expected, torch.int64, dtype)
        assert output.dtype == torch.float32


def test_the_throughput_meter_of_a_loop(tmp_path) -> None:
    fabric = Fabric(accelerator="cpu", devices=1, loggers=CSVLogger(tmp_path))
    meter = ThroughputMonitor(fabric, window_size=3)
    for step in range(1, 5):
        meter.update(time=step / 2, batches=step, samples=4 * step)
    assert meter.compute_and_log() == {
        "time": 2.0,
        "batches": 4,
        "samples": 16,
        "device/batches_per_sec": 2.0,
        "device/samples_per_sec": 8.0,
    }
    assert meter.step == 0
    fabric.logger.save()
    text = (tmp_path / "treadle_logs" / "version_0" / "metrics.csv").read_text()
    assert text.splitlines()[1].split(",")[0] == "0"


def on_two_ranks() -> tuple[object, ...]:
    notes = Notes()
    fabric = Fabric(accelerator="cpu", devices=2, callbacks=notes)
    task = Line()
    model, optimizer = fabric.setup(task, task.configure_optimizers())
    task.manual_backward(model.training_step(torch.full((1, 2), 1.0 + fabric.global_rank), 0))
    optimizer.step()
    meter = ThroughputMonitor(fabric, window_size=2)
    for step in (1, 2):
        meter.update(time=float(step), batches=step, samples=step)
    rates = meter.compute()
    gathered = task.all_gather(torch.tensor(float(fabric.global_rank))).tolist()
    kinds = [kind for kind, *_ in notes.calls]
    return task.net.weight.grad.tolist(), kinds, rates.get("samples_per_sec"), gathered, task.global_rank


def test_two_ranks() -> None:
    assert run(on_two_ranks, 2) == [
        ([[1.5, 1.5]], ["setup", "step"], 2.0, [0.0, 1.0], 0),
        ([[1.5, 1.5]], ["setup", "step"], None, [0.0, 1.0], 1),
    ]


def test_the_seed_is_in_the_environment(monkeypatch) -> None:
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    torch.manual_seed(1)
    before = torch.initial_seed()
    reset_seed()
    assert torch.initial_seed() == before
    treadle.seed_everything(3)
    first = torch.rand(2)
    reset_seed()
    assert torch.equal(torch.rand(2), first)
    assert treadle.seed_everything() == 3


class Own(treadle.TaskModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
        self.scale = nn.Parameter(torch.ones(5))
        self.net[0].bias.requires_grad = False


def test_the_table_of_layers() -> None:
    for summary in (ModelSummary(Own(), max_depth=-1), summarize(Own(), max_depth=-1)):
        assert summary.layer_names == ["net", "net.0", "net.1"]
        assert summary.layer_types == ["Sequential", "Linear", "ReLU"]
        assert summary.param_nums == [9, 9, 0]
        assert (summary.total_parameters, summary.trainable_parameters, summary.total_layer_params) == (14, 11, 18)
        assert summary.model_size == pytest.approx(14 * 4e-6)
        assert summary.total_training_modes == {"train": 3, "eval": 0}
        assert "(own)" in str(summary)
        assert repr(summary) == str(summary)
    assert ModelSummary(Own(), 0).layer_names == []
    assert ModelSummary(Own()).layer_names == ["net"]
    with pytest.raises(ValueError, match="max_depth"):
        ModelSummary(Own(), -2)


def test_the_table_of_layers_has_the_modes_of_now_and_unknown_sizes() -> None:
    task = Own()
    summary = ModelSummary(task, max_depth=-1)
    task.net[0].eval()
    assert summary.total_training_modes == {"train": 2, "eval": 1}
    summary.layers[1].in_size = []  # a call without inputs
    assert summary.in_sizes == [UNKNOWN_SIZE] * 3
