"""Lightning's files of hyperparameters."""

import pytest
import torch
from support.trainers import make_trainer
from treadle.compat.core import saving

import treadle


def test_files_of_hyperparameters(tmp_path) -> None:
    values = {"batch_size": 32, "rate": 0.1, "root": "./x", "deep": {"a": [1, 2]}}
    saving.save_hparams_to_yaml(tmp_path / "h.yaml", values)
    assert saving.load_hparams_from_yaml(tmp_path / "h.yaml") == values
    assert type(saving.load_hparams_from_yaml(tmp_path / "h.yaml", use_omegaconf=False)) is dict
    assert saving.convert("x y") == "x y"
    saving.update_hparams(values, {"deep": {"b": 3}, "new": 1})
    assert values["deep"] == {"a": [1, 2], "b": 3}
    with pytest.raises(RuntimeError, match="does not exist"):
        saving.save_hparams_to_yaml(tmp_path / "no" / "h.yaml", values)


class Wide(treadle.TaskModule):
    def __init__(self, width: int = 1, depth: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(width, depth)

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path, **kwargs):
        return saving._load_from_checkpoint(cls, checkpoint_path, depth=2, **kwargs)


def test_lightnings_functions_below_load_from_checkpoint(tmp_path) -> None:
    trainer = make_trainer()
    trainer.strategy.connect(task := Wide(3, 2))
    trainer.save_checkpoint(tmp_path / "c.ckpt")
    checkpoint = torch.load(tmp_path / "c.ckpt", weights_only=True)
    for loaded in (Wide.load_from_checkpoint(tmp_path / "c.ckpt"), saving._load_state(Wide, checkpoint)):
        assert (loaded.hparams.width, loaded.hparams.depth) == (3, 2)
        torch.testing.assert_close(loaded.state_dict(), task.state_dict(), rtol=0, atol=0)
    del checkpoint["state_dict"]["layer.bias"]
    with pytest.raises(ValueError, match=r"layer\.bias"):
        saving._load_state(Wide, checkpoint)
    assert saving._load_state(Wide, checkpoint, strict=False, width=3).hparams.width == 3
