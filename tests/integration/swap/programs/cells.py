"""Training plans: scvi-tools 1.4.2, scvi/train (_trainer.py, _trainingplans.py, _callbacks.py, _logger.py).

A Trainer subclass with defaults of its own, an EarlyStopping that overrides ``_evaluate_stopping_criteria``, a logger
that keeps a history in memory, and a KL weight that follows ``current_epoch``.
"""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import DataLoader

OFF = {"num_sanity_val_steps": 0, "enable_checkpointing": False, "enable_progress_bar": False}
OFF["enable_model_summary"] = False
NAMES = ("elbo_train", "elbo_validation", "validation_loss", "train_loss_epoch")


class SimpleLogger(Logger):
    version = 1

    def __init__(self, name="lightning_logs"):
        super().__init__()
        self._name, self._experiment = name, None

    @property
    @rank_zero_experiment
    def experiment(self):
        if self._experiment is None:
            self._experiment = {}
        return self._experiment

    @rank_zero_only
    def log_hyperparams(self, params):
        pass

    @rank_zero_only
    def log_metrics(self, metrics, step):
        for name, value in metrics.items():
            self.experiment.setdefault(name, []).append(float(value))

    @property
    def name(self):
        return self._name


class LoudEarlyStopping(EarlyStopping):
    def __init__(self, **kwargs):
        self.warmup_epochs = kwargs.pop("warmup_epochs")
        super().__init__(**kwargs)
        self.early_stopping_reason, self._current_step = None, 0

    def _evaluate_stopping_criteria(self, current):
        self._current_step += 1
        if self._current_step <= self.warmup_epochs:
            return False, "Early Stop not applied"
        should_stop, reason = super()._evaluate_stopping_criteria(current)
        if should_stop:
            self.early_stopping_reason = reason
        return should_stop, reason


class CellTrainer(Trainer):
    def __init__(self, accelerator="cpu", max_epochs=20, callbacks=None, logger=None, **kwargs):
        callbacks = [] if callbacks is None else callbacks
        callbacks.append(
            LoudEarlyStopping(monitor="elbo_validation", min_delta=0.05, patience=2, mode="min", warmup_epochs=3)
        )
        super().__init__(
            accelerator=accelerator,
            max_epochs=max_epochs,
            callbacks=callbacks,
            logger=logger or SimpleLogger(),
            check_val_every_n_epoch=1,
            log_every_n_steps=10,
            **kwargs,
        )


class TrainingPlan(LightningModule):
    def __init__(self, module, *, lr=0.05, n_epochs_kl_warmup=4):
        super().__init__()
        self.module, self.lr, self.n_epochs_kl_warmup = module, lr, n_epochs_kl_warmup
        self.metrics = {"train": [], "validation": []}

    @property
    def kl_weight(self):
        return min(1.0, self.current_epoch / self.n_epochs_kl_warmup)

    def step(self, batch, mode):
        reconstruction = (self.module(batch["X"]) - batch["X"]).pow(2).mean()
        loss = reconstruction + self.kl_weight * 0.1 * self.module.weight.pow(2).sum()
        self.metrics[mode].append(reconstruction.detach() * len(batch["X"]))
        self.log(f"{mode}_loss", loss, on_epoch=True, batch_size=len(batch["X"]), prog_bar=True)
        return loss

    def training_step(self, batch, batch_idx):
        if "kl_weight" not in batch:
            self.log("kl_weight", self.kl_weight, on_step=True, on_epoch=False)
        return self.step(batch, "train")

    def validation_step(self, batch, batch_idx):
        self.step(batch, "validation")

    def on_train_epoch_end(self):
        self.log("elbo_train", torch.stack(self.metrics["train"]).sum() / 30)
        self.metrics["train"].clear()

    def on_validation_epoch_end(self):
        self.log("elbo_validation", torch.stack(self.metrics["validation"]).sum() / 10)
        self.metrics["validation"].clear()

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.module.parameters(), lr=self.lr, eps=0.01, weight_decay=1e-6)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2, factor=0.6, min_lr=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "elbo_validation"}}


def main(root):
    seed_everything(0)
    rows = [{"X": x} for x in torch.randn(40, 3)]
    plan = TrainingPlan(torch.nn.Linear(3, 3))
    trainer = CellTrainer(default_root_dir=root, **OFF)
    trainer.fit(plan, DataLoader(rows[:30], 10), DataLoader(rows[30:], 10))
    stopping = trainer.early_stopping_callback
    return {
        "epochs": trainer.current_epoch,
        "reason": stopping.early_stopping_reason is not None,
        "is": trainer.is_global_zero,
        "history": {name: trainer.logger.experiment[name] for name in NAMES},
    }
