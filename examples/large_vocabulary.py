"""Train over a large vocabulary with a loss that never holds all logits: the words of Python's standard library.

    python examples/large_vocabulary.py                               400 MiB at the peak
    python examples/large_vocabulary.py --plain                       538 MiB, with the same losses
    python examples/large_vocabulary.py --devices 2 --strategy fsdp   the same losses

A network predicts each word from the four words before it.
"""

import argparse
import os
import re
import resource
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import treadle as tl


class Words(tl.TaskModule):
    def __init__(self, vocabulary: int, plain: bool) -> None:
        super().__init__()
        self.plain = plain
        self.embedding, self.mix = nn.Embedding(vocabulary, 64), nn.Linear(4 * 64, 64)
        self.head = nn.Linear(64, vocabulary)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden, targets = self.mix(self.embedding(batch[:, :4]).flatten(1)).relu(), batch[:, 4]
        if self.plain:
            loss = F.cross_entropy(self.head(hidden), targets)
        else:
            loss = tl.chunked_cross_entropy(hidden, self.head, targets)
        self.log("loss", loss, prog_bar=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true", help="compute all logits")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--strategy", default="auto", help="auto, ddp or fsdp")
    parser.add_argument("--max-steps", type=int, default=20)
    options = vars(parser.parse_args())
    tl.seed_everything(0)
    paths = sorted(Path(os.__file__).parent.glob("*.py"))[:60]
    words = re.findall(r"\w+", "\n".join(path.read_text(encoding="utf-8") for path in paths))
    numbers = {word: number for number, word in enumerate(dict.fromkeys(words))}
    windows = torch.tensor([numbers[word] for word in words]).unfold(0, 5, 1)
    task = Words(len(numbers), options.pop("plain"))
    trainer = tl.Trainer(**options, logger=False, enable_checkpointing=False)
    trainer.fit(task, DataLoader(windows, 512 // trainer.world_size, shuffle=True))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # on Linux
    trainer.print(f"{len(numbers):,} words: loss {trainer.callback_metrics['loss']:.4f}, peak memory {peak:.0f} MiB")
