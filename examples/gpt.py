"""Train a GPT on the source text of Python's own standard library, byte by byte, and generate text with it.

    python examples/gpt.py                                    0.8 M parameters, two minutes on two CPU cores
    python examples/gpt.py --size small --devices 2           11 M, two processes
    python examples/gpt.py --devices 2 --strategy fsdp        each holds one half of every parameter
    torchrun --nproc-per-node 8 examples/gpt.py --size gpt2 --batch-size 32 --accumulate 4
    treadle fit --config gpt.yaml model.size=small            the same from a file, in this folder

No data is downloaded: the text is installed with the interpreter. Losses are in bits per byte; 8 is a uniform guess.
"""

import argparse
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import treadle as tl
from treadle.runs import RunFolder


@dataclass(frozen=True)
class Size:
    layers: int
    heads: int
    width: int
    context: int
    lr: float


SizeName = Literal["tiny", "small", "gpt2"]
SIZES: dict[SizeName, Size] = {
    "tiny": Size(layers=4, heads=4, width=128, context=128, lr=3e-3),
    "small": Size(layers=6, heads=6, width=384, context=256, lr=1e-3),
    "gpt2": Size(layers=12, heads=12, width=768, context=1024, lr=6e-4),  # 86 M here; 124 M with GPT-2's vocabulary
}


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.norm1, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.attention_out = nn.Linear(size.width, size.width)
        self.mlp_in = nn.Linear(size.width, 4 * size.width)
        self.mlp_out = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).flatten(-2))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, 256, bias=False)
        self.head.weight = self.tokens.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # GPT-2's initialization: each block adds twice to the residual stream, whose variance must not grow
                residual = name.endswith(("attention_out.weight", "mlp_out.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * size.layers) if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class LanguageModel(tl.TaskModule):
    """Task that predicts the next byte.

    Args:
        size: The size of the network.
    """

    def __init__(self, size: SizeName) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.size = SIZES[size]
        self.model = GPT(self.size)

    def bits_per_byte(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, following = batch
        return F.cross_entropy(self.model(tokens).flatten(0, 1), following.flatten()) / math.log(2)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.bits_per_byte(batch)
        self.log("train_bits", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_bits", self.bits_per_byte(batch), prog_bar=True)

    def predict_step(self, batch: Tensor, batch_idx: int) -> list[str]:
        return [bytes(row).decode(errors="replace") for row in self.generate(batch, 400).tolist()]

    def generate(self, tokens: Tensor, count: int, temperature: float = 0.7) -> Tensor:
        """Append `count` sampled bytes to each row of `tokens`."""
        for _ in range(count):
            logits = self.model(tokens[:, -self.size.context :])[:, -1].float()
            tokens = torch.cat([tokens, torch.multinomial((logits / temperature).softmax(-1), 1)], dim=1)
        return tokens

    def configure_optimizers(self) -> dict:
        matrices = [p for p in self.parameters() if p.dim() >= 2]
        vectors = [p for p in self.parameters() if p.dim() < 2]  # norms and biases: decay would only shrink them
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        fused = self.device.type in ("cpu", "cuda")
        optimizer = torch.optim.AdamW(groups, lr=self.size.lr, betas=(0.9, 0.95), fused=fused)
        steps, warmup = self.trainer.estimated_stepping_batches, 50

        def factor(step: int) -> float:
            cosine = 1 + math.cos(math.pi * min(1.0, step / steps))
            return min((step + 1) / warmup, 0.1 + 0.9 * cosine / 2)

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Blocks(Dataset):
    """Text cut into blocks of `context` bytes; the target of each byte is the next one."""

    def __init__(self, text: bytes, context: int) -> None:
        self.text, self.context = torch.frombuffer(bytearray(text), dtype=torch.uint8), context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        block = self.text[index * self.context : (index + 1) * self.context + 1].long()
        return block[:-1], block[1:]


def standard_library(max_bytes: int) -> tuple[bytes, bytes]:
    """Return Python's sources sorted by name, without tests, and every tenth file of them for validation."""
    root = Path(os.__file__).parent
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    texts, size = [], 0
    for file in sorted(root.rglob("*.py")):
        if size < max_bytes and not skipped & set(file.relative_to(root).parts):
            texts.append(file.read_bytes())
            size += len(texts[-1])
    train = (text for number, text in enumerate(texts) if number % 10 != 9)
    return b"\n".join(train), b"\n".join(texts[9::10])


class StandardLibrary(tl.DataModule):
    """Python's own sources in blocks.

    Args:
        size: The size of the network, whose context is the length of a block.
        batch_size: Blocks per process and micro-batch.
        max_bytes: Maximum size of the source text.
    """

    def __init__(self, size: SizeName, batch_size: int = 8, max_bytes: int = 8_000_000) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.train, self.val = (Blocks(text, SIZES[size].context) for text in standard_library(max_bytes))

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.batch_size)


def main() -> None:
    has_bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    precision = "bf16-mixed" if has_bf16 else "32-true"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, default=1500, help="optimizer steps")
    parser.add_argument("--batch-size", type=int, default=8, help="blocks per process and micro-batch")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per optimizer step")
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--strategy", default="auto", help="auto, single, ddp or fsdp")
    parser.add_argument("--precision", default=precision)
    parser.add_argument("--max-bytes", type=int, default=8_000_000, help="how much source text to read")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    tl.seed_everything(args.seed)
    task = LanguageModel(args.size)
    data = StandardLibrary(args.size, args.batch_size, args.max_bytes)
    settings = {
        "max_steps": args.steps,
        "max_epochs": -1,
        "devices": args.devices,
        "strategy": args.strategy,
        "precision": args.precision,
        "accumulate_grad_batches": args.accumulate,
        "gradient_clip_val": 1.0,
        "val_check_interval": max(1, args.steps // 4) * args.accumulate,
        "check_val_every_n_epoch": None,  # by steps, regardless of the length of an epoch
        "limit_val_batches": 20,
        "log_every_n_steps": 10,
    }
    with RunFolder.create("runs", "gpt", settings) as folder:
        trainer = tl.Trainer(**folder.flags(settings))
        trainer.print(
            f"{sum(p.numel() for p in task.parameters()):,} parameters, {len(data.train.text):,} bytes to train on"
        )
        started = time.perf_counter()
        trainer.fit(task, datamodule=data)

        speed = args.accumulate * args.batch_size * trainer.world_size * task.size.context
        speed *= trainer.global_step / (time.perf_counter() - started)
        bits = trainer.callback_metrics["val_bits"]
        prompts = [torch.tensor(list(prompt)) for prompt in (b"def read(self, ", b"class Parser:\n    ")]
        for texts in trainer.predict(task, DataLoader(prompts, batch_size=1)):
            trainer.print(*texts, "-" * 80, sep="\n")
    trainer.print(f"Validation  {bits:.3f} bits per byte")
    trainer.print(f"Speed       {speed:,.0f} tokens per second, validation included")


if __name__ == "__main__":
    main()
