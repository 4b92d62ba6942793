"""Data modules: from checkpoints, around datasets, and what they are told."""

import pytest
import torch
from support.seen_batches import Task, data, trainer

import treadle


class Numbers(treadle.DataModule):
    def __init__(self, count=4, batch_size=1, loaded=False):
        self.save_hyperparameters(ignore="loaded")
        self.loaded = loaded
        self.calls = []

    def prepare_data(self):
        self.calls.append("prepare_data")

    def setup(self, stage):
        self.calls.append(f"setup {stage}")
        self.data = data(self.hparams.count)

    def teardown(self, stage):
        self.calls.append(f"teardown {stage}")

    def on_exception(self, exception):
        self.calls.append(f"exception {exception}")

    def train_dataloader(self):
        return torch.utils.data.DataLoader(self.data, self.hparams.batch_size)

    test_dataloader = val_dataloader = train_dataloader

    def state_dict(self):
        return {"loaded": True}

    def load_state_dict(self, state_dict):
        self.calls.append("load")
        self.loaded = state_dict["loaded"]


def test_from_a_checkpoint(tmp_path):
    module, own = Numbers(6, batch_size=3), trainer(max_epochs=1)
    own.fit(Task(), datamodule=module)
    own.save_checkpoint(tmp_path / "saved")
    assert module.calls == ["prepare_data", "setup fit", "teardown fit"]
    again = Numbers.load_from_checkpoint(tmp_path / "saved", batch_size=2)
    assert dict(again.hparams) == {"count": 6, "batch_size": 2}
    assert again.loaded
    with pytest.warns(UserWarning, match="weights_only=False"):
        Numbers.load_from_checkpoint(tmp_path / "saved", weights_only=False)
    for stage in ("fit", "validate"):  # before it is asked for loaders, and once
        fresh = Numbers()
        getattr(trainer(), stage)(Task(), datamodule=fresh, ckpt_path=tmp_path / "saved")
        assert fresh.calls == ["prepare_data", f"setup {stage}", "load", f"teardown {stage}"]


def test_lightnings_checkpoint(tmp_path):
    hparams = {"count": 8, "batch_size": 4, "gone": 1}
    content = {"state_dict": {}, "datamodule_hyper_parameters": hparams, "Numbers": {"loaded": True}}
    torch.save(content, tmp_path / "theirs.ckpt")
    with pytest.warns(UserWarning, match="the saved hyperparameter gone is ignored"):
        module = Numbers.load_from_checkpoint(tmp_path / "theirs.ckpt", map_location="cpu")
    assert dict(module.hparams) == {"count": 8, "batch_size": 4}
    assert module.loaded


def test_it_is_told_of_an_error():
    module, task = Numbers(), Task()
    task.configure_optimizers = lambda: {}["here"]
    with pytest.raises(KeyError):
        trainer().fit(task, datamodule=module)
    assert module.calls[-2:] == ["exception 'here'", "teardown fit"]


def test_where_data_is_prepared():
    for per_node in (True, False):
        module = Numbers()
        module.prepare_data_per_node = per_node
        trainer(max_epochs=1).fit(Task(), datamodule=module)
        assert module.calls.count("prepare_data") == 1
    module.prepare_data_per_node = "yes"
    with pytest.raises(TypeError, match="prepare_data_per_node='yes'"):
        trainer().fit(Task(), datamodule=module)


def test_around_datasets():
    module = Numbers.from_datasets({"a": data(3), "b": data(5)}, [data(4), data(2)], batch_size=2, count=7)
    assert dict(module.hparams) == {"count": 7, "batch_size": 2}
    loaders = module.train_dataloader()
    assert [type(loaders[name].sampler).__name__ for name in "ab"] == ["RandomSampler"] * 2
    assert [loader.batch_size for loader in module.val_dataloader()] == [2, 2]
