"""Models whose training is planned, and their plans."""

from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from treadle.strategies import FSDP
from treadle.tools.plan import varied
from treadle.tools.plan.gpus import GPU
from treadle.tools.plan.simulation import simulate
from treadle.tools.plan.subject import Decoder, Sizes, next_token_loss, tokens

WIDTH, LAYERS, CLASSES = 12, 3, 5  # 5 and 12 are cut unevenly by 4 and 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.second(self.first(x).relu())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.head(self.blocks(x))


def batch_of(samples):
    return torch.ones(samples, WIDTH), torch.zeros(samples, dtype=torch.int64)


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]).float(), batch[1])


ADAMW = partial(torch.optim.AdamW, lr=1e-3)


class Shared(Net):
    """The work on a sample is shared by two processes."""

    def parallelize(self, mesh):
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        for block in self.blocks:
            parallelize_module(block, mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})


OPTIONS = {
    "tensor": {"tensor_parallel_size": 2},
    "checkpointed": {"activation_checkpointing_policy": True},
    "hybrid": {"data_parallel_replicate": 2},
    "each": {"sync_each_batch": True},
    "kept": {"reshard_after_forward": False},
    "half": {"mixed_precision": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
}


def strategy_called(name):
    return FSDP(**OPTIONS.get(name, {}))


def planned(name, world, rank, accumulate=1, clip=None, **more):
    given = {"strategy": strategy_called(name), "precision": "32-true", "micro_batch": 4, **more}
    return simulate(
        Shared, batch_of, loss, ADAMW, world_size=world, accumulate=accumulate, clip=clip, rank=rank, **given
    )


SIZES = Sizes(width=64, layers=2, heads=4, key_heads=2, hidden=128, vocabulary=96, length=32)


MIB = 2**20


def gpu_of(mib, network=50e9):
    speed = {"half": 1e14, "tf32": 5e13, "single": 1e13, "bandwidth": 1e12, "link": 300e9, "network": network}
    return GPU(name="small", memory=mib * MIB, per_machine=4, **speed)


def planner(strategy, world_size, mib, micro_batch=8, network=50e9, precision="bf16-mixed"):
    def again(**changes):
        own = {"micro_batch": micro_batch, "accumulate": 1, "precision": precision}
        own |= {name: changes.pop(name) for name in own if name in changes}
        subject = (
            partial(Decoder, SIZES),
            partial(tokens, SIZES),
            next_token_loss,
            partial(torch.optim.AdamW, fused=True),
        )
        return simulate(
            *subject, world_size=world_size, strategy=varied(strategy(), **changes), gpu=gpu_of(mib, network), **own
        )

    return again
