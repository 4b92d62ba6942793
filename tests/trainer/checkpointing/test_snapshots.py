"""The last complete step, which is saved after an error, has all that a checkpoint has."""

import pytest
import torch
from quiet import trainer
from treadle.callbacks import ModelCheckpoint
from treadle.compat.demos.boring_classes import BoringModel
from treadle.engine.checkpoint import OpenCheckpoint, encode
from treadle.engine.checkpoint import save as saving


class Fails(BoringModel):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 2:
            self.trainer.save_checkpoint(self.folder / "asked.ckpt")

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 3:
            raise RuntimeError("planned")


def test_a_new_entry_of_the_state_is_added_in_one_place(tmp_path, monkeypatch):
    collect = saving.collect_train_state

    def collect_more(*args, **options):
        return collect(*args, **options) | {"new": torch.ones(2)}

    monkeypatch.setattr(saving, "collect_train_state", collect_more)
    task = Fails()
    task.folder = tmp_path
    callback = ModelCheckpoint(tmp_path / "c", save_top_k=0, save_on_exception=True)
    made = trainer(enable_checkpointing=True, limit_train_batches=5, callbacks=[callback])
    with pytest.raises(RuntimeError, match="planned"):
        made.fit(task)
    (crashed,) = (tmp_path / "c").iterdir()
    asked, left = (OpenCheckpoint(path).read_part("state") for path in (tmp_path / "asked.ckpt", crashed))
    assert asked.keys() == left.keys()
    assert len(asked) == len(saving.TrainState.__annotations__) + 1
    assert torch.equal(left["new"], torch.ones(2))
    assert asked["registered"].keys() - left["registered"].keys() <= {"logged"}
    for name in asked.keys() - {"registered", "new"}:
        assert encode(asked[name])[0] == encode(left[name])[0], name
