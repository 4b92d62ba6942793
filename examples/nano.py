"""Train a small language model by the recipe of nanochat, on the source text of Python's own standard library.

    python examples/nano.py                     1.8 M parameters, 70 s on a CPU core: test loss 2.97
    python examples/nano.py --adamw --lr 0.003  the same with AdamW alone, at its best learning rate: 3.17
    torchrun --nproc-per-node 8 examples/nano.py --depth 12 --length 2048 --strategy fsdp

Muon trains the matrices of the blocks, and AdamW the embedding and the head. Functions and classes are packed into rows
in which tokens attend only to their own function. The learning rate warms up, stays and decays. The logits of the whole
vocabulary are never in memory at once.
"""

import argparse
import os
import re
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import treadle as tl
from treadle.data import make_sdpa_mask, pack
from treadle.optim import lr_schedule, muon_with_adamw


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    (first, second), cos, sin = x.chunk(2, dim=-1), angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.mix = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        for last in (self.mix, self.down):  # each block starts as the identity
            nn.init.zeros_(last.weight)

    def forward(self, x: Tensor, angles: Tensor, mask: Tensor) -> Tensor:
        layers = self.query, self.key, self.value
        query, key, value = (layer(norm(x)).unflatten(-1, (-1, 32)).transpose(1, 2) for layer in layers)
        query, key = norm(rotate(query, angles)), norm(rotate(key, angles))
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = x + self.mix(attended.transpose(1, 2).flatten(-2))
        return x + self.down(self.up(norm(x)).relu().square())


class Nano(tl.TaskModule):
    def __init__(self, depth: int, vocabulary: int, lr: float, adamw: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embedding, self.head = nn.Embedding(vocabulary, 32 * depth), nn.Linear(32 * depth, vocabulary, bias=False)
        self.blocks = nn.ModuleList(Block(32 * depth) for _ in range(depth))
        nn.init.zeros_(self.head.weight)

    def compute_loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        frequencies = 10_000 ** (-torch.arange(16, device=self.device) / 16)
        angles = (batch["position_ids"][..., None] * frequencies)[:, None]
        x, mask = norm(self.embedding(batch["input_ids"])), make_sdpa_mask(batch["seq_idx"])
        for block in self.blocks:
            x = block(x, angles, mask)
        targets = batch["labels"][:, 1:]
        return tl.chunked_cross_entropy(norm(x)[:, :-1], self.head, targets), (targets != -100).sum()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        loss, count = self.compute_loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return {"loss": loss, "weight": count}

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss, count = self.compute_loss(batch)
        self.log("test_loss", loss, batch_size=int(count))

    def configure_optimizers(self):
        options = {"adamw": self.hparams.adamw, "adamw_options": {"betas": (0.8, 0.95)}}
        optimizers = muon_with_adamw(self, self.hparams.lr, **options)
        steps = self.trainer.estimated_stepping_batches
        rates = [lr_schedule("warmup_stable_decay", o, steps, warmup_steps=0.05, decay_steps=0.4) for o in optimizers]
        return optimizers, [{"scheduler": rate, "interval": "step"} for rate in rates]


def read_documents(vocabulary: int, files: int) -> list[list[int]]:
    """Return functions and classes as tokens: the most frequent words and signs, and 0 for all others."""
    paths = sorted(Path(os.__file__).parent.glob("*.py"))[:files]
    texts = [text for path in paths for text in re.split(r"\n(?=def |class )", path.read_text(encoding="utf-8"))]
    words = [re.findall(r" +|\w+|\s|[^\w\s]", text) for text in texts]
    counts = Counter(word for text in words for word in text).most_common(vocabulary - 1)
    numbers = {word: number for number, (word, _) in enumerate(counts, 1)}
    return [[numbers.get(word, 0) for word in text] for text in words]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adamw", action="store_true", help="train all parameters with AdamW")
    parser.add_argument("--strategy", default="auto", help="auto, single, ddp or fsdp")
    numbers = {"lr": 0.01, "depth": 4, "steps": 200, "batch-size": 4, "length": 256, "vocabulary": 4096, "files": 999}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    args = parser.parse_args()

    tl.seed_everything(0)
    documents = read_documents(args.vocabulary, args.files)
    parts = documents[len(documents) // 10 :], documents[: len(documents) // 10]
    train, test = (pack(part, args.length, too_long="cut") for part in parts)
    task = Nano(args.depth, args.vocabulary, args.lr, ("*",) if args.adamw else ())
    trainer = tl.Trainer(max_steps=args.steps, max_epochs=-1, strategy=args.strategy, gradient_clip_val=1.0)
    trainer.fit(task, DataLoader(train, args.batch_size, shuffle=True))
    (result,) = trainer.test(task, DataLoader(test, args.batch_size), verbose=False)
    trainer.print(f"Test loss {result['test_loss']:.3f}")


if __name__ == "__main__":
    main()
