"""A character-level transformer that learns a text out of Python's standard library.

python transformer.py --steps 24 --out results.json
"""

import argparse
import codecs
import importlib.util
import json
import math
import re
from pathlib import Path

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint, Timer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import DataLoader, Dataset


def read_text():
    """The source of the module ``this``, and what it decodes to: a file that has not changed for twenty years."""
    source = Path(importlib.util.find_spec("this").origin).read_text(encoding="utf-8")
    return source + codecs.decode(re.search(r'"""(.*?)"""', source, re.DOTALL)[1], "rot13")


class CharDataset(Dataset):
    def __init__(self, text: str, block_size: int, vocab: str, stride: int = 1):
        self.stoi = {char: index for index, char in enumerate(vocab)}
        self.data = torch.tensor([self.stoi[char] for char in text])
        self.block_size, self.stride = block_size, stride

    def __len__(self):
        return (len(self.data) - self.block_size - 1) // self.stride

    def __getitem__(self, index):
        chunk = self.data[index * self.stride : index * self.stride + self.block_size + 1]
        return {"input_ids": chunk[:-1], "labels": chunk[1:]}


class Dropout(nn.Module):
    """Of uniform numbers, which all builds of PyTorch draw alike; `nn.Dropout`'s hang on the vendor's library."""

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x):
        return x * (torch.rand_like(x) >= self.p) / (1 - self.p) if self.training else x


class Block(nn.Module):
    def __init__(self, n_embd: int, n_head: int, dropout: float):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.attn = nn.MultiheadAttention(n_embd, n_head, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd), Dropout(dropout)
        )

    def forward(self, x, mask):
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class GPT(L.LightningModule):
    def __init__(
        self,
        vocab_size: int,
        block_size: int = 32,
        n_layer: int = 2,
        n_head: int = 2,
        n_embd: int = 32,
        dropout: float = 0.1,
        learning_rate: float = 3e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 5,
    ):
        super().__init__()
        self.save_hyperparameters()
        self.tok_emb = nn.Embedding(vocab_size, n_embd)
        self.pos_emb = nn.Parameter(torch.zeros(1, block_size, n_embd))
        self.drop = Dropout(dropout)
        self.blocks = nn.ModuleList([Block(n_embd, n_head, dropout) for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)
        self.head = nn.Linear(n_embd, vocab_size, bias=False)
        self.apply(self._init_weights)
        self.samples = []

    @staticmethod
    def _init_weights(module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)

    def forward(self, input_ids):
        length = input_ids.size(1)
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=self.device, dtype=self.dtype)
        x = self.drop(self.tok_emb(input_ids) + self.pos_emb[:, :length])
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.ln_f(x))

    def _loss(self, batch):
        logits = self(batch["input_ids"])
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def training_step(self, batch, batch_idx):
        loss = self._loss(batch)
        self.log("train/loss", loss, on_step=True, on_epoch=True, prog_bar=True, logger=True)
        self.log("train/lr", self.lr_schedulers().get_last_lr()[0], prog_bar=True, on_step=True)
        return loss

    def validation_step(self, batch, batch_idx):
        loss = self._loss(batch)
        self.log("val/loss", loss, on_epoch=True, prog_bar=True, sync_dist=True)
        self.log("val/perplexity", loss.exp(), on_epoch=True, batch_size=batch["labels"].numel(), sync_dist=True)

    @torch.no_grad()
    def generate(self, tokens, count):
        for _ in range(count):
            logits = self(tokens[:, -self.hparams.block_size :])[:, -1]
            chances = F.softmax(logits, dim=-1).cumsum(dim=-1)
            drawn = (chances < torch.rand(1, 1, device=self.device)).sum(dim=-1, keepdim=True)
            tokens = torch.cat([tokens, drawn.clamp(max=self.hparams.vocab_size - 1)], dim=1)
        return tokens

    def on_validation_epoch_end(self):
        if self.trainer.is_global_zero and not self.trainer.sanity_checking:
            start = torch.zeros(1, 1, dtype=torch.long, device=self.device)
            self.samples.append(self.generate(start, 4)[0].tolist())

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(
            optimizer, gradient_clip_val=gradient_clip_val, gradient_clip_algorithm=gradient_clip_algorithm
        )

    def configure_optimizers(self):
        decay = [p for p in self.parameters() if p.dim() >= 2]
        no_decay = [p for p in self.parameters() if p.dim() < 2]
        optimizer = torch.optim.AdamW(
            [
                {"params": decay, "weight_decay": self.hparams.weight_decay},
                {"params": no_decay, "weight_decay": 0.0},
            ],
            lr=self.hparams.learning_rate,
            betas=(0.9, 0.95),
        )
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
    text = read_text()
    vocab = "".join(sorted(set(text)))
    split = int(0.9 * len(text))
    train = CharDataset(text[:split], 32, vocab, stride=2)
    val = CharDataset(text[split:], 32, vocab, stride=8)
    order = torch.Generator().manual_seed(1337)
    train_loader = DataLoader(train, batch_size=8, shuffle=not args.sequential, drop_last=True, generator=order)
    val_loader = DataLoader(val, batch_size=8, generator=order)

    model = GPT(vocab_size=len(vocab), block_size=32)
    watch, timer = Watch(), Timer(duration="00:01:00:00")
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
        callbacks=[
            LearningRateMonitor(logging_interval="step"),
            ModelCheckpoint(monitor="val/loss", filename="gpt-{step}", save_weights_only=True),
            timer,
            watch,
        ],
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=args.root,
    )
    trainer.fit(model, train_dataloaders=train_loader, val_dataloaders=val_loader)
    (final,) = trainer.validate(model, val_loader, verbose=False)

    results = {
        "losses": watch.losses,
        "metrics": {
            "norms": watch.norms,
            "rates": watch.rates,
            "validations": watch.validations,
            "final": final,
            "best_model_score": trainer.checkpoint_callback.best_model_score.item(),
        },
        "facts": {
            "characters": [len(text), len(vocab)],
            "samples": model.samples,
            "global_steps": watch.steps,
            "total": model.trainer.global_step,
            "checkpoint": Path(trainer.checkpoint_callback.best_model_path).stem,
            "in_time": timer.time_remaining() > 0 and timer.time_elapsed("train") > 0,
        },
    }
    results["outputs"] = watch.outputs
    if args.out and trainer.is_global_zero:
        Path(args.out).write_text(json.dumps(results))
    return results


if __name__ == "__main__":
    main()
