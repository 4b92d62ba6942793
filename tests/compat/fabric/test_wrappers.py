"""A `TaskModule`, callbacks and meters in a Fabric's loop work as in Lightning's."""

import copy
import csv

import pytest
import torch
from support.fabric_programs import Net
from support.models import Line, Stream, loader
from support.processes import run
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler
from treadle.compat.fabric import is_wrapped
from treadle.compat.fabric.utilities.throughput import ThroughputMonitor
from treadle.compat.precision_plugins import HalfPrecision
from treadle.loggers import CSVLogger

import treadle
from treadle import Fabric


class Task(Line):
    lr = 0.5

    def __init__(self):
        super().__init__()
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


class Inner(treadle.TaskModule):
    def note(self):
        self.log("inner", 3)


def test_a_task_logs_and_steps_through_fabric(tmp_path) -> None:
    task = Task()
    assert task.fabric is None
    fabric = Fabric(accelerator="cpu", devices=1, loggers=CSVLogger(tmp_path))
    raw = task.configure_optimizers()
    model, optimizer = fabric.setup(task, raw)
    assert task.fabric is fabric
    assert task.inner.fabric is fabric
    assert task.logger is fabric.logger
    assert (task.current_epoch, task.global_rank, task.trainer.world_size) == (0, 0, 1)
    before = task.net.bias.item()
    for index, (batch,) in enumerate(fabric.setup_dataloaders(loader())):
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


def test_what_a_task_can_not_do_in_a_fabrics_loop() -> None:
    task = Task()
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


class Recorder(nn.Linear):
    def forward(self, x, index, scale=None):
        self.seen = (x.dtype, index.dtype, scale.dtype)
        return super().forward(x)

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
    model = Fabric(accelerator="cpu", devices=1, precision=precision).setup(Recorder(2, 1))
    assert (model.device, model.dtype) == (torch.device("cpu"), stored)
    x = torch.ones(1, 2, dtype=torch.float32 if precision == "32-true" else torch.float64)
    for call in (model, model.training_step):
        output = call(x, torch.tensor([1]), scale=torch.ones(1, dtype=torch.float64))
        expected = x.dtype if precision == "32-true" else dtype
        assert model.seen == (expected, torch.int64, dtype)
        assert output.dtype == torch.float32


def on_two_ranks() -> tuple[object, ...]:
    notes = Notes()
    fabric = Fabric(accelerator="cpu", devices=2, callbacks=notes)
    task = Task()
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


def made() -> Fabric:
    return Fabric(accelerator="cpu", devices=1)


def test_a_method_must_be_marked_where_precision_or_processes_need_it() -> None:
    class Model(nn.Linear):
        def score(self, x):
            return self(x)

        def words(self):
            return "no layer"

    model = Fabric(accelerator="cpu", precision="bf16-mixed").setup(Model(2, 2))
    assert model.words() == "no layer"
    with pytest.raises(RuntimeError, match=r"mark_forward_method\('score'\)"):
        model.score(torch.ones(1, 2))
    model.mark_forward_method("score")
    assert model.score(torch.ones(1, 2)).dtype == torch.float32
    assert model(torch.ones(1, 2)).dtype == torch.float32
    with pytest.raises(AttributeError, match="no method 'scores'"):
        model.mark_forward_method("scores")
    assert made().setup(Model(2, 2)).score(torch.ones(1, 2)).shape == (1, 2)


def test_half_precision_is_cast_at_the_borders() -> None:
    fabric = Fabric(accelerator="cpu", plugins=HalfPrecision("bf16-true"))
    model = fabric.setup(nn.Linear(2, 2))
    assert (model.weight.dtype, model(torch.ones(1, 2)).dtype) == (torch.bfloat16, torch.float32)
    with fabric.init_tensor():
        assert torch.ones(1).dtype == torch.bfloat16
    assert torch.ones(1).dtype == torch.float32


def test_attributes_are_the_models_own() -> None:
    module = Net()
    model = made().setup(module)
    model.epoch = 3
    assert (module.epoch, model.module, list(model.state_dict())) == (3, module, list(module.state_dict()))
    model.eval()
    assert not module.net.training
    assert is_wrapped(model)
    assert not is_wrapped(module)


def shares() -> list[list[float]]:
    fabric = Fabric(accelerator="cpu", devices=2)
    loaders = fabric.setup_dataloaders(
        DataLoader(range(8), sampler=range(0, 8, 2)),
        DataLoader(range(8), batch_sampler=BatchSampler(range(0, 8, 2), 2, False)),
        DataLoader(range(3)),
        DataLoader(Stream(range(3))),
    )
    sampler = DistributedSampler(range(8), fabric.world_size, fabric.global_rank, shuffle=False)
    own = DataLoader(range(8), batch_sampler=BatchSampler(sampler, 2, False))  # which is not sharded again
    return [torch.cat(list(batches)).tolist() for batches in (*loaders, fabric.setup_dataloaders(own))]


def test_samples_are_shared_as_in_lightning() -> None:
    first, second = run(shares, 2)
    assert first == [[0, 4], [0, 4], [0, 2], [0, 1, 2], [0, 2, 4, 6]]
    assert second == [[2, 6], [2, 6], [1, 0], [0, 1, 2], [1, 3, 5, 7]]


def test_private_names_that_public_programs_import() -> None:
    from treadle.compat.fabric.fabric import _FabricOptimizer
    from treadle.compat.fabric.wrappers import _FabricDataLoader, _FabricModule, _unwrap_objects

    fabric = Fabric(accelerator="cpu", devices=1)
    net, data = nn.Linear(2, 1), loader()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    batches = fabric.setup_dataloaders(data)
    assert isinstance(model, _FabricModule)
    assert isinstance(optimizer, _FabricOptimizer)
    assert isinstance(batches, _FabricDataLoader)
    state = {"model": model, "optimizers": [optimizer], "loader": batches, "step": 3, "plain": net}
    plain = _unwrap_objects(state)
    assert plain["model"] is plain["plain"] is net
    assert type(plain["optimizers"][0]) is torch.optim.SGD
    assert (plain["loader"], plain["step"]) == (data, 3)
