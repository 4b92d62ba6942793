"""A variational autoencoder of waves, with a data module.

python autoencoder.py --epochs 5 --out results.json
"""

import argparse
import json
import os
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import BasePredictionWriter, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset, random_split


def waves(count: int, length: int) -> torch.Tensor:
    """Damped waves, by formula."""
    number = torch.arange(count, dtype=torch.float64).unsqueeze(1)
    time = torch.linspace(0, 1, length, dtype=torch.float64)
    return torch.sin((1 + number % 7) * 3 * time + number * 0.37) * torch.exp(-time * (number % 5) / 2)


class EpochSampler(Sampler):
    """Another order in every epoch, which follows from its number."""

    def __init__(self, data, seed: int = 0):
        self.data, self.seed, self.epoch = data, seed, 0

    def set_epoch(self, epoch: int):
        self.epoch = epoch

    def __len__(self):
        return len(self.data)

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return iter(torch.randperm(len(self.data), generator=generator).tolist())


class WavesDataModule(LightningDataModule):
    def __init__(self, data_dir: str = "./", batch_size: int = 32, length: int = 24, sequential: bool = False):
        super().__init__()
        self.save_hyperparameters()
        self.file = os.path.join(data_dir, "waves.pt")
        self.stages = []
        self.epochs_seen = 0

    def prepare_data(self):
        os.makedirs(self.hparams.data_dir, exist_ok=True)
        torch.save(waves(400, self.hparams.length), self.file)

    def setup(self, stage: str | None = None):
        self.stages.append(stage)
        data = torch.load(self.file)
        if stage == "fit" or stage is None:
            full = TensorDataset(data[:320])
            self.train, self.val = random_split(full, [256, 64], generator=torch.Generator().manual_seed(42))
        if stage == "test" or stage is None:
            self.test = TensorDataset(data[320:])
        if stage == "predict":
            self.rest = TensorDataset(data[320:360])

    def _loader(self, data, sampler=None):
        workers = torch.Generator().manual_seed(1234)
        return DataLoader(data, batch_size=self.hparams.batch_size, sampler=sampler, generator=workers)

    def train_dataloader(self):
        return self._loader(self.train, None if self.hparams.sequential else EpochSampler(self.train, seed=5))

    def val_dataloader(self):
        return self._loader(self.val)

    def test_dataloader(self):
        return self._loader(self.test)

    def predict_dataloader(self):
        return self._loader(self.rest)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        (x,) = batch
        if self.trainer.training:
            x = x + 0.05 * torch.randn_like(x)
        return x

    def state_dict(self):
        return {"epochs_seen": self.trainer.current_epoch + 1}

    def load_state_dict(self, state_dict):
        self.epochs_seen = state_dict["epochs_seen"]

    def teardown(self, stage: str | None = None):
        self.torn_down = stage


class VAE(LightningModule):
    def __init__(self, input_dim: int, latent_dim: int = 4, hidden=(32, 16), beta: float = 0.01, lr: float = 3e-3):
        super().__init__()
        self.save_hyperparameters()
        sizes = [input_dim, *hidden]
        encoder = []
        for i in range(len(hidden)):
            encoder += [nn.Linear(sizes[i], sizes[i + 1]), nn.GELU()]
        self.encoder = nn.Sequential(*encoder)
        self.fc_mu, self.fc_var = nn.Linear(sizes[-1], latent_dim), nn.Linear(sizes[-1], latent_dim)
        self.decoder = nn.Sequential(nn.Linear(latent_dim, sizes[-1]), nn.GELU(), nn.Linear(sizes[-1], input_dim))

    def forward(self, x):
        return self.decoder(self.fc_mu(self.encoder(x)))

    def _run_step(self, x):
        x_encoded = self.encoder(x)
        mu, log_var = self.fc_mu(x_encoded), self.fc_var(x_encoded)
        z = torch.distributions.Normal(mu, torch.exp(log_var / 2)).rsample()
        return z, self.decoder(z), mu, log_var

    def step(self, x):
        _, x_hat, mu, log_var = self._run_step(x)
        recon_loss = F.mse_loss(x_hat, x)
        kl = -0.5 * (1 + log_var - mu.pow(2) - log_var.exp()).sum(dim=1).mean()
        loss = recon_loss + self.hparams.beta * kl
        return loss, {"recon_loss": recon_loss, "kl": kl, "loss": loss}

    def training_step(self, batch, batch_idx):
        loss, logs = self.step(batch)
        self.log_dict({f"train_{k}": v for k, v in logs.items()}, on_step=True, on_epoch=False)
        return loss

    def validation_step(self, batch, batch_idx):
        loss, logs = self.step(batch)
        self.log_dict({f"val_{k}": v for k, v in logs.items()})
        return loss

    def test_step(self, batch, batch_idx):
        self.log("test_mse", F.mse_loss(self(batch), batch), batch_size=batch.size(0))
        self.log("test_max", (self(batch) - batch).abs().max(), reduce_fx=torch.max)

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return self.fc_mu(self.encoder(batch))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=self.hparams.lr * 3, total_steps=int(self.trainer.estimated_stepping_batches)
        )
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": 1}]

    def on_save_checkpoint(self, checkpoint):
        checkpoint["latent_names"] = [f"z{i}" for i in range(self.hparams.latent_dim)]

    def on_load_checkpoint(self, checkpoint):
        self.latent_names = checkpoint["latent_names"]


class LatentWriter(BasePredictionWriter):
    def __init__(self, output_dir, write_interval="epoch"):
        super().__init__(write_interval)
        self.output_dir = output_dir

    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        os.makedirs(self.output_dir, exist_ok=True)
        torch.save(torch.cat(list(predictions)), os.path.join(self.output_dir, f"latents_{trainer.global_rank}.pt"))


class Tracker(Callback):
    """Counts what happens, and keeps it in the checkpoint."""

    def __init__(self):
        self.state = {"batches": 0, "epochs": 0}
        self.losses = []

    @property
    def state_key(self):
        return "Tracker[batches]"

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.state["batches"] += 1

    def on_train_batch_end(self, trainer, pl_module, outputs, *args):
        self.losses.append(outputs["loss"].item())

    def on_train_epoch_end(self, trainer, pl_module):
        self.state["epochs"] += 1

    def state_dict(self):
        return self.state.copy()

    def load_state_dict(self, state_dict):
        self.state.update(state_dict)


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default="runs/autoencoder")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--sequential", action="store_true")
    parser.add_argument("--out")
    args = parser.parse_args(argv)

    seed_everything(1234, workers=True)
    datamodule = WavesDataModule(os.path.join(args.root, "data"), batch_size=32, sequential=args.sequential)
    model = VAE(input_dim=datamodule.hparams.length, hidden=(32, 16))
    tracker = Tracker()
    checkpoint_callback = ModelCheckpoint(monitor="val_loss", save_last=True, auto_insert_metric_name=False)
    trainer = Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy="ddp" if args.devices > 1 else "auto",
        precision="64-true",
        max_epochs=args.epochs,
        gradient_clip_val=1.0,
        callbacks=[checkpoint_callback, tracker, LatentWriter(os.path.join(args.root, "latents"))],
        logger=[CSVLogger(args.root, name="csv"), TensorBoardLogger(args.root, name="tb")],
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=args.root,
    )
    trainer.fit(model, datamodule=datamodule)
    fitted = {name: value.item() for name, value in trainer.logged_metrics.items()}
    tracked = tracker.state_dict()
    tested = trainer.test(datamodule=datamodule, verbose=False)
    predictions = trainer.predict(model, datamodule=datamodule)
    written = torch.load(os.path.join(args.root, "latents", f"latents_{trainer.global_rank}.pt"))

    best_model = VAE.load_from_checkpoint(checkpoint_callback.best_model_path, map_location="cpu", beta=0.5)
    other_data = WavesDataModule.load_from_checkpoint(checkpoint_callback.last_model_path, batch_size=16)

    # go on for two more epochs in a new Trainer
    more = Tracker()
    continued = pl.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy="ddp" if args.devices > 1 else "auto",
        precision="64-true",
        max_epochs=args.epochs + 2,
        callbacks=[more],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )

    class Longer(VAE):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    finetuned = Longer(input_dim=datamodule.hparams.length, hidden=(32, 16))
    finetuned.load_state_dict(best_model.state_dict())
    continued.fit(finetuned, datamodule=datamodule)

    results = {
        "losses": tracker.losses,
        "metrics": {
            "fitted": fitted,
            "test": tested,
            "predictions": [[batch.mean().item(), batch.std().item()] for batch in predictions],
            "written": [written.mean().item(), written.std().item()],
            "best_model_score": trainer.checkpoint_callback.best_model_score.item(),
            "finetuned": more.losses,
            "final_val_loss": continued.callback_metrics["val_loss"].item(),
        },
        "facts": {
            "stages": [str(getattr(stage, "value", stage)) for stage in datamodule.stages],
            "torn_down": str(getattr(datamodule.torn_down, "value", datamodule.torn_down)),
            "tracked": tracked,
            "hparams": {key: best_model.hparams[key] for key in ("input_dim", "latent_dim", "beta")},
            "latent_names": best_model.latent_names,
            "data_hparams": [other_data.hparams.batch_size, other_data.hparams.length],
            "best": Path(checkpoint_callback.best_model_path).stem,
            "shapes": [list(batch.shape) for batch in predictions],
            "loggers": [type(logger).__name__ for logger in trainer.loggers],
        },
    }
    if args.out and trainer.is_global_zero:
        Path(args.out).write_text(json.dumps(results))
    return results


if __name__ == "__main__":
    main()
