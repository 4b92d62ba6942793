"""`strategy="ddp_spawn"` and its relatives run each stage in processes, and what a caller reads comes back."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.models import Scored
from support.processes import python, run, script
from support.trainers import make_trainer
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from treadle.callbacks import Callback, EarlyStopping, ModelCheckpoint
from treadle.strategies import DDP, SingleDevice, plan_function_launch

ROWS = torch.linspace(-1, 1, 16, dtype=torch.float64).reshape(8, 2)


class Line(Scored):
    def __init__(self, rate=0.1):
        torch.manual_seed(0)
        super().__init__()
        self.net.double()
        self.save_hyperparameters()

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])[:, 0].tolist()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.hparams.rate)


class Fails(Line):
    def training_step(self, batch, batch_idx):
        if self.global_rank == 1:
            raise KeyError("no such thing")
        return super().training_step(batch, batch_idx)


class Ranks(Callback):
    """Notes the ranks in a folder."""

    def __init__(self, folder):
        self.folder = folder
        self.seen = 0

    def on_fit_start(self, trainer, task):
        (self.folder / f"{trainer.global_rank} of {trainer.world_size} with {os.getppid()}").touch()
        assert isinstance(trainer.strategy, DDP)
        assert trainer.limit_train_batches == 2

    def state_dict(self):
        return {"seen": self.seen + 1}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def loader(batch_size=2):
    return DataLoader(TensorDataset(ROWS), batch_size)


def plain(steps=4):
    """One process on the joint batches: two steps per epoch."""
    task = Line()
    optimizer = task.configure_optimizers()
    for step in range(steps):
        loss = task.net(ROWS[4 * (step % 2) : 4 * (step % 2) + 4]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return task, loss.item()


@pytest.mark.long
@pytest.mark.parametrize(
    "strategy",
    [
        *(pytest.param("ddp_spawn", marks=pytest.mark.exhaustive), "ddp_fork_find_unused_parameters_true"),
        *(DDP(start_method="spawn", gradient_as_bucket_view=True), DDP(start_method="fork")),
    ],
    ids=lambda strategy: strategy if isinstance(strategy, str) else f"DDP, {strategy.start_method}",
)
def test_the_state_comes_back(strategy, tmp_path) -> None:
    expected, last_loss = plain()  # also a backward pass in this process
    checkpoints, ranks = ModelCheckpoint(monitor="val_loss"), Ranks(tmp_path)
    stop = EarlyStopping("val_loss", patience=3)
    options = {"max_epochs": 2, "enable_checkpointing": True, "default_root_dir": tmp_path / "run"}
    trainer = make_trainer(strategy=strategy, devices=2, callbacks=[checkpoints, ranks, stop], **options)
    trainer.limit_train_batches = 2
    task = Line()
    assert trainer.fit(task, loader(), loader()) is None
    assert torch.allclose(task.net.weight, expected.net.weight, rtol=1e-12, atol=0)
    assert sorted(path.name for path in tmp_path.glob("*of*")) == [f"{r} of 2 with {os.getpid()}" for r in range(2)]
    val = expected.net(ROWS).square().mean().item()
    assert (trainer.global_step, trainer.current_epoch, trainer.state.finished) == (4, 2, True)
    assert trainer.callback_metrics["val_loss"].item() == pytest.approx(val)
    assert trainer.callback_metrics["loss"].item() == pytest.approx(last_loss)
    assert checkpoints.best_model_score.item() == pytest.approx(val)
    best = Line.load_from_checkpoint(checkpoints.best_model_path)
    assert torch.equal(best.net.weight, task.net.weight)
    assert Path(checkpoints.best_model_path).parent == Path(checkpoints.dirpath)
    assert ranks.seen == 1
    assert stop.best_score.item() == pytest.approx(val)
    if strategy == "ddp_spawn":  # whose processes import everything again in each stage
        return
    assert trainer.predict(task, loader()) == [part.tolist() for part in task.net(ROWS)[:, 0].split(2)]
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    saved = Line.load_from_checkpoint(tmp_path / "weights.ckpt")
    assert torch.equal(saved.net.weight, task.net.weight)
    assert not dist.is_initialized()
    torch.nn.init.zeros_(task.net.weight)
    (metrics,) = trainer.test(ckpt_path="best", dataloaders=loader(), verbose=False)
    assert metrics["test_loss"] == pytest.approx(val)


def test_a_rank_fails() -> None:
    trainer = make_trainer(strategy="ddp_notebook", devices=2)
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 failed:(.|\n)*KeyError: 'no such thing'"):
        trainer.fit(Fails(), loader())


def test_what_can_not_be_pickled() -> None:
    class Local(Line):
        pass

    with pytest.raises(ValueError, match=r"can't be pickled: .*Local.*strategy='ddp_fork'"):
        make_trainer(strategy="ddp_spawn", devices=2).fit(Local(), loader())


def test_which_names_start_processes(monkeypatch) -> None:
    launch = plan_function_launch("ddp_spawn_find_unused_parameters_false", "cpu", 3)
    assert (launch.count, launch.start_method) == (3, "spawn")
    assert plan_function_launch("ddp_notebook", "cpu", 2).start_method == "fork"
    for strategy, devices in (("ddp", 2), ("auto", 2), (DDP(), 2), ("ddp_spawn", 1), ("ddp_spawn", "auto")):
        assert plan_function_launch(strategy, "cpu", devices) is None
    sizes = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**sizes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert plan_function_launch("ddp_spawn", "cpu", 2) is None


def one_process(strategy):
    trainer = make_trainer(strategy=strategy, devices=1)
    if isinstance(trainer.strategy, SingleDevice):
        return dist.is_initialized()
    total = torch.ones(1)
    dist.all_reduce(total)
    sampler = DistributedSampler(TensorDataset(ROWS))
    task = Line()
    trainer.fit(task, DataLoader(TensorDataset(ROWS), 4, sampler=sampler))
    return dist.get_world_size(), total.item(), len(list(sampler)), type(trainer.accelerator.models[0]).__name__


def all_strategies():
    names = ("auto", "single", "ddp", "ddp_spawn", "ddp_find_unused_parameters_true")
    return {name: one_process(name) for name in names}


def test_one_process_has_a_group_only_if_its_strategy_is_distributed() -> None:
    found = run(all_strategies, 1)[0]
    assert found["auto"] is found["single"] is False
    for name in ("ddp", "ddp_spawn", "ddp_find_unused_parameters_true"):
        assert found[name] == (1, 1.0, 8, "Line")


MAKE_TRAINER = """
import torch, treadle
from treadle.compat.demos.boring_classes import BoringModel
off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
trainer = treadle.Trainer(strategy="ddp_spawn", devices=2, accelerator="cpu", max_steps=1, **off)
"""


@pytest.mark.long
def test_a_script_without_a_main_guard() -> None:
    done = script(f"{MAKE_TRAINER}\ntrainer.fit(BoringModel())")
    assert done.returncode == 1
    assert "Put the run under `if __name__ == '__main__':`" in done.stderr
    assert re.search(r"RuntimeError: rank \d of 2", done.stderr)


FITS = """
class Own(BoringModel):
    pass
try:
    trainer.fit(Own())
except ValueError as error:
    print(error)
task = BoringModel()
before = task.layer.weight.clone()
trainer.fit(task)
print(trainer.global_step, bool((task.layer.weight != before).any()))
"""


@pytest.mark.long
def test_a_session_without_a_script() -> None:
    """It can spawn what modules define, as under pytest-xdist, but not what it defines itself."""
    done = subprocess.run([python(), "-c", MAKE_TRAINER + FITS], capture_output=True, text=True, timeout=120)
    refused, trained = done.stdout.splitlines()
    assert re.search("this session has none .* Move them into a module, or use strategy='ddp_fork'", refused)
    assert trained == "1 True", done.stderr
