"""Metrics of all epochs: A-Lohse/deeplearningproject, src/callbacks/metrics_callback.py.

Callbacks that copy ``trainer.callback_metrics`` as it is after each epoch, and LambdaCallback.
"""

import copy

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import LambdaCallback
from torch.utils.data import DataLoader, TensorDataset

OFF = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class MetricsCallback(Callback):
    def __init__(self):
        super().__init__()
        self.metrics, self.trained = [], []

    def on_validation_epoch_end(self, trainer, pl_module):
        self.metrics.append(copy.deepcopy(trainer.callback_metrics))

    def on_train_epoch_end(self, trainer, pl_module):
        self.trained.append(copy.deepcopy(trainer.logged_metrics))


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def training_step(self, batch, batch_idx):
        loss = torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])
        self.log("loss/train", loss, on_epoch=True, on_step=False)
        return loss

    def validation_step(self, batch, batch_idx):
        out = self.layer(batch[0])
        self.log("loss/val", torch.nn.functional.cross_entropy(out, batch[1]))
        self.log("acc/val", (out.argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)


def main(root):
    seed_everything(3, workers=True)
    x = torch.randn(50, 3)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    history, calls = MetricsCallback(), []
    lambdas = LambdaCallback(
        setup=lambda trainer, pl_module, stage: calls.append(f"setup {getattr(stage, 'value', stage)}"),
        on_train_epoch_start=lambda *args: calls.append("epoch"),
        on_train_end=lambda trainer, pl_module: calls.append(f"end {trainer.global_step}"),
    )
    trainer = Trainer(
        default_root_dir=root,
        max_epochs=3,
        callbacks=[history, lambdas],
        enable_checkpointing=False,
        num_sanity_val_steps=2,
        **OFF,
    )
    trainer.fit(Model(), DataLoader(data, 16), DataLoader(data, 20))

    def plain(rows):
        return [{name: value.item() for name, value in row.items()} for row in rows]

    return {"metrics": plain(history.metrics), "trained": plain(history.trained), "calls": calls}
