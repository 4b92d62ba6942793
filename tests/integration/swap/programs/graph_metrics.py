"""Graph classifier: pyg-team/pytorch_geometric @0361d9f0, examples/pytorch_lightning/gin.py.

Batches are objects of a class of the library with ``.to()``; metric objects are logged with ``batch_size``.
"""

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import Accuracy


class Graphs:
    def __init__(self, samples):
        self.x = torch.cat([x for x, _ in samples])
        self.batch = torch.cat([torch.full((len(x),), i) for i, (x, _) in enumerate(samples)])
        self.y = torch.tensor([y for _, y in samples])
        self.num_graphs = len(samples)

    def to(self, device, non_blocking=False):
        self.x, self.batch, self.y = (part.to(device) for part in (self.x, self.batch, self.y))
        return self


class Model(pl.LightningModule):
    def __init__(self, in_channels: int, out_channels: int, hidden_channels: int = 8, dropout=0.0):
        super().__init__()
        self.lin = nn.Sequential(nn.Linear(in_channels, hidden_channels), nn.ReLU())
        self.classifier = nn.Linear(hidden_channels, out_channels)
        self.dropout = dropout
        self.train_acc = Accuracy(task="multiclass", num_classes=out_channels)
        self.val_acc = Accuracy(task="multiclass", num_classes=out_channels)
        self.test_acc = Accuracy(task="multiclass", num_classes=out_channels)

    def forward(self, x, batch, size):
        pooled = torch.zeros(size, 8).index_add(0, batch, self.lin(x))
        return self.classifier(F.dropout(pooled, self.dropout, self.training))

    def training_step(self, data, batch_idx):
        y_hat = self(data.x, data.batch, data.num_graphs)
        loss = F.cross_entropy(y_hat, data.y)
        self.train_acc(y_hat.softmax(dim=-1), data.y)
        self.log("train_acc", self.train_acc, prog_bar=True, on_step=False, on_epoch=True, batch_size=data.num_graphs)
        return loss

    def validation_step(self, data, batch_idx):
        y_hat = self(data.x, data.batch, data.num_graphs)
        self.val_acc(y_hat.softmax(dim=-1), data.y)
        self.log("val_acc", self.val_acc, prog_bar=True, on_step=False, on_epoch=True, batch_size=data.num_graphs)
        self.log("val_loss", F.cross_entropy(y_hat, data.y), batch_size=data.num_graphs)

    def test_step(self, data, batch_idx):
        y_hat = self(data.x, data.batch, data.num_graphs)
        self.test_acc(y_hat.softmax(dim=-1), data.y)
        self.log("test_acc", self.test_acc, prog_bar=True, on_step=False, on_epoch=True, batch_size=data.num_graphs)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main(root):
    pl.seed_everything(42)
    sizes = torch.randint(2, 6, (70,)).tolist()
    samples = [(torch.randn(size, 4) + (i % 2), i % 2) for i, size in enumerate(sizes)]

    def loader(part):
        return DataLoader(part, 16, collate_fn=Graphs)

    model = Model(4, 2)
    checkpoint = pl.callbacks.ModelCheckpoint(dirpath=root, monitor="val_acc", save_top_k=1, mode="max")
    trainer = pl.Trainer(
        default_root_dir=root,
        accelerator="cpu",
        devices=1,
        max_epochs=5,
        log_every_n_steps=5,
        callbacks=[checkpoint],
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(model, loader(samples[:42]), loader(samples[42:60]))
    fitted = {name: value.item() for name, value in trainer.callback_metrics.items()}
    tested = trainer.test(dataloaders=loader(samples[60:]), ckpt_path="best")
    return {"fitted": fitted, "tested": tested, "best": checkpoint.best_model_score.item()}
