"""A module that owns its Trainer: deepforest 2.1.0, deepforest/main.py.

``create_trainer`` assigns ``self.trainer`` before any stage; ``on_save_checkpoint`` changes the hyperparameters and
adds a label dictionary; ``load_from_checkpoint`` reads both.
"""

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

OFF = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class deepforest(pl.LightningModule):
    def __init__(self, num_classes=2, label_dict=None, config=None):
        super().__init__()
        self.config = config or {"train": {"lr": 0.1, "epochs": 3}}
        self.label_dict = label_dict or {"Tree": 0, "Bird": 1}
        self.model = torch.nn.Linear(4, num_classes)
        self.x = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
        self.create_trainer()
        self.save_hyperparameters({"num_classes": num_classes, "config": self.config})

    def create_trainer(self, **kwargs):
        arguments = {"max_epochs": self.config["train"]["epochs"], "enable_checkpointing": False, **OFF} | kwargs
        self.trainer = pl.Trainer(**arguments)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["hyper_parameters"]["config"] = self.config
        checkpoint["label_dict"] = self.label_dict

    def on_load_checkpoint(self, checkpoint):
        self.label_dict = checkpoint["label_dict"]

    def train_dataloader(self):
        return DataLoader(TensorDataset(self.x, (self.x[:, 0] > 0).long()), 10)

    def val_dataloader(self):
        return DataLoader(TensorDataset(self.x, (self.x[:, 0] > 0).long()), 40)

    def training_step(self, batch, batch_idx):
        self.model.train()
        loss = torch.nn.functional.cross_entropy(self.model(batch[0]), batch[1])
        self.log_dict({"train_loss": loss}, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", torch.nn.functional.cross_entropy(self.model(batch[0]), batch[1]), on_epoch=True)

    def predict_step(self, batch, batch_idx):
        return self.model(batch[0]).argmax(1)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.model.parameters(), lr=self.config["train"]["lr"], momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="min", factor=0.1, patience=5)
        return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "val_loss"}


def main(root):
    pl.seed_everything(0)
    module = deepforest()
    module.label_dict = {"Oak": 0, "Owl": 1}
    module.create_trainer(default_root_dir=root)
    module.trainer.fit(module)
    losses = {name: value.item() for name, value in module.trainer.callback_metrics.items()}
    module.trainer.save_checkpoint(f"{root}/forest.ckpt")
    after = deepforest.load_from_checkpoint(f"{root}/forest.ckpt")
    predictions = after.trainer.predict(after, after.val_dataloader())
    return {
        "losses": losses,
        "labels": after.label_dict,
        "config": after.hparams["config"],
        "validated": after.trainer.validate(after),
        "predictions": torch.cat(predictions).tolist(),
        "weight": after.model.weight.tolist(),
    }
