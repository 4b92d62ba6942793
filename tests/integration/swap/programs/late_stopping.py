"""Early stopping at the end of training too: DiYi1999/SpaceHMchat, Code/AD_repository/model/mycallback.py."""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping
from torch.utils.data import DataLoader, TensorDataset

OFF = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class MyEarlyStopping(EarlyStopping):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.checks = []

    def on_validation_end(self, trainer, pl_module):
        pass

    def on_train_epoch_end(self, trainer, pl_module):
        self._run_early_stopping_check(trainer)
        self.checks.append([trainer.current_epoch, self.wait_count, float(self.best_score)])

    def on_train_end(self, trainer, pl_module):
        self._run_early_stopping_check(trainer)
        self.checks.append(["end", self.wait_count, self.stopped_epoch])


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).pow(2).mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layer(batch[0]).pow(2).mean())

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=1.3)]


def main(root):
    seed_everything(5)
    x = torch.randn(24, 3)
    stopping = MyEarlyStopping(monitor="val_loss", patience=2, mode="min", verbose=False)
    trainer = Trainer(default_root_dir=root, max_epochs=12, callbacks=[stopping], enable_checkpointing=False, **OFF)
    trainer.fit(Model(), DataLoader(TensorDataset(x), 8), DataLoader(TensorDataset(x), 24))
    return {"checks": stopping.checks, "epoch": trainer.current_epoch, "step": trainer.global_step}
