"""When a resumed run restores what: its hooks see which states."""

import torch
from quiet import QUIET
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import treadle


class Line(treadle.TaskModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Counts(treadle.Callback):
    def __init__(self):
        self.count, self.seen = 0, {}

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]

    def on_train_batch_end(self, *args):
        self.count += 1

    def on_fit_start(self, trainer, task):
        self.seen["on_fit_start"] = self.count

    def on_train_start(self, trainer, task):
        self.seen["on_train_start"] = self.count


def test_states_of_callbacks_are_restored_after_on_fit_start(tmp_path):
    def fit(epochs, path=None):
        counts = Counts()
        trainer = treadle.Trainer(accelerator="cpu", max_epochs=epochs, callbacks=[counts], **QUIET)
        trainer.fit(Line(), DataLoader(TensorDataset(torch.ones(3, 2))), ckpt_path=path)
        return trainer, counts

    trainer, _ = fit(1)
    trainer.save_checkpoint(tmp_path / "c.ckpt")
    _, counts = fit(2, tmp_path / "c.ckpt")
    assert counts.seen == {"on_fit_start": 0, "on_train_start": 3}
    assert counts.count == 6
