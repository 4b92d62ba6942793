"""Train a network with two optimizers that step together, each with a schedule and a gradient limit of its own.

    python examples/several_optimizers.py
    python examples/several_optimizers.py --devices 2 --strategy fsdp     the same steps

The network predicts each byte of Python's standard library from the 16 bytes before it. Adagrad trains the embedding,
and its rate falls after each epoch; AdamW trains the layers with a rate that rises and falls with the steps.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import treadle as tl


class Predictor(tl.TaskModule):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 16)
        self.layers = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 256))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.layers(self.embedding(batch[:, :16]).flatten(1)), batch[:, 16])
        self.log("loss", loss, prog_bar=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        adagrad = torch.optim.Adagrad(self.embedding.parameters(), lr=0.05)
        adamw = torch.optim.AdamW(self.layers.parameters(), lr=3e-3)
        falling = torch.optim.lr_scheduler.ExponentialLR(adagrad, 0.5)
        cycle = torch.optim.lr_scheduler.OneCycleLR(adamw, 3e-3, int(self.trainer.estimated_stepping_batches))
        return [adagrad, adamw], [falling, {"scheduler": cycle, "interval": "step"}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--strategy", default="auto", help="auto, ddp or fsdp")
    parser.add_argument("--max-epochs", type=int, default=3)
    args = parser.parse_args()

    tl.seed_everything(0)
    text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py"))[:8])
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().unfold(0, 17, 5)
    limits = {"embedding": 0.1, "*": 1.0}  # one norm for the embedding, and one for all other parameters
    trainer = tl.Trainer(**vars(args), gradient_clip_val=limits, logger=False, enable_checkpointing=False)
    trainer.fit(Predictor(), DataLoader(windows, 256 // trainer.world_size, shuffle=True))
    trainer.print(f"Loss {trainer.callback_metrics['loss_epoch']:.3f} in the last of {args.max_epochs} epochs")


if __name__ == "__main__":
    main()
