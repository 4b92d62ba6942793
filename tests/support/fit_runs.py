"""A line that is fitted, and what notes the hooks of a run."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import treadle
from support.trainers import make_trainer


class Line(treadle.TaskModule):
    """One weight w, started at 0; the loss is mean(w * x), so the step's gradient is the mean of the x it saw."""

    def __init__(self, lr=1.0, **options):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))
        self.lr = lr
        self.options = options
        self.rates = []
        self.gradients = []
        self.batches = []

    def loss(self, batch):
        return (self.w * batch[0]).mean()

    def training_step(self, batch, batch_idx):
        self.batches.append(batch[0].flatten().tolist())
        return self.loss(batch)

    def on_before_optimizer_step(self, optimizer):
        self.gradients.append(self.w.grad.item())

    def on_step_end(self):
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, **self.options)


def numbers(*values, batch_size=1, **options):
    return DataLoader(TensorDataset(torch.tensor(values).reshape(-1, 1).float()), batch_size, **options)


def ones(count, batch_size=1, **options):
    return numbers(*[1.0] * count, batch_size=batch_size, **options)


def fit(task, *data, **flags):
    own = make_trainer(**flags)
    own.fit(task, *data)
    return own


class Recorder(treadle.Callback):
    """Writes down which hooks ran, and raises in one of them."""

    def __init__(self, where, told, error=RuntimeError):
        for name in treadle.callbacks.callback.HOOKS:

            def hook(*arguments, name=name):
                told.append(name)
                if name == where:
                    raise error(f"in {name}")

            setattr(self, name, hook)


class Staged(Line):
    def validation_step(self, batch, batch_idx):
        pass

    test_step = predict_step = validation_step


class Watched(Line):
    def __init__(self):
        super().__init__()
        self.when = []

    def on_validation_start(self):
        if not self.trainer.sanity_checking:
            self.when.append((self.trainer.progress.epoch, self.trainer.progress.batch))

    def validation_step(self, batch, batch_idx):
        self.log("val", batch[0].mean())
