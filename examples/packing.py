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
from torch import Tensor, nn
from torch.utils.data import DataLoader

import treadle as tl
from treadle.data import make_sdpa_mask, pack

LENGTH, WIDTH, HEADS = 256, 64, 4


class LanguageModel(tl.TaskModule):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        options = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, **options) for _ in range(2))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        x = self.tokens(batch["input_ids"]) + self.positions(batch["position_ids"])
        hidden = ~make_sdpa_mask(batch["seq_idx"])  # later bytes, and those of other pieces
        for block in self.blocks:
            x = block(x, hidden.expand(-1, HEADS, -1, -1).flatten(0, 1))
        targets = batch["labels"][:, 1:]  # each byte predicts the next one
        loss = nn.functional.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), targets.flatten())
        self.log("bits per byte", loss / math.log(2), on_step=False, on_epoch=True)
        return {"loss": loss, "weight": (targets != -100).sum()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
for name, default in (("--steps", 200), ("--batch-size", 8), ("--devices", 1)):
    parser.add_argument(name, type=int, default=default)
args = parser.parse_args()
tl.seed_everything(0)
files = sorted(Path(os.__file__).parent.glob("*.py"))
rows = pack([np.frombuffer(file.read_bytes(), np.uint8) for file in files], LENGTH, too_long="cut")
flags = {"devices": args.devices, "logger": False, "enable_checkpointing": False}
trainer = tl.Trainer(limit_train_batches=args.steps, max_epochs=1, **flags)
trainer.print(rows)
trainer.fit(LanguageModel(), DataLoader(rows, args.batch_size, shuffle=True))
bits = trainer.callback_metrics["bits per byte"]
trainer.print(f"{bits:.3f} bits per byte, the mean of {trainer.global_step} steps")
