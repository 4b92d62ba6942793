"""Adapt a trained network to rotated images with LoRA: low-rank updates of frozen weights, as a torch parametrization.

    python examples/lora.py

The optimizer and the checkpoint hold the adapters alone. For Transformers with peft, see `finetune.py`.
"""

import torch
from digits import DigitsTask, build_loaders
from torch import Tensor, nn
from torch.nn.utils import parametrize

import treadle as tl


class LoRA(nn.Module):
    """A weight plus the product of two narrow matrices, which is zero at first."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        rows, columns = weight.flatten(1).shape
        self.down = nn.Parameter(torch.randn(rank, columns) / columns**0.5)
        self.up = nn.Parameter(torch.zeros(rows, rank))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + (self.up @ self.down).view_as(weight)


class Rotated(DigitsTask):
    def on_after_batch_transfer(self, batch: tuple[Tensor, Tensor], dataloader_idx: int) -> tuple[Tensor, Tensor]:
        return batch[0].rot90(1, (-2, -1)), batch[1]

    def add_adapters(self, rank: int) -> None:
        self.requires_grad_(False)
        for layer in self.modules():
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                parametrize.register_parametrization(layer, "weight", LoRA(layer.weight, rank))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], self.lr)


tl.seed_everything(0)
train, val, _ = build_loaders(64)
base = DigitsTask()
tl.Trainer(max_epochs=6, logger=False, enable_checkpointing=False).fit(base, train, val)

task = Rotated(lr=1e-2)
task.load_state_dict(base.state_dict())
saver = tl.callbacks.ModelCheckpoint("runs/lora", save_trainable_only=True)
trainer = tl.Trainer(max_epochs=6, logger=False, callbacks=[saver])
(before,) = trainer.validate(task, val, verbose=False)
task.add_adapters(rank=2)
trainer.fit(task, train, val)

saved = tl.load_checkpoint(saver.best_model_path)["state_dict"]
numbers = [sum(tensor.numel() for tensor in tensors) for tensors in (saved.values(), task.parameters())]
trainer.print(f"accuracy {before['val_acc']:.3f} before, {trainer.callback_metrics['val_acc']:.3f} after")
trainer.print(f"the checkpoint holds {numbers[0]:,} of {numbers[1]:,} parameters")
