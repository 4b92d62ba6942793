"""`load_from_checkpoint` of our own checkpoints: the arguments, what hooks have added, the weights."""

import pytest
import torch
from support.models import Line, loader
from support.processes import run
from support.trainers import make_trainer
from treadle.compat.fabric.utilities.cloud_io import _load as pl_load
from treadle.compat.plugins.io import TorchCheckpointIO

import treadle


class Tiny(Line):
    def __init__(self, hidden=3):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Linear(2, hidden)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["words"] = ["a", "b"]

    def on_load_checkpoint(self, checkpoint):
        self.words = (checkpoint["words"], checkpoint["epoch"], checkpoint["global_step"])


def saved(task, root, weights_only):
    trainer = make_trainer(max_epochs=2)
    trainer.fit(task, loader())
    trainer.save_checkpoint(root / "c", weights_only=weights_only)
    return root / "c"


def test_a_data_module_without_a_state_is_none_of_a_checkpoints_business(tmp_path):
    path = saved(Tiny(), tmp_path, False)
    trainer, data = make_trainer(max_epochs=3), treadle.DataModule()
    data.train_dataloader = loader
    trainer.fit(Tiny(), datamodule=data, ckpt_path=path)
    assert trainer.global_step == 6


@pytest.mark.parametrize("weights_only", [False, True])
def test_a_checkpoint_as_the_dict_of_lightning(tmp_path, weights_only):
    task = Tiny(hidden=4)
    path = saved(task, tmp_path, weights_only)
    for read in (torch.load, treadle.load_checkpoint, pl_load, TorchCheckpointIO().load_checkpoint):
        checkpoint = read(path)
        again = Tiny(**checkpoint["hyper_parameters"])
        again.load_state_dict(checkpoint["state_dict"])
        assert torch.equal(again.net.weight, task.net.weight)
        assert (checkpoint["epoch"], checkpoint["global_step"], checkpoint["words"]) == (2, 4, ["a", "b"])
    again = Tiny.load_from_checkpoint(path)
    assert again.words == (["a", "b"], 2, 4)
    assert again.net.out_features == again.hparams["hidden"] == 4
    file = tmp_path / "lightning.ckpt"
    content = {"state_dict": task.state_dict(), "epoch": 3, "global_step": 7, "hyper_parameters": {"hidden": 4}}
    torch.save(content, file)
    found = treadle.load_checkpoint(file, map_location="cpu")
    assert torch.equal(found.pop("state_dict")["net.weight"], task.net.weight)
    assert found == {name: value for name, value in content.items() if name != "state_dict"}
    assert pl_load(file)["epoch"] == 3


def test_an_argument_that_the_class_does_not_take_is_ignored_with_a_warning(tmp_path):
    path = saved(Tiny(hidden=5), tmp_path, False)
    with pytest.warns(UserWarning, match="hiden, other: ignored, because Tiny has no such argument. Did you mean 'hid"):
        again = Tiny.load_from_checkpoint(path, hiden=7, other=1)
    assert again.net.out_features == 5
    assert dict(again.hparams) == {"hidden": 5}


def test_a_checkpoint_that_does_not_exist_is_a_file_not_found_error(tmp_path):
    trainer = make_trainer()
    path = tmp_path / "none.ckpt"
    calls = [
        lambda: trainer.fit(Tiny(), loader(), ckpt_path=path),
        lambda: trainer.predict(Tiny(), loader(), ckpt_path=str(path)),
        lambda: Tiny.load_from_checkpoint(path),
        lambda: treadle.DataModule.load_from_checkpoint(path),
        lambda: treadle.load_checkpoint(path),
        lambda: treadle.load_weights(Tiny(), path),
        lambda: treadle.Accelerator(cpu=True).load_state(path),
        lambda: Tiny.load_from_checkpoint(f"memory://{tmp_path}/none.ckpt"),
    ]
    for number, call in enumerate(calls):
        with pytest.raises(FileNotFoundError, match=r"none\.ckpt") as caught:
            call()
        assert isinstance(caught.value, ValueError), number  # as all errors about checkpoints
        assert caught.value.__cause__ is None, number
        assert caught.value.__context__ is None or number == len(calls) - 1
    path.mkdir()
    for call in calls[:-1]:
        with pytest.raises(ValueError, match=r"none\.ckpt") as caught:
            call()
        assert not isinstance(caught.value, FileNotFoundError)


class Wraps(Tiny):
    def __init__(self, net):
        super().__init__()
        self.save_hyperparameters()
        self.net = net


def start_from_scratch(path):
    """Then load a task whose argument is a module, which only this process still has."""
    trainer, task = make_trainer(devices=2), Wraps(torch.nn.Linear(2, 3))
    accelerator = treadle.Accelerator(cpu=True)
    for call in (lambda: trainer.fit(task, loader(), ckpt_path=path), lambda: accelerator.load_state(path)):
        with pytest.raises(FileNotFoundError):
            call()
    trainer.fit(task, loader())
    trainer.save_checkpoint(f"{path} saved")
    again = Wraps.load_from_checkpoint(f"{path} saved")
    return trainer.global_step, again.net is not task.net and torch.equal(again.net.weight, task.net.weight)


def test_every_rank_may_catch_it_and_has_its_objects(tmp_path):
    assert run(start_from_scratch, 2, str(tmp_path / "none")) == [(1, True)] * 2
