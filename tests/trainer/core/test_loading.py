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
    with pytest.warns(UserWarning, match="Renamed takes no gone, which was saved with it"):
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
