"""Compare a plan's predicted step times with what torchtitan published for its own runs on H100.

Two numbers separate a data sheet from a run: the share of the peak that matrix products reach, and the share of the
memory traffic that remains after fusion. They are fitted here on the two published runs on 8 GPUs; the others are
predicted with them.

    python benchmarks/plan.py             # fit, then predict: 3 minutes
    python benchmarks/plan.py --kept      # predict with the numbers in `tools/plan/op_costs.py`
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from treadle.strategies import FSDP
from treadle.tools.plan.op_costs import Calibration
from treadle.tools.plan.plan import Plan
from treadle.tools.plan.simulation import simulate
from treadle.tools.plan.subject import MODELS, Block, Decoder, next_token_loss, tokens


@dataclass(frozen=True, kw_only=True)
class Row:
    """Published run.

    Source: https://github.com/pytorch/torchtitan/tree/main/benchmarks (llama3_h100_202412_torchtitan.md,
    llama3-8b_h100_202506_trainy-whitesky.md, asyncTP_llama3_h100_2025-06_torchtitan.md); H100 with 96 GB of HBM2e at
    2.4 TB/s and 500 W, 400 Gb/s of RDMA per GPU; samples of 8,192 tokens; bfloat16.
    """

    model: str
    gpus: int
    tensor: int
    samples: int
    selective: bool
    compiled: bool
    published: float
    fitted: bool = False

    @property
    def name(self) -> str:
        """Name of the run."""
        how = f"FSDP{self.gpus // self.tensor}" + (f" x TP{self.tensor}" if self.tensor > 1 else "")
        return f"{self.model} {self.gpus:>3} GPUs {how}{' compiled' if self.compiled else ''}"


ROWS = (
    Row(model="llama-8b", gpus=8, tensor=1, samples=2, selective=True, compiled=False, published=5762, fitted=True),
    Row(model="llama-8b", gpus=8, tensor=1, samples=2, selective=True, compiled=True, published=6667, fitted=True),
    Row(model="llama-8b", gpus=128, tensor=1, samples=2, selective=True, compiled=False, published=5605),
    Row(model="llama-8b", gpus=128, tensor=1, samples=2, selective=True, compiled=True, published=6514),
    Row(model="llama-8b", gpus=64, tensor=8, samples=12, selective=True, compiled=True, published=4378),
    Row(model="llama-70b", gpus=256, tensor=8, samples=16, selective=False, compiled=True, published=597.3),
)

aten = torch.ops.aten
_SAVED = (aten._scaled_dot_product_flash_attention_for_cpu.default,)


def _policy(counted: list[int]) -> Callable[..., CheckpointPolicy]:
    """Return torchtitan's selective checkpointing policy: keep attention and every second matrix product."""

    def choose(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        at = int(context.is_recompute)
        if op is aten.mm.default:
            counted[at] += 1
            keep = counted[at] % 2 == 1
        else:
            keep = op in _SAVED
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return choose


class SelectiveBlock(Block):
    """Block that keeps some of its activations."""

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        """Return the same numbers as the plain block."""
        contexts = partial(create_selective_checkpoint_contexts, _policy([0, 0]))
        return checkpoint(super().forward, x, turn, use_reentrant=False, context_fn=contexts)  # type: ignore


class Titan(Decoder):
    """Decoder with torchtitan's distribution of the work: sequence parallel, vocabulary parallel."""

    def parallelize(self, mesh: Any) -> None:
        """See `FSDP`."""
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            PrepareModuleInput,
            RowwiseParallel,
            SequenceParallel,
            parallelize_module,
        )

        parallelize_module(
            self,
            mesh,
            {
                "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
                "norm": SequenceParallel(),
                "scores": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
            },
        )
        whole = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
        both = {"input_layouts": (Shard(1), None), "desired_input_layouts": (Replicate(), None)}
        for block in self.blocks:
            parallelize_module(
                block,
                mesh,
                {
                    "attention_norm": SequenceParallel(),
                    "attention": PrepareModuleInput(**both),
                    "attention.queries": ColwiseParallel(),
                    "attention.keys": ColwiseParallel(),
                    "attention.values": ColwiseParallel(),
                    "attention.out": RowwiseParallel(output_layouts=Shard(1)),
                    "feed_norm": SequenceParallel(),
                    "feed": PrepareModuleInput(**whole),
                    "feed.gate": ColwiseParallel(),
                    "feed.up": ColwiseParallel(),
                    "feed.down": RowwiseParallel(output_layouts=Shard(1)),
                },
            )


def model(row: Row) -> nn.Module:
    """Return the model of a row."""
    made = Titan(MODELS[row.model])
    if row.selective:
        for block in made.blocks:
            block.__class__ = SelectiveBlock
    return made


def plan(row: Row, calibration: Calibration) -> Plan:
    """Return the prediction for a row."""
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.tensor.parallel import loss_parallel

    strategy = FSDP(
        tensor_parallel_size=row.tensor,
        mixed_precision=MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        activation_checkpointing_policy=None if row.selective else True,
    )
    with loss_parallel() if row.tensor > 1 else nullcontext():
        return simulate(
            partial(model, row),
            partial(tokens, MODELS[row.model]),
            next_token_loss,
            partial(torch.optim.AdamW, fused=True),
            world_size=row.gpus,
            strategy=strategy,
            gpu="h100-96gb",
            micro_batch=row.samples,
            precision="32-true",
            compiled=row.compiled,
            clip=1.0,
            calibration=calibration,
        )


def rate(row: Row, made: Plan) -> tuple[float, float, float]:
    """Return tokens per second and GPU: the lowest, the most likely and the highest of the band."""
    each = made.samples * MODELS[row.model].length / row.gpus
    least, likely, most = made.band
    return each / most, each / likely, each / least


def fit(row: Row, name: str, calibration: Calibration) -> Calibration:
    """Return the calibration whose ``name`` reproduces the published value of the row, with three secant steps."""
    points = []
    value = getattr(calibration, name)
    for _ in range(4):
        now = replace(calibration, **{name: value})
        points.append((value, 1 / rate(row, plan(row, now))[1] - 1 / row.published))
        if abs(points[-1][1]) * row.published < 1e-3:
            return now
        if len(points) == 1:
            value *= 1.05
        else:
            (a, fa), (b, fb) = points[-2:]
            value = b - fb * (b - a) / (fb - fa)
    return replace(calibration, **{name: value})


def main() -> None:
    """Print a table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--kept", action="store_true", help="do not fit")
    options.add_argument("--only", type=int, help="one row by its number")
    given = options.parse_args()
    calibration = Calibration()
    if not given.kept:
        for name, row in zip(("arithmetic", "fused"), ROWS, strict=False):
            calibration = fit(row, name, calibration)
            print(f"fitted on {row.name}: {name} = {getattr(calibration, name):.4f}", flush=True)
    print(f"{'run':<44}{'published':>10}{'predicted':>10}{'off':>8}  {'band':<16}{'peak':>9}{'CPU':>7}")
    for number, row in enumerate(ROWS):
        if given.only not in (None, number):
            continue
        begun = time.process_time()
        made = plan(row, calibration)
        least, likely, most = rate(row, made)
        off = likely / row.published - 1
        note = "fitted" if row.fitted else f"{off:+.1%}"
        spent = time.process_time() - begun
        print(
            f"{row.name:<44}{row.published:>10,.0f}{likely:>10,.0f}{note:>8}  {f'{least:,.0f} to {most:,.0f}':<16}"
            f"{made.peak / 2**30:>5.1f} GiB{spent:>5.0f} s",
            flush=True,
        )
    print(f"peak memory of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


if __name__ == "__main__":
    main()
