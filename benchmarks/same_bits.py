"""Measure an optimizer step with `step_micro_batches`, which fixes the order of sums, beside the same step without it.

    python benchmarks/same_bits.py [--processes 2] [--rounds 7] [--width 128] [--blocks 4] [--json same_bits.json]

Every arm trains the small transformer of distributed.py with the Trainer, in micro-batches of 8 samples, with clipping.
The arms take turns. The time of a step is the slope between a short and a long run, on the slowest process's clock; a
ratio is the median of the ratios to the arm without the flag of the same round. The bytes are those of the tensors that
torch's profiler records for one step, times the share of them that a ring, or an exchange of parts, sends.
The losses of both arms with the flag must be equal, or the program ends with status 1.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import platform
import statistics
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from distributed import Task, loader_of, model_of, seconds
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import treadle

MICRO_BATCHES = 8
# The tensors of the recorded size that a process sends, in a world of W processes. A gather records its own part.
SENT: dict[str, Callable[[int], float]] = {
    "gather": lambda world: world - 1,
    "reduce_scatter": lambda world: (world - 1) / world,
    "all_to_all": lambda world: (world - 1) / world,
    "all_reduce": lambda world: 2 * (world - 1) / world,
}


def train(strategy: str, fixed: bool, size: tuple[int, int], steps: int, losses: list[Tensor]) -> None:
    world = dist.get_world_size()
    flags: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    flags |= {"step_micro_batches": MICRO_BATCHES} if fixed else {"accumulate_grad_batches": MICRO_BATCHES // world}
    trainer = treadle.Trainer(accelerator="cpu", strategy=strategy, max_epochs=1, gradient_clip_val=1.0, **flags)
    trainer.fit(Task(model_of(*size), losses), loader_of(steps * MICRO_BATCHES // world, sharded=False))


ARMS = {
    "DDP": partial(train, "ddp", False),
    "DDP, step_micro_batches": partial(train, "ddp", True),
    "FSDP": partial(train, "fsdp", False),
    "FSDP, step_micro_batches": partial(train, "fsdp", True),
}


def find_sent_bytes(arm: Any, size: tuple[int, int]) -> float:
    """Return the MiB that a process sends in one step."""

    def count(steps: int) -> float:
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
            arm(size, steps, [])
        total = 0.0
        for event in (event for event in profiled.events() if event.name.startswith("gloo:")):
            shares = [share(dist.get_world_size()) for kind, share in SENT.items() if kind in event.name]
            sizes = [math.prod(shape) for shape in event.input_shapes if shape]
            total += 4 * sum(shares) * max(sizes, default=0)
        return total / 2**20

    return count(3) - count(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=4, help="of attention; 0 is an embedding and a linear layer")
    parser.add_argument("--steps", type=int, nargs=2, default=(2, 8))
    parser.add_argument("--json", help="where to write the figures")
    args = parser.parse_args()
    size = args.width, args.blocks
    warnings.simplefilter("ignore")
    logging.getLogger("treadle").setLevel(logging.ERROR)
    accelerator = treadle.Accelerator(cpu=True, devices=args.processes, strategy="ddp")
    torch.set_num_threads(1)
    seen: dict[str, list[Tensor]] = {name: [] for name in ARMS}
    for name, arm in ARMS.items():
        arm(size, 3, seen[name])
    if not torch.equal(*(torch.stack(losses) for name, losses in seen.items() if "," in name)):
        accelerator.print("the losses of DDP and FSDP with step_micro_batches differ")
        raise SystemExit(1)
    sent = {name: find_sent_bytes(arm, size) for name, arm in ARMS.items()}
    few, many = args.steps
    slopes: dict[str, list[float]] = {name: [] for name in ARMS}
    for _ in range(args.rounds):
        for name, arm in ARMS.items():
            long, short = seconds(arm, size, many), seconds(arm, size, few)
            slopes[name].append((long - short) / (many - few) * 1e3)
    if not accelerator.is_main_process:
        return
    what = f"width {args.width}, {args.blocks} blocks"
    print(f"torch {torch.__version__}, {platform.machine()}, {args.processes} processes, gloo, {what}")
    print(f"{'':28}{'ms/step':>10}{'MiB sent':>10}{'x without':>11}   min - max")
    rows = {}
    for name in ARMS:
        base = slopes[name.partition(",")[0]]
        ratios = [own / reference for own, reference in zip(slopes[name], base, strict=True)]
        middle, ms = statistics.median(ratios), statistics.median(slopes[name])
        rows[name] = {"ms": ms, "MiB": sent[name], "ratio": middle, "min": min(ratios), "max": max(ratios)}
        spread = f"   {min(ratios):.2f} - {max(ratios):.2f}" if "," in name else ""
        print(f"{name:28}{ms:10.2f}{sent[name]:10.2f}{middle:11.2f}{spread}")
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=2)


if __name__ == "__main__":
    main()
