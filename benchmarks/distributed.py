"""Measure an optimizer step on several processes under Treadle and under torch's own wrappers in a hand-written loop.

    python benchmarks/distributed.py [--processes 2] [--rounds 7] [--width 256] [--json distributed.json]

Every arm trains the same small transformer on the same batches and must give the raw loop's losses, or the program ends
with status 1. The arms take turns. The time of a step is the slope between a short and a long run, on the slowest
process's clock; a ratio is the median of the ratios to the raw arm of the same round.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from treadle.strategies import DDP, FSDP, Strategy

import treadle

BATCH, LENGTH, VOCABULARY, HEADS, BLOCKS = 8, 32, 256, 4, 4
TOLERANCE = 1e-6


class Model(nn.Module):
    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        layers = (nn.TransformerEncoderLayer(width, HEADS, 4 * width, 0.0, batch_first=True) for _ in range(blocks))
        self.blocks = nn.ModuleList(layers)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Task(treadle.TaskModule):
    def __init__(self, model: Model, losses: list[Tensor]) -> None:
        super().__init__()
        self.model, self.losses = model, losses

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = loss_of(self.model, batch)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self)


def loss_of(model: Callable[[Tensor], Tensor], batch: list[Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[0].flatten())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def model_of(width: int, blocks: int = BLOCKS) -> Model:
    torch.manual_seed(0)
    return Model(width, blocks)


def loader_of(steps: int, sharded: bool) -> DataLoader:
    """Return a dataloader of the batches of all processes, or of this process's."""
    size, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (steps * BATCH * size, LENGTH), generator=generator)
    if sharded:
        tokens = tokens.view(steps, size, BATCH, LENGTH)[:, rank].flatten(0, 1)
    return DataLoader(TensorDataset(tokens), batch_size=BATCH)


class SplitByRank(IterableDataset[list[Tensor]]):
    """Stream of this process's batches alone, of unknown length."""

    def __init__(self, steps: int) -> None:
        self.loader = loader_of(steps, sharded=True)

    def __iter__(self) -> Iterator[list[Tensor]]:
        return iter(self.loader)


class SplitWithState(SplitByRank):
    """Stream of this process's batches with its own state, not read ahead: the hosts exchange a sum in each step."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def raw(wrap: Callable[[Model], nn.Module], width: int, steps: int, losses: list[Tensor]) -> None:
    model = wrap(model_of(width))
    optimizer = optimizer_of(model)
    for batch in loader_of(steps, sharded=True):
        loss = loss_of(model, batch)
        losses.append(loss.detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def fully_sharded(model: Model) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model, reshard_after_forward=False)


def own_loop(strategy: Callable[[], Strategy], width: int, steps: int, losses: list[Tensor]) -> None:
    accelerator = treadle.Accelerator(cpu=True, strategy=strategy())
    model = model_of(width)
    model, optimizer, loader = accelerator.prepare(model, optimizer_of(model), loader_of(steps, sharded=False))
    for batch in loader:
        with accelerator.accumulate(model):
            loss = loss_of(model, batch)
            losses.append(loss.detach())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


def trainer(
    strategy: Callable[[], Strategy],
    width: int,
    steps: int,
    losses: list[Tensor],
    *,
    stream: type[SplitByRank] | None = None,
) -> None:
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    one = treadle.Trainer(accelerator="cpu", strategy=strategy(), max_epochs=1, **off)
    loader = loader_of(steps, sharded=False) if stream is None else DataLoader(stream(steps), batch_size=None)
    one.fit(Task(model_of(width), losses), loader)


ARMS: dict[str, tuple[str, Callable[[int, int, list[Tensor]], None]]] = {
    "raw DistributedDataParallel": ("ddp", partial(raw, DistributedDataParallel)),
    "Treadle Accelerator, DDP": ("ddp", partial(own_loop, DDP)),
    "Treadle Trainer, DDP": ("ddp", partial(trainer, DDP)),
    "Treadle Trainer, DDP, split stream": ("ddp", partial(trainer, DDP, stream=SplitByRank)),
    "the same, with a state of its own": ("ddp", partial(trainer, DDP, stream=SplitWithState)),
    "raw fully_shard": ("fsdp", partial(raw, fully_sharded)),
    "Treadle Accelerator, FSDP": ("fsdp", partial(own_loop, FSDP)),
    "Treadle Trainer, FSDP": ("fsdp", partial(trainer, FSDP)),
}


def seconds(arm: Callable[[Any, int, list[Tensor]], None], size: Any, steps: int) -> float:
    dist.barrier()
    begin = time.perf_counter()
    arm(size, steps, [])
    took = torch.tensor(time.perf_counter() - begin)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return took.item()


def disagreeing(width: int, steps: int = 20) -> list[str]:
    """Return the arms whose losses differ from the raw one's."""
    found: dict[str, Tensor] = {}
    wrong = []
    for name, (kind, arm) in ARMS.items():
        losses: list[Tensor] = []
        arm(width, steps, losses)
        values = torch.stack(losses)
        found.setdefault(kind, values)
        difference = (values - found[kind]).abs().max()
        dist.all_reduce(difference, dist.ReduceOp.MAX)
        if not difference <= TOLERANCE:
            wrong.append(f"{name}: losses differ by {difference:.1e}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--steps", type=int, nargs=2, default=(10, 60))
    parser.add_argument("--kinds", nargs="+", default=["ddp", "fsdp"], help="of which arms to measure")
    parser.add_argument("--json", help="where to write the figures")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("treadle").setLevel(logging.ERROR)
    accelerator = treadle.Accelerator(cpu=True, devices=args.processes, strategy="ddp")
    torch.set_num_threads(1)
    if wrong := disagreeing(args.width):
        accelerator.print("\n".join(wrong))
        raise SystemExit(1)
    few, many = args.steps
    chosen = {name: arm for name, arm in ARMS.items() if arm[0] in args.kinds}
    slopes: dict[str, list[float]] = {name: [] for name in chosen}
    for _ in range(args.rounds):
        for name, (_, arm) in chosen.items():
            long, short = seconds(arm, args.width, many), seconds(arm, args.width, few)
            slopes[name].append((long - short) / (many - few) * 1e3)
    if not accelerator.is_main_process:
        return
    print(f"torch {torch.__version__}, {platform.machine()}, {args.processes} processes, gloo, width {args.width}")
    print(f"{'':36}{'ms/step':>10}{'x raw':>8}   min - max")
    rows = {}
    for name, (kind, _) in chosen.items():
        base = next(other for other, (its, _) in ARMS.items() if its == kind)
        ratios = [own / reference for own, reference in zip(slopes[name], slopes[base], strict=True)]
        middle = statistics.median(ratios)
        rows[name] = {"ms": statistics.median(slopes[name]), "ratio": middle, "min": min(ratios), "max": max(ratios)}
        spread = "" if name == base else f"   {min(ratios):.2f} - {max(ratios):.2f}"
        print(f"{name:36}{rows[name]['ms']:10.2f}{middle:8.2f}{spread}")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=2)


if __name__ == "__main__":
    main()
