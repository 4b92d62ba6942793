"""Models that are sharded, and the training of one."""

import torch
from torch import nn
from treadle.strategies.wrap_policy import chosen_blocks

import treadle
from support.differences import whole as whole_tensor

WIDTH, CLASSES, BLOCKS = 8, 5, 3


class Block(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.0)

    def forward(self, x):
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


class Net(nn.Module):
    """Blocks between an embedding and a head that share their weight, and a parameter of its own."""

    def __init__(self, width=WIDTH, blocks=BLOCKS):
        super().__init__()
        self.embed = nn.Embedding(CLASSES, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, CLASSES, bias=False)
        self.head.weight = self.embed.weight
        self.shift = nn.Parameter(torch.randn(width) * 0.1)
        self.register_buffer("table", torch.arange(width) / width)
        self.apply(self.start)

    @staticmethod
    def start(module):
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.3)

    def forward(self, x):
        x = self.embed(x) + self.shift + self.table
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def names(net, policy):
    known = {module: name for name, module in net.named_modules()}
    return sorted(known[block] for block in chosen_blocks(net, policy, "auto_wrap_policy"))


def whole(task):
    return {name: whole_tensor(value).clone() for name, value in task.state_dict().items()}


def same(found, wanted, tolerance=1e-10):
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert torch.allclose(found[name], wanted[name], rtol=0, atol=tolerance), name


def made(strategy="auto"):
    # With split_batches a prepared scheduler steps once on any number of processes.
    return treadle.Accelerator(cpu=True, strategy=strategy, split_batches=True)
