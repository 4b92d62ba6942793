"""Forces by differentiation in evaluation: matgl 4.1.2, matgl/utils/training.py.

``on_test_model_eval`` turns gradients on, the Trainer runs with ``inference_mode=False``, one mixin defines all the
steps.
"""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

OFF = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class MatglLightningModuleMixin:
    def training_step(self, batch, batch_idx):
        results, batch_size = self.step(batch)
        self.log_dict(
            {f"train_{k}": v for k, v in results.items()}, batch_size=batch_size, on_epoch=True, on_step=False
        )
        return results["Total_Loss"]

    def on_train_epoch_end(self):
        sch = self.lr_schedulers()
        if not isinstance(sch, torch.optim.lr_scheduler.CosineAnnealingLR):
            sch.step()

    def validation_step(self, batch, batch_idx):
        results, batch_size = self.step(batch)
        self.log_dict({f"val_{k}": v for k, v in results.items()}, batch_size=batch_size, sync_dist=True)
        return results["Total_Loss"]

    def test_step(self, batch, batch_idx):
        torch.set_grad_enabled(True)
        results, batch_size = self.step(batch)
        self.log_dict({f"test_{k}": v for k, v in results.items()}, batch_size=batch_size)
        return results

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40, eta_min=2e-4)]

    def on_test_model_eval(self, *args, **kwargs):
        super().on_test_model_eval(*args, **kwargs)
        torch.set_grad_enabled(True)


class PotentialLightningModule(MatglLightningModuleMixin, LightningModule):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Softplus(), torch.nn.Linear(8, 1))
        self.save_hyperparameters(ignore=["model"])

    def step(self, batch):
        pos = batch[0].clone().requires_grad_(True)
        torch.set_grad_enabled(True)
        energy = self.model(pos)
        forces = -torch.autograd.grad(energy.sum(), pos, create_graph=True)[0]
        force_loss = (forces + 2 * batch[0]).pow(2).mean()
        return {"Total_Loss": force_loss + 0.1 * energy.pow(2).mean(), "Force_MAE": force_loss.sqrt().detach()}, len(
            pos
        )


def main(root):
    seed_everything(14)
    x = torch.randn(45, 3)
    loader = DataLoader(TensorDataset(x), 15)
    best = ModelCheckpoint(dirpath=root, filename="best", monitor="val_Total_Loss", mode="min", save_top_k=1)
    trainer = Trainer(default_root_dir=root, max_epochs=4, callbacks=[best], inference_mode=False, **OFF)
    model = PotentialLightningModule()
    trainer.fit(model, loader, loader)
    fitted = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return {"fitted": fitted, "best": best.best_model_score.item(), "tested": trainer.test(model, loader)}
