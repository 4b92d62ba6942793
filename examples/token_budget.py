"""Train a small language model on batches with a budget of bytes: the lines of Python's standard library.

    python examples/token_budget.py
    python examples/token_budget.py --devices 2     the same steps

A batch has as many lines of similar length as fit into 4,096 bytes, padding included.
"""

import argparse
import math
import os
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import treadle as tl
from treadle.data import BudgetBatchSampler

IGNORED = -100


class LanguageModel(tl.TaskModule):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.tokens, self.memory, self.head = nn.Embedding(256, width), nn.GRU(width, width), nn.Linear(width, 256)

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
        x, _ = self.memory(self.tokens(batch[:-1].clamp(min=0)))
        loss = nn.functional.cross_entropy(self.head(x).flatten(0, 1), batch[1:].flatten(), ignore_index=IGNORED)
        self.log("bits per byte", loss / math.log(2), on_step=False, on_epoch=True)
        return {"loss": loss, "weight": (batch[1:] != IGNORED).sum()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
for name, default in (("--steps", 200), ("--budget", 4096), ("--devices", 1)):
    parser.add_argument(name, type=int, default=default)
args = parser.parse_args()
tl.seed_everything(0)
files = sorted(Path(os.__file__).parent.glob("*.py"))
texts = [line for file in files for line in file.read_bytes().splitlines(keepends=True)]
lines = [torch.tensor(list(text)) for text in texts if len(text) > 1]  # an empty line has no byte to predict
lengths = [len(line) for line in lines]
batches = BudgetBatchSampler(lengths, args.budget)
flags = {"devices": args.devices, "logger": False, "enable_checkpointing": False}
trainer = tl.Trainer(limit_train_batches=args.steps, max_epochs=1, **flags)
padded = sum(len(batch) * max(lengths[index] for index in batch) for batch in batches)
trainer.print(f"{len(lines):,} lines in {len(batches):,} batches, {100 * sum(lengths) / padded:.1f} % filled")
loader = DataLoader(lines, batch_sampler=batches, collate_fn=lambda batch: pad_sequence(batch, padding_value=IGNORED))
trainer.fit(LanguageModel(), loader)
bits = trainer.callback_metrics["bits per byte"]
trainer.print(f"{bits:.3f} bits per byte, the mean of {trainer.global_step} steps")
