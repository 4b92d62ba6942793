"""Train a small network to recognize handwritten digits: the whole Trainer in one short file.

    python examples/digits.py                                    one process, on this machine's best device
    python examples/digits.py --devices 2                        two processes
    torchrun --nproc-per-node 2 examples/digits.py               two processes, started by torchrun
    python examples/digits.py --precision bf16-mixed --accumulate 4

The 1,797 images of 8 x 8 pixels come with scikit-learn. `own_loop.py` does the same with a hand-written loop.
"""

import argparse
import os
import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import treadle as tl
from treadle.runs import RunFolder

EXPECTED_ACCURACY = 0.97


def build_loaders(batch_size: int) -> tuple[DataLoader, DataLoader, DataLoader]:
    """Return dataloaders of training, validation and test images, with the same split in every run."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    dataset = TensorDataset(images, torch.tensor(digits.target))
    train, val, test = random_split(dataset, [1197, 300, 300], generator=torch.Generator().manual_seed(0))
    return DataLoader(train, batch_size, shuffle=True), DataLoader(val, batch_size), DataLoader(test, batch_size)


def build_model() -> nn.Module:
    def layer(inputs: int, outputs: int) -> list[nn.Module]:
        # Group rather than batch norm: no image's result depends on which others share its batch or process.
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.ReLU()]

    features = [*layer(1, 16), *layer(16, 32), nn.MaxPool2d(2), *layer(32, 32), nn.MaxPool2d(2)]
    return nn.Sequential(*features, nn.Flatten(), nn.Linear(32 * 2 * 2, 10))


def build_optimizer(model: nn.Module, lr: float = 3e-3) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr)


class DigitsTask(tl.TaskModule):
    def __init__(self, lr: float = 3e-3) -> None:
        super().__init__()
        self.model, self.lr = build_model(), lr

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.evaluate(batch, "val")

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.evaluate(batch, "test")

    def evaluate(self, batch: tuple[Tensor, Tensor], stage: str) -> None:
        images, labels = batch
        logits = self(images)
        self.log(f"{stage}_loss", F.cross_entropy(logits, labels))
        self.log(f"{stage}_acc", (logits.argmax(-1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return build_optimizer(self, self.lr)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=64, help="images per process and micro-batch")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per optimizer step")
    parser.add_argument("--devices", default="auto", help="how many processes on this machine")
    parser.add_argument("--strategy", default="auto", help="auto, single or ddp")
    parser.add_argument("--precision", default="32-true", help="32-true, bf16-mixed or 16-mixed")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    tl.seed_everything(args.seed)
    task = DigitsTask()
    train, val, test = build_loaders(args.batch_size)
    best = tl.callbacks.ModelCheckpoint(monitor="val_acc", mode="max")
    settings = {
        "max_epochs": args.max_epochs,
        "devices": args.devices,
        "strategy": args.strategy,
        "precision": args.precision,
        "accumulate_grad_batches": args.accumulate,
        "gradient_clip_val": 1.0,
        "log_every_n_steps": 5,
        "callbacks": [best, tl.callbacks.EarlyStopping(monitor="val_loss", patience=5)],
    }
    with RunFolder.create("runs", "digits", settings) as folder:  # runs/digits/1, then runs/digits/2 and so on
        trainer = tl.Trainer(**folder.flags(settings))
        trainer.fit(task, train, val)
        accuracy = trainer.test(task, test, ckpt_path="best")[0]["test_acc"]

    python, script = (path.removeprefix(f"{os.getcwd()}/") for path in (sys.executable, sys.argv[0]))
    trainer.print(f"\nTest accuracy    {accuracy:.4f}")
    trainer.print(f"Run folder       {folder.path}")
    trainer.print(f"Best checkpoint  {best.best_model_path}")
    trainer.print(f"\nNext: {python} -m treadle runs show digits/{folder.path.name}")
    trainer.print(f"      {python} -m tensorboard.main --logdir runs")
    trainer.print(f"      {python} {script} --devices 2")
    if accuracy < EXPECTED_ACCURACY:
        sys.exit(f"The accuracy is {accuracy:.4f}, expected at least {EXPECTED_ACCURACY}.")


if __name__ == "__main__":
    main()
