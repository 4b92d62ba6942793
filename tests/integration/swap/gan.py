"""A generative adversarial network on handwritten digits, with manual optimization.

python gan.py --epochs 4 --out results.json
"""

import argparse
import json
from collections import OrderedDict
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset, WeightedRandomSampler


class Generator(nn.Module):
    def __init__(self, latent_dim: int, img_shape: tuple):
        super().__init__()
        self.img_shape = img_shape
        self.model = nn.Sequential(
            nn.Linear(latent_dim, 32),
            nn.LeakyReLU(0.2),
            nn.Linear(32, 64),
            nn.BatchNorm1d(64),
            nn.LeakyReLU(0.2),
            nn.Linear(64, 64),
            nn.Tanh(),
        )

    def forward(self, z):
        return self.model(z).view(z.size(0), *self.img_shape)


class Discriminator(nn.Module):
    def __init__(self, img_shape: tuple):
        super().__init__()
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def forward(self, img):
        return self.model(img)


class GAN(L.LightningModule):
    def __init__(
        self,
        channels: int = 1,
        width: int = 8,
        height: int = 8,
        latent_dim: int = 16,
        lr: float = 0.002,
        b1: float = 0.5,
        b2: float = 0.999,
        n_critic: int = 2,
        **kwargs,
    ):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        data_shape = (channels, width, height)
        self.generator = Generator(latent_dim=self.hparams.latent_dim, img_shape=data_shape)
        self.discriminator = Discriminator(img_shape=data_shape)
        self.register_buffer("validation_z", torch.randn(8, self.hparams.latent_dim))
        self.example_input_array = torch.zeros(2, self.hparams.latent_dim)

    def forward(self, z):
        return self.generator(z)

    def adversarial_loss(self, y_hat, y):
        return F.binary_cross_entropy_with_logits(y_hat, y)

    def training_step(self, batch, batch_idx):
        imgs, _ = batch
        optimizer_g, optimizer_d = self.optimizers()

        # sample noise
        z = torch.randn(imgs.shape[0], self.hparams.latent_dim)
        z = z.type_as(imgs)

        # train the generator, every n_critic batches
        if batch_idx % self.hparams.n_critic == 0:
            self.toggle_optimizer(optimizer_g)
            generated = self(z)
            valid = torch.ones(imgs.size(0), 1).type_as(imgs)
            g_loss = self.adversarial_loss(self.discriminator(generated), valid)
            assert not next(self.discriminator.parameters()).requires_grad
            self.log("g_loss", g_loss, prog_bar=True)
            self.manual_backward(g_loss)
            self.clip_gradients(optimizer_g, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            optimizer_g.step()
            optimizer_g.zero_grad()
            self.untoggle_optimizer(optimizer_g)

        # train the discriminator: how well can it tell real from generated?
        self.toggle_optimizer(optimizer_d)
        valid = torch.ones(imgs.size(0), 1).to(self.device)
        real_loss = self.adversarial_loss(self.discriminator(imgs), valid)
        fake = torch.zeros(imgs.size(0), 1).to(self.device)
        fake_loss = self.adversarial_loss(self.discriminator(self(z).detach()), fake)
        d_loss = (real_loss + fake_loss) / 2
        self.log("d_loss", d_loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log_dict({"d_real": real_loss, "d_fake": fake_loss}, on_step=False, on_epoch=True)
        self.manual_backward(d_loss)
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)
        return OrderedDict({"loss": d_loss.detach()})

    def validation_step(self, batch, batch_idx):
        real = torch.sigmoid(self.discriminator(batch[0])).mean()
        fake = torch.sigmoid(self.discriminator(self(self.validation_z))).mean()
        self.log_dict({"val_real": real, "val_fake": fake})

    def configure_optimizers(self):
        betas = (self.hparams.b1, self.hparams.b2)
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=self.hparams.lr, betas=betas)
        opt_d = torch.optim.Adam(self.discriminator.parameters(), lr=self.hparams.lr, betas=betas)
        sched_g = torch.optim.lr_scheduler.ExponentialLR(opt_g, gamma=0.9)
        sched_d = torch.optim.lr_scheduler.ExponentialLR(opt_d, gamma=0.8)
        return [opt_g, opt_d], [sched_g, sched_d]

    def on_train_epoch_end(self):
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def on_validation_epoch_end(self):
        # log sampled images
        sample_imgs = self(self.validation_z.type_as(self.generator.model[0].weight))
        grid = (sample_imgs[:4].detach().reshape(1, -1, 8) + 1) / 2
        self.logger.experiment.add_image("epoch/generated_images", grid, self.current_epoch)


class Curves(Callback):
    def __init__(self, every: int = 4):
        super().__init__()
        self.every = every
        self.d_losses, self.g_losses, self.epochs, self.rates = [], [], [], []

    def setup(self, trainer, pl_module, stage=None):
        self.stage = stage

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.d_losses.append(outputs["loss"].item())
        self.g_losses.append(trainer.callback_metrics["g_loss"].item())

    def on_train_epoch_end(self, trainer, pl_module):
        names = ("d_loss_epoch", "d_real", "d_fake", "val_real", "val_fake")
        self.epochs.append({name: trainer.callback_metrics[name].item() for name in names})
        self.rates.append([optimizer.param_groups[0]["lr"] for optimizer in trainer.optimizers])


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default="runs/gan")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--sequential", action="store_true")
    parser.add_argument("--out")
    args = parser.parse_args(argv)

    L.seed_everything(7)
    x, y = load_digits(return_X_y=True)
    images = TensorDataset(torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1, torch.tensor(y))
    train, val = Subset(images, range(1024)), Subset(images, range(1024, 1280))
    # all classes alike; generators of their own, so that what the model draws leaves the order alone
    weights = (1.0 / torch.bincount(images.tensors[1])[images.tensors[1]])[:1024]
    order, val_order = torch.Generator().manual_seed(7), torch.Generator().manual_seed(8)
    sampler = None if args.sequential else WeightedRandomSampler(weights, 1024, generator=order)
    train_loader = DataLoader(train, batch_size=64, sampler=sampler, generator=order, drop_last=True)
    val_loader = DataLoader(val, batch_size=128, generator=val_order)

    model = GAN(lr=0.002, note="digits")
    curves = Curves()
    checkpoint = ModelCheckpoint(save_top_k=-1, every_n_epochs=1, filename="gan-{epoch}")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy="ddp_find_unused_parameters_true" if args.devices > 1 else "auto",
        precision="64-true",
        max_epochs=args.epochs,
        logger=TensorBoardLogger(args.root, name="gan", version="v0"),
        callbacks=[curves, checkpoint],
        log_every_n_steps=4,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, train_loader, val_loader)

    restored = GAN.load_from_checkpoint(checkpoint.best_model_path)
    model.eval(), restored.eval()
    with torch.no_grad():
        drawn = model(model.validation_z)
        assert torch.allclose(restored(restored.validation_z), drawn.float(), atol=1e-5)

    results = {
        "losses": curves.d_losses,
        "metrics": {
            "g_losses": curves.g_losses,
            "epochs": curves.epochs,
            "rates": curves.rates,
            "drawn": [drawn.mean().item(), drawn.std().item()],
        },
        "facts": {
            "checkpoint": Path(checkpoint.best_model_path).stem,
            "latent_dim": restored.hparams.latent_dim,
            "note": restored.hparams["note"],
            "stage": str(getattr(curves.stage, "value", curves.stage)),
        },
        "global_step": trainer.global_step,
    }
    if args.out and trainer.global_rank == 0:
        Path(args.out).write_text(json.dumps(results))
    return results


if __name__ == "__main__":
    main()
