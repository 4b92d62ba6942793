"""The training of `digits.py` with a hand-written loop: the same model, data and losses, bit for bit.

    python examples/own_loop.py
    torchrun --nproc-per-node 2 examples/own_loop.py

The Trainer's loop makes the same calls, so processes, precisions and checkpoints work here as well.
"""

import torch
import torch.nn.functional as F
from digits import build_loaders, build_model, build_optimizer
from torch import Tensor, nn
from torch.utils.data import DataLoader

import treadle as tl


def run(epochs: int = 15, batch_size: int = 64, **options: object) -> tuple[list[Tensor], float]:
    """Return this process's losses, and the test accuracy of the weights that were best in validation."""
    accelerator = tl.Accelerator(**options)
    tl.seed_everything(0)
    model = build_model()
    optimizer = build_optimizer(model)
    model, optimizer, train, val, test = accelerator.prepare(model, optimizer, *build_loaders(batch_size))
    losses, best, folder = [], 0.0, "runs/own_loop/best"
    for epoch in range(epochs):
        model.train()
        for images, labels in train:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        accuracy = evaluate(accelerator, model, val)
        accelerator.print(f"epoch {epoch}  train_loss {losses[-1]:.4f}  val_acc {accuracy:.4f}")
        if accuracy > best:
            best = accuracy
            accelerator.save_state(folder)

    accelerator.load_state(folder)
    accuracy = evaluate(accelerator, model, test)
    accelerator.print(f"test accuracy {accuracy:.4f}")
    accelerator.end_training()
    return losses, accuracy


@torch.no_grad()
def evaluate(accelerator: tl.Accelerator, model: nn.Module, loader: DataLoader) -> float:
    """Return the accuracy over all images, each counted once on any number of processes."""
    model.eval()
    hits = [accelerator.gather_for_metrics(model(images).argmax(-1) == labels) for images, labels in loader]
    return torch.cat(hits).float().mean().item()


if __name__ == "__main__":
    run(mixed_precision="no", gradient_accumulation_steps=1)
