"""`torch.set_default_device` is the user's: what Treadle keeps on the host stays there."""

import pytest
import torch
from support.models import Scored
from support.processes import run
from support.trainers import make_trainer
from torch.utils.data import DataLoader, TensorDataset
from treadle.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint

import treadle


class Task(Scored):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)  # torch 2.11's AdamW counts on that device


def fit(folder, strategy, device):
    """As on a GPU: "meta" is a device that is not the host's, and values on it can't be read."""
    treadle.seed_everything(3)
    task = Task()
    loader = DataLoader(TensorDataset(torch.arange(16.0).reshape(8, 2) / 16), 2)
    callbacks = [ModelCheckpoint(folder, monitor="val_loss"), EarlyStopping("val_loss"), EMAWeightAveraging()]
    devices = 2 if strategy == "ddp" else 1
    own = make_trainer(
        max_epochs=2, devices=devices, strategy=strategy, gradient_clip_val=1.0, callbacks=callbacks,
        default_root_dir=folder, enable_checkpointing=True,
    )  # fmt: skip
    torch.set_default_device(device)
    try:
        own.fit(task, loader, loader)
        own.fit(task, loader, loader, ckpt_path="last")
    finally:
        torch.set_default_device(None)
    return [p.detach().tolist() for p in task.parameters()], {k: float(v) for k, v in own.callback_metrics.items()}


@pytest.mark.parametrize("strategy", ["auto", pytest.param("ddp", marks=pytest.mark.exhaustive)])
@pytest.mark.filterwarnings("ignore")
def test_the_run_is_the_same_under_any_default_device(tmp_path, strategy):
    if strategy == "ddp":
        plain, other = (run(fit, 2, tmp_path / str(device), strategy, device) for device in (None, "meta"))
    else:
        plain, other = (fit(tmp_path / str(device), strategy, device) for device in (None, "meta"))
    assert plain == other
