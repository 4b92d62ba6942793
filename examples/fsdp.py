"""Shard a model with FSDP: each process stores its share of every parameter, gradient and optimizer state.

    python examples/fsdp.py                 two processes on the CPU; a block's parameters are whole only while it runs
    python examples/fsdp.py --devices 8     on eight GPUs, if there are any

Layers that `configure_model` creates are sharded as they are built, so no process ever holds the whole model.
"""

import argparse

import torch
import torch.nn.functional as F
from digits import build_loaders
from torch import Tensor, nn
from treadle.strategies import FSDP

import treadle as tl


class Rows(tl.TaskModule):
    """A transformer that reads the eight rows of a digit."""

    def configure_model(self) -> None:
        self.embed, self.head = nn.Linear(8, 64), nn.Linear(64, 10)
        self.positions = nn.Parameter(0.1 * torch.randn(8, 64))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True) for _ in range(3)
        )

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images.squeeze(1)) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_acc", (self(batch[0]).argmax(-1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    args = parser.parse_args()

    tl.seed_everything(0)
    task, (train, val, _) = Rows(), build_loaders(64 // args.devices)
    strategy = FSDP(auto_wrap_policy={nn.TransformerEncoderLayer}, activation_checkpointing_policy=True)
    trainer = tl.Trainer(max_epochs=5, devices=args.devices, strategy=strategy, gradient_clip_val=1.0, logger=False)
    trainer.fit(task, train, val)
    stored = sum(parameter.to_local().numel() for parameter in task.parameters())
    whole = sum(parameter.numel() for parameter in task.parameters())
    trainer.print(f"this process stores {stored:,} of {whole:,} parameters")
    trainer.print(f"accuracy {trainer.callback_metrics['val_acc']:.3f}")
