"""Finetuning in phases: IGNF/myria3d, lidar_multiclass/callbacks/finetuning_callbacks.py.

A BaseFinetuning freezes all but the last layer and adds parameter groups with ``unfreeze_and_add_param_group``.
"""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

OFF = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class FinetuningFreezeUnfreeze(BaseFinetuning):
    def __init__(self, unfreeze_decoder_train_epoch=1, unfreeze_encoder_train_epoch=2):
        super().__init__()
        self._unfreeze_decoder_epoch = unfreeze_decoder_train_epoch
        self._unfreeze_encoder_epoch = unfreeze_encoder_train_epoch

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.model)
        self.make_trainable(pl_module.model["fc_end"])

    def finetune_function(self, pl_module, current_epoch, optimizer):
        for name, epoch in (("decoder", self._unfreeze_decoder_epoch), ("encoder", self._unfreeze_encoder_epoch)):
            if current_epoch == epoch:
                self.unfreeze_and_add_param_group(pl_module.model[name], optimizer, initial_denom_lr=100)


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        parts = {"encoder": nn.Linear(4, 8), "decoder": nn.Sequential(nn.Linear(8, 8), nn.ReLU())}
        self.model = nn.ModuleDict({**parts, "fc_end": nn.Linear(8, 1)})
        self.seen = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        for part in self.model.values():
            x = part(x)
        loss = nn.functional.mse_loss(x, y)
        self.log("train/loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "logits": x.detach()}

    def on_train_epoch_start(self):
        trained = sum(p.numel() for p in self.parameters() if p.requires_grad)
        self.seen.append([trained, [group["lr"] for group in self.optimizers().param_groups]])

    def configure_optimizers(self):
        return torch.optim.Adam(filter(lambda p: p.requires_grad, self.parameters()), lr=0.01)


def main(root):
    seed_everything(7)
    x = torch.randn(48, 4)
    model = Model()
    phases = FinetuningFreezeUnfreeze()
    trainer = Trainer(default_root_dir=root, max_epochs=4, callbacks=[phases], enable_checkpointing=False, **OFF)
    trainer.fit(model, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8))
    return {
        "seen": model.seen,
        "loss": trainer.callback_metrics["train/loss_epoch"].item(),
        "groups": [[group["lr"], len(group["params"])] for group in trainer.optimizers[0].param_groups],
        "weight": model.model["encoder"].weight.sum().item(),
    }
