"""Hyperparameters that are settings of a command line."""

import sys

import pytest
import torch
from jsonargparse import ArgumentParser
from lightning_cli_samples import Encoder, Factories, Model
from treadle.cli import instantiate_module

import treadle


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    return tmp_path


def test_a_module_from_its_settings():
    encoder = {"class_path": "lightning_cli_samples.DeepEncoder", "init_args": {"depth": 5}}
    model = instantiate_module(Model, {"lr": 0.3, "color": "BLUE", "encoder": encoder, "activation": "torch.tanh"})
    assert (model.hparams.lr, model.encoder.depth, model.activation) == (0.3, 5, torch.tanh)
    named = instantiate_module(treadle.TaskModule, {"_class_path": "lightning_cli_samples.Model", "lr": 0.3})
    assert type(named) is Model
    optimizer = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.5}}
    made = instantiate_module(Factories, {"optimizer": optimizer}).optimizer([torch.nn.Parameter(torch.ones(1))])
    assert (type(made), made.defaults["lr"]) == (torch.optim.SGD, 0.5)
    plain = ArgumentParser(exit_on_error=False)
    plain.add_argument("--encoder", type=Encoder)
    plain.parse_args(["--encoder=lightning_cli_samples.Encoder"])  # other parsers are not restricted afterwards


class Open(treadle.TaskModule):
    def __init__(self, anything=None):
        super().__init__()
        self.anything = anything


HOSTILE = {
    "a module that is not imported": (Model, {"encoder": {"class_path": "evil_module.Encoder"}}),
    "the task's class": (treadle.TaskModule, {"_class_path": "evil_module.Task"}),
    "a function that is not imported": (Model, {"activation": "evil_module.run"}),
    "a function of another module": (Model, {"activation": "shutil.rmtree"}),
    "a function of torch that reads files": (Model, {"activation": "torch.load"}),
    "a class of another kind": (Model, {"encoder": {"class_path": "torch.nn.Linear", "init_args": {"in_features": 1}}}),
    "a callable of a refused module": (Model, {"activation": {"class_path": "subprocess.Popen"}}),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hyperparameters_import_nothing(case, here, monkeypatch):
    (here / "evil_module.py").write_text("open('marker', 'w')\nEncoder = Task = run = print\n")
    monkeypatch.syspath_prepend(here)
    cls, settings = HOSTILE[case]
    with pytest.raises(ValueError, match="the hyperparameters cannot be used"):
        instantiate_module(cls, settings)
    assert not (here / "marker").exists()


def test_a_checkpoint_imports_nothing(here, monkeypatch):
    (here / "evil_module.py").write_text("open('marker', 'w')\n")
    monkeypatch.syspath_prepend(here)
    hparams = {"_instantiator": "evil_module.run", "_class_path": "evil_module.Task", "lr": 0.1}
    content = {"state_dict": Model().state_dict(), "hyper_parameters": hparams, "pytorch-lightning_version": "2.6.6"}
    torch.save(content | {"datamodule_hyper_parameters": hparams}, "hostile.ckpt")
    for base in (treadle.TaskModule, treadle.DataModule):
        with pytest.raises(ValueError, match="A class that a checkpoint names is not imported"):
            base.load_from_checkpoint("hostile.ckpt")
    assert not (here / "marker").exists()
    hparams["_class_path"] = "lightning_cli_samples.Model"
    torch.save(content, "peer.ckpt")  # as LightningCLI of Lightning saves it
    assert type(treadle.TaskModule.load_from_checkpoint("peer.ckpt")) is Model


def test_an_argument_without_a_type_gets_no_object():
    spec = {"class_path": "lightning_cli_samples.Encoder", "init_args": {"width": 3}}
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'anything\.class_path'"):
        instantiate_module(Open, {"anything": spec})
    assert instantiate_module(Open, {"anything": {"class_path": "evil_module.Encoder"}}).anything["class_path"]
