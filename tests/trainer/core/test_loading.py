"""`load_from_checkpoint` of our own checkpoints: the arguments, what hooks have added, the weights."""

from argparse import Namespace

import pytest
import torch
from quiet import QUIET
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import treadle


class Tiny(treadle.TaskModule):
    def __init__(self, hidden=3, gone=0):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Linear(2, hidden)
        self.words = None

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["words"] = ["a", "b"]

    def on_load_checkpoint(self, checkpoint):
        self.words = (checkpoint["words"], checkpoint["epoch"], checkpoint["global_step"])


def saved(task, root, weights_only):
    trainer = treadle.Trainer(max_epochs=2, accelerator="cpu", **QUIET)
    loader = DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2)
    trainer.fit(task, loader)
    trainer.save_checkpoint(root / "c", weights_only=weights_only)
    return root / "c"


@pytest.mark.parametrize("weights_only", [False, True])
def test_hooks_get_back_what_they_added(tmp_path, weights_only):
    path = saved(Tiny(hidden=5), tmp_path, weights_only)
    again = Tiny.load_from_checkpoint(path)
    assert again.words == (["a", "b"], 2, 4)
    assert again.net.out_features == again.hparams["hidden"] == 5


class Renamed(Tiny):
    def __init__(self, hidden=3):
        super().__init__(hidden)


def test_an_argument_that_is_no_more_is_left_out_and_said(tmp_path):
    path = saved(Tiny(gone=7), tmp_path, False)
    words = "the saved hyperparameter gone is ignored, because Renamed has no such argument"
    with pytest.warns(UserWarning, match=words):
        again = Renamed.load_from_checkpoint(path)
    assert again.net.out_features == 3


class Whole(Tiny):
    def __init__(self, hparams):
        treadle.TaskModule.__init__(self)
        self.save_hyperparameters(hparams)
        self.net = nn.Linear(2, self.hparams.hidden)


@pytest.mark.parametrize("given", [{"hidden": 4, "name": "x"}, Namespace(hidden=4, name="x")])
def test_one_argument_that_holds_them_all(tmp_path, given):
    path = saved(Whole(given), tmp_path, False)
    again = Whole.load_from_checkpoint(path)
    assert again.hparams == {"hidden": 4, "name": "x"}
    assert again.net.out_features == 4


class Data(treadle.DataModule):
    """Nothing of it is to be saved."""

    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2)


def test_a_data_module_without_a_state_is_none_of_a_checkpoints_business(tmp_path):
    path = saved(Tiny(), tmp_path, False)
    trainer = treadle.Trainer(max_epochs=3, accelerator="cpu", **QUIET)
    trainer.fit(Tiny(), datamodule=Data(), ckpt_path=path)
    assert trainer.global_step == 6


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_checkpoint_as_the_dict_of_lightning(tmp_path, weights_only):
    from treadle.compat.fabric.utilities.cloud_io import _load as pl_load
    from treadle.compat.plugins.io import TorchCheckpointIO

    task = Tiny(hidden=4)
    path = saved(task, tmp_path, weights_only)
    with pytest.raises(IsADirectoryError):
        torch.load(path)
    for read in (treadle.load_checkpoint, pl_load, TorchCheckpointIO().load_checkpoint):
        checkpoint = read(path)
        again = Tiny(**checkpoint["hyper_parameters"])
        again.load_state_dict(checkpoint["state_dict"])
        assert torch.equal(again.net.weight, task.net.weight)
        assert (checkpoint["epoch"], checkpoint["global_step"], checkpoint["words"]) == (2, 4, ["a", "b"])
    file = tmp_path / "lightning.ckpt"
    content = {"state_dict": task.state_dict(), "epoch": 3, "global_step": 7, "hyper_parameters": {"hidden": 4}}
    torch.save(content, file)
    found = treadle.load_checkpoint(file, map_location="cpu")
    assert torch.equal(found.pop("state_dict")["net.weight"], task.net.weight)
    assert found == {name: value for name, value in content.items() if name != "state_dict"}
    assert pl_load(file)["epoch"] == 3
