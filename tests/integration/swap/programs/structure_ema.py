"""Averaged weights in a callback: boltz 2.2.1, boltz/model/optim/ema.py.

The callback swaps all of ``state_dict()`` for evaluation, is saved under a key of its own in ``on_save_checkpoint``,
and a second Trainer resumes from the file.
"""

import torch
from lightning import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

OFF = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class EMA(Callback):
    def __init__(self, decay=0.9):
        self.decay, self._ema_weights, self._cur_step = decay, None, None

    def on_load_checkpoint(self, trainer, pl_module, checkpoint):
        if "ema" in checkpoint:
            self._cur_step, self._ema_weights = checkpoint["ema"]["cur_step"], checkpoint["ema"]["ema_weights"]

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        if self._ema_weights is not None:
            checkpoint["ema"] = {"cur_step": self._cur_step, "ema_weights": self._ema_weights}

    def on_train_start(self, trainer, pl_module):
        if self._ema_weights is None:
            self._ema_weights = {k: p.detach().clone() for k, p in pl_module.state_dict().items()}
        self._ema_weights = {k: p.to(pl_module.device) for k, p in self._ema_weights.items()}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step != self._cur_step:
            self._cur_step = trainer.global_step
            for k, weight in pl_module.state_dict().items():
                self._ema_weights[k].sub_((self._ema_weights[k] - weight) * (1 - self.decay))

    def on_validation_start(self, trainer, pl_module):
        if self._ema_weights is not None:
            self._weights_buffer = {k: p.detach().clone().to("cpu") for k, p in pl_module.state_dict().items()}
            pl_module.load_state_dict(self._ema_weights, strict=False)

    def on_validation_end(self, trainer, pl_module):
        if self._ema_weights is not None:
            pl_module.load_state_dict(self._weights_buffer, strict=False)
            del self._weights_buffer

    on_test_start, on_test_end = on_validation_start, on_validation_end


class Boltz(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        loss = (self.layer(batch[0]) - 1).pow(2).mean()
        self.log("train/loss", loss)
        return loss

    def on_train_epoch_end(self):
        self.log("train/param_norm", sum(p.norm() ** 2 for p in self.parameters()).sqrt(), prog_bar=False)

    def validation_step(self, batch, batch_idx):
        self.log("val/lddt", (self.layer(batch[0]) - 1).pow(2).mean(), prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.05)


def main(root):
    seed_everything(8)
    x = torch.randn(32, 4)
    loaders = DataLoader(TensorDataset(x), 8), DataLoader(TensorDataset(x), 32)
    results = []
    for epochs, path in ((2, None), (4, f"{root}/last.ckpt")):
        model, ema = Boltz(), EMA()
        saver = ModelCheckpoint(dirpath=root, save_last=True, save_top_k=1, monitor="val/lddt", every_n_epochs=1)
        trainer = Trainer(
            default_root_dir=root, max_epochs=epochs, callbacks=[ema, saver], reload_dataloaders_every_n_epochs=1, **OFF
        )
        trainer.fit(model, *loaders, ckpt_path=path)
        metrics = {n: v.item() for n, v in trainer.callback_metrics.items()}
        results.append(metrics | {"average": ema._ema_weights["layer.weight"].tolist(), "step": ema._cur_step})
    return results
