"""Train on two dataloaders at once: 50 labeled digits, and 1,147 whose labels are not used.

    python examples/several_loaders.py

The epoch ends with the longer dataloader; the shorter one starts again.
"""

import torch
import torch.nn.functional as F
from digits import DigitsTask, build_loaders
from torch import Tensor
from torch.utils.data import DataLoader, Subset

import treadle as tl


class SemiSupervised(DigitsTask):
    """FixMatch: a confident prediction is the label of the same image, zoomed, shifted and with noise."""

    def training_step(self, batch: dict[str, tuple[Tensor, Tensor]], batch_idx: int) -> Tensor:
        images, labels = batch["labeled"]
        loss = F.cross_entropy(self(images), labels)
        if "unlabeled" in batch:
            images, _ = batch["unlabeled"]
            with torch.no_grad():
                confidence, guess = self(images).softmax(-1).max(-1)
            losses = F.cross_entropy(self(self.distort(images)), guess, reduction="none")
            loss = loss + (losses * (confidence > 0.9)).mean()
        return loss

    def distort(self, images: Tensor) -> Tensor:
        zoom, shift = 0.15 * torch.randn(2, len(images), 2, 1, device=images.device)
        affine = torch.cat([torch.diag_embed(1 + zoom.squeeze(-1)), shift], dim=-1)
        moved = F.grid_sample(images, F.affine_grid(affine, list(images.shape), False), align_corners=False)
        return moved + 0.1 * torch.randn_like(images)


train, val, _ = build_loaders(64)
order = torch.randperm(len(train.dataset), generator=torch.Generator().manual_seed(0)).tolist()
labeled = DataLoader(Subset(train.dataset, order[:50]), 50, shuffle=True)
unlabeled = DataLoader(Subset(train.dataset, order[50:]), 64, shuffle=True)
for loaders, epochs in (({"labeled": labeled}, 360), ({"labeled": labeled, "unlabeled": unlabeled}, 20)):
    tl.seed_everything(0)
    trainer = tl.Trainer(max_epochs=epochs, check_val_every_n_epoch=epochs, logger=False, enable_checkpointing=False)
    trainer.fit(SemiSupervised(), loaders, val)
    names = " and ".join(loaders)
    trainer.print(f"{names}: {trainer.global_step} steps, accuracy {trainer.callback_metrics['val_acc']:.3f}")
