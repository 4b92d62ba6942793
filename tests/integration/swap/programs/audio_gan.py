"""Adversarial autoencoder with manual optimization: stable-audio-tools 0.0.19, training/autoencoders.py.

Two optimizers and two schedulers stepped by hand, one of them per batch by parity of ``global_step``; validation
results are kept in a list and passed through ``all_gather`` as a plain float.
"""

import lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

OFF = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class AutoencoderTrainingWrapper(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.autoencoder = nn.Sequential(nn.Linear(8, 3), nn.Tanh(), nn.Linear(3, 8))
        self.discriminator = nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(), nn.Linear(8, 1))
        self.clip_grad_norm, self.validation_step_outputs, self.printed = 1.0, [], []

    def configure_optimizers(self):
        opt_gen = torch.optim.Adam(self.autoencoder.parameters(), lr=0.02)
        opt_disc = torch.optim.Adam(self.discriminator.parameters(), lr=0.02)
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(opt, 0.9) for opt in (opt_gen, opt_disc)]
        return [opt_gen, opt_disc], schedulers

    def training_step(self, batch, batch_idx):
        (reals,) = batch
        opt_gen, opt_disc = self.optimizers()
        lr_schedulers = self.lr_schedulers()
        sched_gen, sched_disc = lr_schedulers
        decoded = self.autoencoder(reals)
        log_dict = {"train/latent_std": decoded.detach().std()}
        if batch_idx % 2:
            loss = nn.functional.relu(1 - self.discriminator(reals)).mean()
            loss = loss + nn.functional.relu(1 + self.discriminator(decoded.detach())).mean()
            opt_disc.zero_grad()
            self.manual_backward(loss)
            torch.nn.utils.clip_grad_norm_(self.discriminator.parameters(), self.clip_grad_norm)
            opt_disc.step()
            sched_disc.step()
            log_dict["train/disc_lr"] = opt_disc.param_groups[0]["lr"]
        else:
            loss = nn.functional.l1_loss(decoded, reals) - 0.01 * self.discriminator(decoded).mean()
            opt_gen.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(opt_gen, gradient_clip_val=self.clip_grad_norm, gradient_clip_algorithm="norm")
            opt_gen.step()
            sched_gen.step()
            log_dict["train/gen_lr"] = opt_gen.param_groups[0]["lr"]
        self.log_dict(log_dict, prog_bar=True, on_step=True)
        self.printed.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        found = {"l1": nn.functional.l1_loss(self.autoencoder(batch[0]), batch[0]).item()}
        self.validation_step_outputs.append(found)
        return found

    def on_validation_epoch_end(self):
        value = sum(found["l1"] for found in self.validation_step_outputs) / len(self.validation_step_outputs)
        self.printed.append(self.all_gather(value).mean().item())
        self.log("val/l1", value)
        self.validation_step_outputs.clear()


def main(root):
    pl.seed_everything(42)
    data = TensorDataset(torch.randn(48, 8))
    wrapper = AutoencoderTrainingWrapper()
    flags = {"num_sanity_val_steps": 0, "enable_checkpointing": False, "log_every_n_steps": 1, **OFF}
    trainer = pl.Trainer(default_root_dir=root, max_epochs=2, **flags)
    trainer.fit(wrapper, DataLoader(data, 8), DataLoader(data, 16))
    return {"printed": wrapper.printed, "metrics": {n: v.item() for n, v in trainer.callback_metrics.items()}}
