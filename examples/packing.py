"""Train a small language model on packed documents: the source files of Python's standard library, byte by byte.

    python examples/packing.py
    python examples/packing.py --devices 2 --batch-size 4     the same steps

Files longer than 256 bytes are cut, and several pieces share a row. No byte attends to another piece, and no piece's
first byte is predicted, so a step equals one with each piece in a padded row of its own.
"""

import argparse
import math
import os
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import treadle as tl
from treadle.data import make_sdpa_mask, pack

LENGTH, WIDTH, HEADS, LAYERS = 256, 64, 4, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.attention_out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.attention_out(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm2(x))


class LanguageModel(tl.TaskModule):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        x = self.tokens(batch["input_ids"]) + self.positions(batch["position_ids"])
        mask = make_sdpa_mask(batch["seq_idx"])
        for block in self.blocks:
            x = block(x, mask)
        targets = batch["labels"][:, 1:]  # each byte predicts the next one
        loss = F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), targets.flatten())
        self.log("bits per byte", loss / math.log(2), on_step=False, on_epoch=True)
        return {"loss": loss, "weight": (targets != -100).sum()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=8, help="rows per process")
    parser.add_argument("--devices", type=int, default=1)
    args = parser.parse_args()

    tl.seed_everything(0)
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    rows = pack([np.frombuffer(file.read_bytes(), np.uint8) for file in files], LENGTH, too_long="cut")
    trainer = tl.Trainer(
        limit_train_batches=args.steps, max_epochs=1, devices=args.devices, logger=False, enable_checkpointing=False
    )
    trainer.print(rows)
    trainer.fit(LanguageModel(), DataLoader(rows, args.batch_size, shuffle=True))
    trainer.print(
        f"{trainer.callback_metrics['bits per byte']:.3f} bits per byte, the mean of {trainer.global_step} steps"
    )


if __name__ == "__main__":
    main()
