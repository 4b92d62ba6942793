"""Split the layers of a network over two processes, which compute each sample together.

    python examples/tensor_parallel.py                 two processes on the CPU
    python examples/tensor_parallel.py --devices 8     pairs of GPUs; each pair reads a quarter of the data

The first layer of a pair is split by columns and the second by rows, so they exchange values once.
"""

import argparse

from digits import DigitsTask, build_loaders
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from treadle.strategies import FSDP

import treadle as tl


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class SplitDigits(DigitsTask):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Flatten(), nn.Linear(64, 96), Block(96), Block(96), nn.Linear(96, 10))

    def parallelize(self, mesh: DeviceMesh) -> None:
        for block in self.model[2:4]:
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2)
    args = parser.parse_args()

    tl.seed_everything(0)
    task, (train, val, _) = SplitDigits(), build_loaders(64)
    strategy = FSDP(tensor_parallel_size=2, auto_wrap_policy={Block})
    trainer = tl.Trainer(max_epochs=5, devices=args.devices, strategy=strategy, gradient_clip_val=1.0, logger=False)
    trainer.fit(task, train, val)
    weight = task.model[2].up.weight
    trainer.print(f"a weight of {tuple(weight.shape)}, of which this process stores {tuple(weight.to_local().shape)}")
    trainer.print(f"accuracy {trainer.callback_metrics['val_acc']:.3f}")
