"""Files of Lightning and of torch become a task."""

import argparse
import enum
import itertools
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from support.weight_files import Task, lightning_file, net, same

import treadle

BENCH = Path(__file__).parents[3] / ".venv-bench" / "bin" / "python"


class AttributeDict(dict):
    pass


def save_elsewhere(value, path, modules):
    """Save objects of classes whose modules are gone when the file is read."""
    with pytest.MonkeyPatch.context() as patch:
        for module, kinds in modules.items():
            for name in itertools.accumulate(module.split("."), "{}.{}".format):
                patch.setitem(sys.modules, name, ModuleType(name))
            for kind in kinds:
                patch.setattr(kind, "__module__", module)
                setattr(sys.modules[module], kind.__name__, kind)
        torch.save(value, path)


class Whole(Task):
    def __init__(self, hparams):
        super().__init__(hparams.width)
        self.hp = hparams


class Color(enum.Enum):
    RED = "r"


class Config:
    def __init__(self):
        self.lr = 0.1


def test_a_lightning_checkpoint_becomes_a_task(tmp_path):
    arguments = AttributeDict(
        width=5, path=Path("a/b"), namespace=argparse.Namespace(x=1), number=np.float64(2.5),
        config={"a": [1, {"b": "c"}]}, given=Color.RED, optimizer=Config(), gone=3,
    )  # fmt: skip
    content = lightning_file(Task(5), arguments, hparams_type=AttributeDict)
    path = tmp_path / "x.ckpt"
    modules = {"somebody.configs": (Color, Config), "lightning.fabric.utilities.data": (AttributeDict,)}
    save_elsewhere(content, path, modules)
    with pytest.warns(UserWarning, match="somebody") as said:
        task = Task.load_from_checkpoint(path)
    words = "\n".join(str(one.message) for one in said)
    assert "hyper_parameters.given (somebody.configs.Color)" in words
    assert "hyper_parameters.optimizer (somebody.configs.Config)" in words
    assert "the saved hyperparameter gone is ignored" in words
    assert "somebody" not in sys.modules
    assert task.arguments == {
        "width": 5, "path": Path("a/b"), "given": "default", "namespace": argparse.Namespace(x=1),
        "number": 2.5, "config": {"a": [1, {"b": "c"}]},
    }  # fmt: skip
    assert same(task, content["state_dict"])
    assert (task.seen["epoch"], task.seen["global_step"]) == (3, 12)
    assert torch.equal(task.seen["optimizer_states"][0]["state"][0]["exp_avg"], torch.ones(3, 2))
    assert task.seen["optimizer_states"][0]["param_groups"] == [{"lr": 0.1, "betas": (0.9, 0.99)}]
    assert task.seen["callbacks"] == content["callbacks"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert Task.load_from_checkpoint(path, given=7, map_location="cpu").arguments["given"] == 7
        with pytest.raises(ValueError, match="a different model"):
            Task.load_from_checkpoint(path, width=6)
        with pytest.warns(UserWarning, match="weights_only=False has no effect"):
            Task.load_from_checkpoint(path, weights_only=False)
        nowhere = torch.UntypedStorage(device="meta")
        for place in ("meta", {"cuda:0": "meta", "cpu": "meta"}, lambda storage, location: nowhere):
            assert all(parameter.is_meta for parameter in Task.load_from_checkpoint(path, place).parameters())
            assert all(tensor.is_meta for tensor in treadle.load_checkpoint(path, place)["state_dict"].values())
        for place in (lambda storage, location: storage, lambda storage, location: None, {"cuda:0": "cpu"}, None):
            assert same(Task.load_from_checkpoint(path, map_location=place), content["state_dict"])
        for place, error in (("gpu", ValueError), ({"cpu": "meta", "cuda:0": "cpu"}, TypeError), (2.5, TypeError)):
            for load in (Task.load_from_checkpoint, treadle.load_checkpoint):
                with pytest.raises(error, match="map_location="):
                    load(path, map_location=place)


def test_hyperparameters_as_one_argument(tmp_path):
    content = lightning_file(Task(6), {"width": 6, "lr": 0.1}, hparams_name="hparams")
    torch.save(content, tmp_path / "x.ckpt")
    task = Whole.load_from_checkpoint(tmp_path / "x.ckpt")
    assert dict(task.hp) == {"width": 6, "lr": 0.1}
    assert same(task, content["state_dict"])


def test_weights_that_a_hook_has_changed(tmp_path):
    class Renamed(Task):
        def on_load_checkpoint(self, checkpoint):
            checkpoint["state_dict"] = {n.replace("old.", "net."): v for n, v in checkpoint["state_dict"].items()}

    content = lightning_file(Task(4), {})
    wanted = content["state_dict"]
    content["state_dict"] = {n.replace("net.", "old."): v for n, v in wanted.items()}
    torch.save(content, tmp_path / "x.ckpt")
    assert same(Renamed.load_from_checkpoint(tmp_path / "x.ckpt"), wanted)
    with pytest.raises(ValueError, match=r"unexpected: old\.0\.bias"):
        Task.load_from_checkpoint(tmp_path / "x.ckpt")


REAL = """
import enum, sys, warnings, logging
warnings.simplefilter("ignore"); logging.disable(logging.WARNING)
from argparse import Namespace
from pathlib import Path
import numpy as np, torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from omegaconf import OmegaConf
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Color(enum.Enum):
    RED = "r"

class Model(LightningModule):
    def __init__(self, width=4, path=None, given=None, namespace=None, config=None, number=None):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 2))
    def training_step(self, batch, index):
        loss = self.net(batch[0]).square().mean(); self.log("loss", loss); return loss
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)]

config = OmegaConf.create({"a": [1, {"b": "c"}]})
model = Model(5, Path("a/b"), Color.RED, Namespace(x=1), config, np.float64(2.5))
kept = ModelCheckpoint(dirpath=sys.argv[1] + "/c", monitor="loss", save_last=True)
trainer = Trainer(max_steps=4, accelerator="cpu", logger=False, enable_progress_bar=False,
    enable_model_summary=False, default_root_dir=sys.argv[1], callbacks=[kept, EarlyStopping("loss")])
trainer.fit(model, DataLoader(TensorDataset(torch.randn(16, 4)), 4))
trainer.save_checkpoint(sys.argv[1] + "/x.ckpt")
torch.save(model.state_dict(), sys.argv[1] + "/x.state")
"""


@pytest.mark.long
@pytest.mark.skipif(not BENCH.exists(), reason="lightning is not installed beside")
def test_what_lightning_itself_writes(tmp_path):
    (tmp_path / "real.py").write_text(REAL)
    made = subprocess.run([BENCH, tmp_path / "real.py", tmp_path], capture_output=True, text=True, timeout=120)
    if "No module named" in made.stderr:
        pytest.skip("lightning is not installed beside")
    assert made.returncode == 0, made.stderr[-2000:]
    wanted = torch.load(tmp_path / "x.state", weights_only=True)
    with pytest.warns(UserWarning, match=r"__main__\.Color") as said:
        task = Task.load_from_checkpoint(tmp_path / "x.ckpt")
    assert len(said) == 1
    assert same(task, wanted)
    assert task.seen["global_step"] == 4
    assert task.seen["optimizer_states"][0]["state"][0]["step"] == 4
    assert task.arguments == {
        "width": 5, "path": Path("a/b"), "given": "default", "namespace": argparse.Namespace(x=1),
        "config": {"a": [1, {"b": "c"}]}, "number": 2.5,
    }  # fmt: skip
    model = net(5)
    treadle.load_weights(model, tmp_path / "x.ckpt", prefix="net.")
    assert same(model, {key.removeprefix("net."): value for key, value in wanted.items()})
