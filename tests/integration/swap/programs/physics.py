"""Physics-informed solver: PINA 0.3.2, pina/_src/callback and pina/_src/core/trainer.py.

A Trainer subclass that owns its solver, a callback that replaces ``trainer.strategy.optimizers`` in mid-run, one that
copies ``trainer.logged_metrics`` at epochs' ends, and one that draws new points through the data module.
"""

import copy

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader, TensorDataset


class SwitchOptimizer(Callback):
    def __init__(self, new_optimizer, epoch_switch):
        super().__init__()
        self._new_optimizer, self._epoch_switch = new_optimizer, epoch_switch

    def on_train_epoch_start(self, trainer, __):
        if trainer.current_epoch == self._epoch_switch:
            trainer.strategy.optimizers = [self._new_optimizer(trainer.solver.parameters())]


class MetricTracker(Callback):
    def __init__(self):
        super().__init__()
        self._collection = []

    def on_train_epoch_end(self, trainer, __):
        if trainer.current_epoch > 0:
            self._collection.append(copy.deepcopy({k: v for k, v in trainer.logged_metrics.items() if "loss" in k}))


class Refinement(Callback):
    def on_train_start(self, trainer, solver):
        self.points = trainer.datamodule.points

    def on_train_epoch_end(self, trainer, solver):
        if trainer.current_epoch % 2 == 0 and trainer.current_epoch != 0:
            with torch.no_grad():
                residual = solver.residual(self.points).abs().flatten()
            self.points[residual < residual.mean()] *= 0.5


class Points(LightningDataModule):
    def __init__(self, points):
        super().__init__()
        self.points = points

    def train_dataloader(self):
        return DataLoader(TensorDataset(self.points), 10)


class Solver(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def residual(self, x):
        return self.net(x) - x.sin()

    def training_step(self, batch, batch_idx):
        loss = self.residual(batch[0]).pow(2).mean()
        self.log("train_loss", loss, on_epoch=True, prog_bar=True, batch_size=len(batch[0]), logger=True)
        return loss

    def configure_optimizers(self):
        return [torch.optim.Adam(self.parameters(), lr=0.05)]


class SolverTrainer(Trainer):
    def __init__(self, solver, points, **kwargs):
        kwargs.setdefault("logger", False)
        super().__init__(accelerator="cpu", enable_progress_bar=False, enable_model_summary=False, **kwargs)
        self.solver, self.points = solver, Points(points)

    def train(self, **kwargs):
        return super().fit(self.solver, datamodule=self.points, **kwargs)


def main(root):
    seed_everything(9)
    tracker = MetricTracker()
    callbacks = [SwitchOptimizer(lambda p: torch.optim.SGD(p, lr=0.1), 3), tracker, Refinement()]
    flags = {"default_root_dir": root, "enable_checkpointing": False}
    trainer = SolverTrainer(Solver(), torch.rand(30, 1) * 3, max_epochs=6, callbacks=callbacks, **flags)
    trainer.train()
    return {
        "tracked": [{name: value.item() for name, value in row.items()} for row in tracker._collection],
        "optimizer": type(trainer.optimizers[0]).__name__,
    }
