"""Self-supervised momentum method: solo-learn 1.0.2, solo/methods/base.py, and lightly 1.6.0.

Batches are lists of views; the target network follows in ``on_train_batch_end`` when ``global_step`` has moved; an
online classifier has a parameter group of its own; the schedule is sized by ``trainer.estimated_stepping_batches``;
``optimizer_zero_grad`` and ``configure_gradient_clipping`` are overridden.
"""

import copy
import math

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

OFF = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class BYOL(LightningModule):
    def __init__(self):
        super().__init__()
        self.student, self.head = nn.Linear(6, 4), nn.Linear(4, 4)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.online_classifier = nn.Linear(4, 2)
        self.last_step, self.tau = 0, 0.9

    def training_step(self, batch, batch_idx):
        views, y = batch[:2], batch[2]
        feats = [self.student(view) for view in views]
        targets = [self.teacher(view) for view in views]
        pairs = zip(feats, targets[::-1], strict=True)
        loss = sum(-nn.functional.cosine_similarity(self.head(f), t.detach()).mean() for f, t in pairs)
        class_loss = nn.functional.cross_entropy(self.online_classifier(feats[0].detach()), y)
        self.log_dict({"train_loss": loss, "train_class_loss": class_loss}, on_epoch=True, sync_dist=True)
        return loss + class_loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.trainer.global_step > self.last_step:
            for online, target in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
                target.data.mul_(self.tau).add_(online.data, alpha=1 - self.tau)
            progress = self.trainer.global_step / self.trainer.estimated_stepping_batches
            self.tau = 1 - (1 - 0.9) * (math.cos(math.pi * progress) + 1) / 2
        self.last_step = self.trainer.global_step

    def validation_step(self, batch, batch_idx):
        logits = self.online_classifier(self.student(batch[0]))
        self.log("val_acc", (logits.argmax(1) == batch[2]).float().mean(), prog_bar=True, batch_size=len(batch[2]))

    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=True)

    def configure_optimizers(self):
        groups = [
            {"name": "backbone", "params": [*self.student.parameters(), *self.head.parameters()]},
            {"name": "classifier", "params": self.online_classifier.parameters(), "lr": 0.1, "weight_decay": 0},
        ]
        optimizer = torch.optim.SGD(groups, lr=0.05 * 16 / 8, momentum=0.9, weight_decay=1e-4)
        steps = int(self.trainer.estimated_stepping_batches)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return [optimizer], [{"scheduler": cosine, "interval": "step"}]


def main(root):
    seed_everything(0, workers=True)
    x = torch.randn(64, 6)
    data = TensorDataset(x + 0.1 * torch.randn(64, 6), x + 0.1 * torch.randn(64, 6), (x[:, 0] > 0).long())
    model = BYOL()
    flags = {"enable_checkpointing": False, "accumulate_grad_batches": 2, "num_sanity_val_steps": 0, **OFF}
    trainer = Trainer(default_root_dir=root, max_epochs=3, **flags)
    trainer.fit(model, DataLoader(data, 8, drop_last=True), DataLoader(data, 32))
    return {
        "val_acc": trainer.callback_metrics["val_acc"].item(),
        "tau": model.tau,
        "last_step": model.last_step,
        "train_loss": trainer.callback_metrics["train_loss_epoch"].item(),
        "teacher": model.teacher.weight.sum().item(),
    }
