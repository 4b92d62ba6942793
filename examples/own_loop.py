"""The training of `digits.py` with a hand-written loop: the same model, data and losses, bit for bit.

    python examples/own_loop.py
    torchrun --nproc-per-node 2 examples/own_loop.py

The Trainer's loop makes the same calls, so processes, precisions and checkpoints work here as well.
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from digits import EXPECTED_ACCURACY, build_loaders, build_model, build_optimizer
from torch import Tensor, nn

import treadle as tl


def train(args: argparse.Namespace) -> tuple[list[Tensor], float]:
    """Train, and test the weights that were best in validation.

    Returns:
        This process's loss in each micro-batch, and the test accuracy.
    """
    accelerator = tl.Accelerator(
        gradient_accumulation_steps=args.accumulate, mixed_precision=args.mixed_precision, cpu=args.cpu
    )
    tl.seed_everything(args.seed)
    model = build_model()
    optimizer = build_optimizer(model)
    model, optimizer, train_loader, val_loader, test_loader = accelerator.prepare(
        model, optimizer, *build_loaders(args.batch_size)
    )
    losses, best, folder = [], 0.0, Path("runs/own_loop/best")

    for epoch in range(args.max_epochs):
        model.train()
        for images, labels in train_loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        accuracy = evaluate(accelerator, model, val_loader)
        accelerator.print(f"epoch {epoch:2}  train_loss {losses[-1]:.4f}  val_acc {accuracy:.4f}")
        if accuracy > best:
            best = accuracy
            accelerator.save_state(folder)

    accelerator.load_state(folder)
    accuracy = evaluate(accelerator, model, test_loader)
    accelerator.print(f"\nTest accuracy    {accuracy:.4f}")
    accelerator.print(f"Best checkpoint  {folder}")
    accelerator.end_training()
    return losses, accuracy


@torch.no_grad()
def evaluate(accelerator: tl.Accelerator, model: nn.Module, loader: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Return the accuracy over all of a dataloader's images, each counted once on any number of processes."""
    model.eval()
    correct = []
    for images, labels in loader:
        correct.append(accelerator.gather_for_metrics(model(images).argmax(-1) == labels))
    return torch.cat(correct).float().mean().item()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--max-epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=64, help="images per process and micro-batch")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per optimizer step")
    parser.add_argument("--mixed-precision", default="no", help="no, bf16 or fp16")
    parser.add_argument("--cpu", action="store_true", help="stay on the CPU")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    _, accuracy = train(parse_args())
    if accuracy < EXPECTED_ACCURACY:
        sys.exit(f"The accuracy is {accuracy:.4f}, expected at least {EXPECTED_ACCURACY}.")
