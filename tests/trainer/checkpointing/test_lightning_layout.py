"""The dict for other programs: what it holds of each type, and that Lightning itself opens and continues it."""

import datetime
import json
import subprocess
from argparse import Namespace
from collections import OrderedDict, deque
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from support.models import Line, LoggedLine, loader
from support.processes import run
from support.trainers import NO_OUTPUT
from torch.utils.data import DataLoader, TensorDataset
from treadle.trainer.checkpointing.lightning_layout import make_plain

import treadle

BENCH = Path(__file__).parents[3] / ".venv-bench" / "bin" / "python"


class Color(Enum):
    RED = "red"


class Name(str):
    pass


@dataclass
class Point:
    x: int
    names: tuple


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (None, None),
        (2**4000, str(2**4000)),
        (Name("n"), "n"),
        (Path("a/b"), "a/b"),
        (Color.RED, "red"),
        (np.float64(0.5), 0.5),
        (np.array(["a"]), ["a"]),
        (datetime.date(2026, 1, 2), "2026-01-02"),
        (datetime.timedelta(minutes=1), 60.0),
        (Point(1, ("a", Color.RED)), {"x": 1, "names": ("a", "red")}),
        (Namespace(a=1), {"a": 1}),
        (OmegaConf.create({"a": [1, {"b": "c"}]}), {"a": [1, {"b": "c"}]}),
        (OrderedDict(b=1, a=Color.RED), OrderedDict(b=1, a="red")),
        (deque([1, range(2)]), [1, [0, 1]]),
        (frozenset({1}), {1}),
        ({"keep": 1, "drop": print, ("a", Color.RED): 2}, {"keep": 1, ("a", "red"): 2}),
        (print, None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_plain_forms(value, plain, tmp_path):
    found = make_plain(value)
    assert found == plain
    assert type(found) is type(plain)
    torch.save(found, tmp_path / "file")
    assert torch.load(tmp_path / "file", weights_only=True) == plain


def test_arrays_become_tensors():
    array = np.arange(6.0).reshape(2, 3)[:, ::2]
    assert torch.equal(make_plain({"a": array})["a"], torch.from_numpy(array.copy()))


PROGRAM = """
import sys, json, importlib, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def make(library):
    pl = importlib.import_module(library)
    class Task(pl.TaskModule if hasattr(pl, "TaskModule") else pl.LightningModule):
        def __init__(self, lr=0.1, width=4):
            super().__init__()
            self.save_hyperparameters()
            self.net = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 1))
        def loss(self, batch):
            return self.net(batch[0]).sub(1).pow(2).mean()
        def training_step(self, batch, batch_idx):
            return self.loss(batch)
        def validation_step(self, batch, batch_idx):
            self.log("val", self.loss(batch))
        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]
    return pl, Task

def loader(rows=40):
    return DataLoader(TensorDataset(torch.linspace(-1, 1, 4 * rows).view(rows, 4)), 4)

def trainer(pl, folder, **flags):
    return pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, **flags)

def fit(library, folder, ckpt_path=None):
    pl, Task = make(library)
    every = {"every_n_train_steps": 7}, {"save_on_train_epoch_end": True}
    keeps = [pl.callbacks.ModelCheckpoint(f"{folder}/kept", save_top_k=-1, **when) for when in every]
    stops = pl.callbacks.EarlyStopping("val", patience=5)
    torch.manual_seed(0)
    run, task = trainer(pl, folder, max_epochs=3, callbacks=[*keeps, stops]), Task()
    run.fit(task, loader(), loader(8), ckpt_path=ckpt_path)
    optimizer = run.optimizers[0]
    return {"step": run.global_step, "epoch": run.current_epoch, "lr": optimizer.param_groups[0]["lr"],
        "adam": [state["step"].item() for state in optimizer.state.values()], "patience": stops.wait_count,
        "weights": torch.cat([p.detach().flatten() for p in task.parameters()]).tolist()}

def evaluate(library, folder, path):
    pl, Task = make(library)
    task, run = Task.load_from_checkpoint(path, width=4), trainer(pl, folder)
    found = run.validate(Task(), loader(8), ckpt_path=path, verbose=False)[0]
    found["loaded"] = run.validate(task, loader(8), verbose=False)[0]["val"]
    return {name: round(value, 5) for name, value in found.items()} | {"lr": task.hparams.lr}
"""


def lightning(folder, call):
    """The result of a call of the program under Lightning, in its own environment."""
    (folder / "program.py").write_text(f"{PROGRAM}\nprint('RESULT', json.dumps({call}))\n")
    made = subprocess.run(
        [BENCH, folder / "program.py"], capture_output=True, text=True, timeout=200, cwd=folder, check=False
    )
    if "No module named" in made.stderr:
        pytest.skip("lightning is not installed beside")
    assert made.returncode == 0, made.stderr[-2000:]
    return json.loads(made.stdout.split("RESULT ")[1])


@pytest.mark.long
@pytest.mark.skipif(not BENCH.exists(), reason="lightning is not installed beside")
def test_each_opens_the_others_and_lightning_goes_on(tmp_path):
    """Lightning resumes at the same step as from its own file, with the same schedules and optimizer's state."""
    space = {}
    exec(PROGRAM, space)
    fit, evaluate = space["fit"], space["evaluate"]
    ours = fit("treadle", tmp_path / "ours")
    names = sorted(path.name for path in (tmp_path / "ours" / "kept").iterdir())
    points = ((0, 10), (0, 7), (1, 14), (1, 20), (2, 21), (2, 28), (2, 30))
    assert names == [f"epoch={epoch}-step={step}.ckpt" for epoch, step in points]
    paths = [str(tmp_path / "ours" / "kept" / name) for name in names]
    twins = [f"{tmp_path}/theirs/kept/{name}" for name in names]
    theirs, of_theirs, evaluated, resumed = lightning(
        tmp_path,
        f"""[fit('lightning.pytorch', '{tmp_path}/theirs'),
            evaluate('lightning.pytorch', '{tmp_path}', '{twins[2]}'),
            [evaluate('lightning.pytorch', '{tmp_path}', path) for path in {paths}],
            [fit('lightning.pytorch', '{tmp_path}/again', path) for path in {paths + twins}]]""",
    )
    assert theirs["weights"] == pytest.approx(ours["weights"], rel=1e-5)
    assert evaluate("treadle", tmp_path, twins[2]) == of_theirs
    assert evaluated == [evaluate("treadle", tmp_path, path) for path in paths]
    for from_ours, from_theirs in zip(resumed[: len(paths)], resumed[len(paths) :], strict=True):
        assert from_ours.pop("weights") == pytest.approx(from_theirs.pop("weights"), rel=1e-5)
        assert from_ours == from_theirs


def test_callbacks_and_data_modules_are_in_it(tmp_path):
    class Data(treadle.DataModule):
        def __init__(self, batch_size=2):
            super().__init__()
            self.save_hyperparameters()

        def train_dataloader(self):
            return loader(4, self.hparams.batch_size)

        def state_dict(self):
            return {"position": 3}

    callbacks = [treadle.callbacks.EarlyStopping("loss"), treadle.callbacks.Timer(duration={"days": 1})]
    trainer = treadle.Trainer(max_epochs=1, callbacks=callbacks, **NO_OUTPUT)
    trainer.fit(LoggedLine(), datamodule=Data())
    trainer.save_checkpoint(tmp_path / "c.ckpt")
    content = torch.load(tmp_path / "c.ckpt", weights_only=True)
    assert content["datamodule_hyper_parameters"] == {"batch_size": 2}
    assert content[Data.__qualname__] == {"position": 3}
    early = content["callbacks"]["EarlyStopping{'monitor': 'loss', 'mode': 'min'}"]
    assert {"wait_count", "stopped_epoch", "best_score", "patience"} == set(early)
    assert any(name.startswith("treadle.Timer") for name in content["callbacks"])


def sharded_over_one_process(folder):
    def fit(name, **options):
        class Task(Line):
            def configure_optimizers(self):
                return torch.optim.AdamW(self.parameters(), 0.1)

        treadle.seed_everything(0)
        trainer, task = treadle.Trainer(strategy=name, default_root_dir=folder, **NO_OUTPUT, **options), Task()
        trainer.fit(task, DataLoader(TensorDataset(torch.arange(8.0).view(4, 2)), 2), ckpt_path=path)
        trainer.save_checkpoint(saved := f"{folder}/{name}.ckpt")
        return saved, trainer.accelerator.get_state_dict(task)

    path = None
    path, weights = fit("fsdp", max_epochs=1)
    content = torch.load(path, weights_only=True)
    same = torch.equal(content["state_dict"]["net.weight"], weights["net.weight"])
    moments = [value.shape for value in content["optimizer_states"][0]["state"][0].values()]
    ends = [fit(name, max_epochs=2)[1]["net.weight"] for name in ("fsdp", "auto")]
    return same, moments, ends[0].sub(ends[1]).abs().max().item()


def test_one_file_of_a_model_that_one_process_shards(tmp_path):
    assert run(sharded_over_one_process, 1, str(tmp_path)) == [(True, [(), (1, 2), (1, 2)], 0.0)]
