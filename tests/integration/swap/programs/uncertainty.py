"""Collections of metrics over several loaders: torch-uncertainty 0.13.0.

MetricCollections cloned with prefixes are updated per loader and logged at the end of the evaluation; the Trainer
subclass has a name of its own for the results.
"""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Accuracy, CalibrationError, MetricCollection

OFF = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class TUTrainer(Trainer):
    def __init__(self, inference_mode=True, **kwargs):
        super().__init__(inference_mode=inference_mode, **kwargs)


class ClassificationRoutine(LightningModule):
    def __init__(self, model, loss, num_classes, optim_recipe):
        super().__init__()
        self.model, self.loss, self.optim_recipe = model, loss, optim_recipe
        task = {"task": "multiclass", "num_classes": num_classes}
        metrics = MetricCollection(
            {"cls/Acc": Accuracy(**task), "cal/ECE": CalibrationError(**task)}, compute_groups=False
        )
        self.val_cls_metrics, self.test_cls_metrics = metrics.clone(prefix="val/"), metrics.clone(prefix="test/")
        self.ood_scores = []

    def configure_optimizers(self):
        return self.optim_recipe

    def training_step(self, batch):
        loss = self.loss(self.model(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True, logger=True)
        return loss

    def validation_step(self, batch):
        self.val_cls_metrics.update(self.model(batch[0]).softmax(-1), batch[1])

    def test_step(self, batch, batch_idx, dataloader_idx=0):
        probs = self.model(batch[0]).softmax(-1)
        if dataloader_idx == 0:
            self.test_cls_metrics.update(probs, batch[1])
        else:
            self.ood_scores.append(-probs.max(-1).values)

    def on_validation_epoch_end(self):
        res_dict = self.val_cls_metrics.compute()
        self.log_dict(res_dict, logger=True, sync_dist=True)
        self.log("Acc%", res_dict["val/cls/Acc"] * 100, prog_bar=True, logger=False)
        self.val_cls_metrics.reset()

    def on_test_epoch_end(self):
        self.log_dict(self.test_cls_metrics.compute(), sync_dist=True)
        self.log("test/ood", torch.cat(self.ood_scores).mean())


def main(root):
    seed_everything(4)
    x = torch.randn(60, 5)
    data, ood = TensorDataset(x, x[:, :3].argmax(1)), TensorDataset(3 * torch.randn(20, 5), torch.zeros(20).long())
    net = nn.Linear(5, 3)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    recipe = {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}
    routine = ClassificationRoutine(net, nn.CrossEntropyLoss(), 3, recipe)
    trainer = TUTrainer(default_root_dir=root, max_epochs=3, enable_checkpointing=False, **OFF)
    trainer.fit(routine, DataLoader(data, 16), DataLoader(data, 25))
    fitted = {name: value.item() for name, value in trainer.callback_metrics.items()}
    tested = trainer.test(routine, [DataLoader(data, 25), DataLoader(ood, 20)], verbose=False)
    return {"fitted": fitted, "tested": tested, "rate": optimizer.param_groups[0]["lr"]}
