"""Learn embeddings of digits without labels: two views of an image attract each other, all others of the batch repel.

    python examples/contrastive.py
    python examples/contrastive.py --devices 2     each process embeds half of the batch

`gather(..., sync_grads=True)` brings the embeddings of all processes together and sends the gradients back, so the
loss compares each image with the whole global batch.
"""

import argparse

import torch
import torch.nn.functional as F
from digits import build_loaders, build_model
from torch import Tensor

import treadle as tl


class SimCLR(tl.TaskModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = build_model()

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        views = [F.normalize(self.model(self.augment(batch[0])), dim=-1) for _ in range(2)]
        rows, columns = self.trainer.accelerator.gather(tuple(views), sync_grads=True)
        loss = F.cross_entropy(rows @ columns.T / 0.1, torch.arange(len(rows), device=self.device))
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def augment(self, images: Tensor) -> Tensor:
        zoom, shift = 0.2 * torch.randn(2, len(images), 2, 1, device=images.device)
        affine = torch.cat([torch.diag_embed(1 + zoom.squeeze(-1)), shift], dim=-1)
        moved = F.grid_sample(images, F.affine_grid(affine, list(images.shape), False), align_corners=False)
        return moved + 0.1 * torch.randn_like(images)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1)
    args = parser.parse_args()

    tl.seed_everything(0)
    train, _, test = build_loaders(128 // args.devices)
    task = SimCLR()
    trainer = tl.Trainer(max_epochs=15, devices=args.devices, logger=False, enable_checkpointing=False)
    trainer.fit(task, train)

    known, labels = train.dataset[:]
    images, expected = test.dataset[:]
    with torch.no_grad():
        nearest = (F.normalize(task.model(images)) @ F.normalize(task.model(known)).T).argmax(-1)
    trainer.print(f"loss {trainer.callback_metrics['loss']:.2f}")
    trainer.print(f"the nearest neighbor has the same label: {(labels[nearest] == expected).float().mean():.3f}")
