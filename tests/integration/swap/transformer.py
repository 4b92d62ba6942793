"""A small transformer that learns to continue rows of tokens.

python transformer.py --steps 24 --out results.json
"""

import argparse
import json
import math
from pathlib import Path

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint, Timer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_info
from torch import nn
from torch.utils.data import DataLoader


class Dropout(nn.Module):
    """Of uniform numbers, which all builds of PyTorch draw alike; `nn.Dropout`'s hang on the vendor's library."""

    def forward(self, x):
        return x * (torch.rand_like(x) >= 0.1) / 0.9 if self.training else x


class GPT(L.LightningModule):
    def __init__(self, vocab_size: int, block_size: int, n_embd: int = 16, lr: float = 3e-3, warmup_steps: int = 5):
        super().__init__()
        self.save_hyperparameters()
        self.tok_emb = nn.Embedding(vocab_size, n_embd)
        self.pos_emb = nn.Parameter(torch.zeros(1, block_size, n_embd))
        self.drop = Dropout()
        self.block = nn.TransformerEncoderLayer(n_embd, 2, 4 * n_embd, dropout=0.0, batch_first=True)
        self.head = nn.Linear(n_embd, vocab_size, bias=False)
        self.samples = []

    def forward(self, input_ids):
        length = input_ids.size(1)
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=self.device, dtype=self.dtype)
        return self.head(self.block(self.drop(self.tok_emb(input_ids) + self.pos_emb[:, :length]), mask))

    def _loss(self, batch):
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch, batch_idx):
        loss = self._loss(batch)
        self.log("train/loss", loss, on_step=True, on_epoch=True, prog_bar=True, logger=True)
        self.log("train/lr", self.lr_schedulers().get_last_lr()[0], prog_bar=True, on_step=True)
        return loss

    def validation_step(self, batch, batch_idx):
        loss = self._loss(batch)
        self.log("val/loss", loss, on_epoch=True, prog_bar=True, sync_dist=True)
        self.log("val/perplexity", loss.exp(), on_epoch=True, batch_size=batch[:, 1:].numel(), sync_dist=True)

    def on_validation_epoch_end(self):
        if self.trainer.is_global_zero and not self.trainer.sanity_checking:
            with torch.no_grad():
                chances = F.softmax(self(torch.zeros(1, 1, dtype=torch.long))[:, -1], dim=-1).cumsum(dim=-1)
            self.samples.append((chances < torch.rand(1, 1)).sum().item())

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(
            optimizer, gradient_clip_val=gradient_clip_val, gradient_clip_algorithm=gradient_clip_algorithm
        )

    def configure_optimizers(self):
        decay = [p for p in self.parameters() if p.dim() >= 2]
        no_decay = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams.lr, betas=(0.9, 0.95))
        warmup, total = self.hparams.warmup_steps, self.trainer.estimated_stepping_batches
        rank_zero_info(f"{warmup} steps of warm-up, {total} in all")

        def schedule(step):
            if step < warmup:
                return (step + 1) / warmup
            return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 1, "name": "warmup-cosine"},
        }

    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step()


class Watch(Callback):
    def __init__(self):
        self.losses, self.outputs, self.steps = [], [], []
        self.norms, self.rates, self.validations = [], [], []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        grads = [p.grad.detach().norm() for p in pl_module.parameters() if p.grad is not None]
        self.norms.append(torch.stack(grads).norm().item())
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(trainer.callback_metrics["train/loss_step"].item())
        self.outputs.append(outputs["loss"].item())
        self.steps.append(trainer.global_step)
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0 and trainer.global_step % 10 == 0:
            trainer.print(f"step {trainer.global_step}: loss {outputs['loss']:.3f}")

    def on_validation_end(self, trainer, pl_module):
        if not trainer.sanity_checking:
            self.validations.append([trainer.callback_metrics[f"val/{k}"].item() for k in ("loss", "perplexity")])


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default="runs/transformer")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batches", type=int, default=80, help="of an epoch")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--sequential", action="store_true")
    parser.add_argument("--out")
    args = parser.parse_args(argv)

    L.seed_everything(1337, workers=True)
    rows = torch.randint(0, 16, (700, 1)) + torch.arange(17) * torch.randint(1, 3, (700, 1))
    order = torch.Generator().manual_seed(1337)
    train_loader = DataLoader(rows[:660] % 16, 8, shuffle=not args.sequential, drop_last=True, generator=order)
    val_loader = DataLoader(rows[660:] % 16, 8, generator=order)

    model = GPT(vocab_size=16, block_size=16)
    watch, timer = Watch(), Timer(duration="00:01:00:00")
    best = ModelCheckpoint(monitor="val/loss", filename="gpt-{step}", save_weights_only=True)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy="ddp" if args.devices > 1 else "auto",
        precision="64-true",
        max_steps=args.steps,
        limit_train_batches=args.batches,
        accumulate_grad_batches=4,
        gradient_clip_val=1.0,
        gradient_clip_algorithm="norm",
        val_check_interval=min(20, args.batches),
        logger=CSVLogger(args.root, name="gpt"),
        callbacks=[LearningRateMonitor(logging_interval="step"), best, timer, watch],
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=args.root,
    )
    trainer.fit(model, train_dataloaders=train_loader, val_dataloaders=val_loader)
    (final,) = trainer.validate(model, val_loader, verbose=False)

    results = {
        "losses": watch.losses,
        "outputs": watch.outputs,
        "metrics": {
            "norms": watch.norms,
            "rates": watch.rates,
            "validations": watch.validations,
            "final": final,
            "best_model_score": trainer.checkpoint_callback.best_model_score.item(),
        },
        "facts": {
            "samples": model.samples,
            "global_steps": watch.steps,
            "checkpoint": Path(trainer.checkpoint_callback.best_model_path).stem,
            "in_time": timer.time_remaining() > 0 and timer.time_elapsed("train") > 0,
        },
    }
    if args.out and trainer.is_global_zero:
        Path(args.out).write_text(json.dumps(results))
    return results


if __name__ == "__main__":
    main()
