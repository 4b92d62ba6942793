"""Write a strategy: replicas whose convolutions are stored channels last, the layout of the fast kernels.

    python examples/custom_strategy.py
    python examples/custom_strategy.py --devices 2     the same steps, up to rounding

A strategy says how a model lies on its devices. It inherits everything else, so clipping, accumulation, checkpoints and
several processes work.
"""

import argparse

import torch
from digits import DigitsTask, build_loaders
from torch import nn
from treadle.strategies import DDP, register_strategy

import treadle as tl


class ChannelsLast(DDP):
    name = "channels_last"

    def place(self, module: nn.Module) -> nn.Module:
        return super().place(module).to(memory_format=torch.channels_last)

    def decisions(self, module: nn.Module) -> list[str]:
        count = sum(isinstance(layer, nn.Conv2d) for layer in module.modules())
        return [*super().decisions(module), f"{count} convolutions are stored channels last"]


register_strategy("channels_last", ChannelsLast)  # its name in strategy= and in configuration files

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--devices", type=int, default=1)
args = parser.parse_args()

tl.seed_everything(0)
task = DigitsTask()
train, val, _ = build_loaders(64 // args.devices)
trainer = tl.Trainer(
    max_epochs=3, strategy="channels_last", devices=args.devices, logger=False, enable_checkpointing=False
)
trainer.fit(task, train, val)
weight = task.model[3].weight
trainer.print("channels last:", weight.is_contiguous(memory_format=torch.channels_last))
trainer.print(f"accuracy {trainer.callback_metrics['val_acc']:.3f}")
