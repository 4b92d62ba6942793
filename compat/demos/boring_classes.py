"""Small tasks, datasets and data modules for tests and debugging, equivalent to Lightning's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Subset

from ...common.lazy_exports import lazy_exports
from ...trainer import DataModule, TaskModule

__all__ = [
    "BoringDataModule",
    "BoringModel",
    "DemoModel",
    "Net",
    "RandomDataset",
]


class RandomDataset(Dataset[Tensor]):
    """Dataset of ``length`` samples of ``size`` normally distributed numbers, drawn once."""

    def __init__(self, size: int, length: int) -> None:
        self.len = length
        self.data = torch.randn(length, size)

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index]

    def __len__(self) -> int:
        return self.len


class BoringModel(TaskModule):
    """Task with one linear layer from 32 to 2 features, which is trained to return ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        output: Tensor = self.layer(x)
        return output

    def loss(self, preds: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the mean squared error with respect to ``labels``, by default ones."""
        return nn.functional.mse_loss(preds, torch.ones_like(preds) if labels is None else labels)

    def step(self, batch: Any) -> Tensor:
        """Return the loss of a batch of shape ``(samples, 32)``."""
        return self.loss(self(batch))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """See `TaskModule.training_step`."""
        return {"loss": self.step(batch)}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """See `TaskModule.validation_step`."""
        return {"x": self.step(batch)}

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        """See `TaskModule.test_step`."""
        return {"y": self.step(batch)}

    def configure_optimizers(self) -> Any:
        """See `TaskModule.configure_optimizers`."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)]

    def train_dataloader(self) -> Any:
        """See `TaskModule.train_dataloader`."""
        return DataLoader(RandomDataset(32, 64))

    def val_dataloader(self) -> Any:
        """See `TaskModule.val_dataloader`."""
        return DataLoader(RandomDataset(32, 64))

    def test_dataloader(self) -> Any:
        """See `TaskModule.test_dataloader`."""
        return DataLoader(RandomDataset(32, 64))

    def predict_dataloader(self) -> Any:
        """See `TaskModule.predict_dataloader`."""
        return DataLoader(RandomDataset(32, 64))


class BoringDataModule(DataModule):
    """Data module with 64 samples of 32 numbers for each stage."""

    KINDS = ("train", "val", "test", "predict")

    def __init__(self) -> None:
        super().__init__()
        self.random_full = RandomDataset(32, 64 * len(self.KINDS))

    def setup(self, stage: str) -> None:
        """See `DataModule.setup`."""
        for kind in {"fit": ("train", "val"), "validate": ("val",)}.get(stage, (stage,)):
            start = 64 * self.KINDS.index(kind)
            self.__dict__[f"random_{kind}"] = Subset(self.random_full, range(start, start + 64))

    def train_dataloader(self) -> Any:
        """See `DataModule.train_dataloader`."""
        return DataLoader(self.__dict__["random_train"])

    def val_dataloader(self) -> Any:
        """See `DataModule.val_dataloader`."""
        return DataLoader(self.__dict__["random_val"])

    def test_dataloader(self) -> Any:
        """See `DataModule.test_dataloader`."""
        return DataLoader(self.__dict__["random_test"])

    def predict_dataloader(self) -> Any:
        """See `DataModule.predict_dataloader`."""
        return DataLoader(self.__dict__["random_predict"])


class DemoModel(TaskModule):
    """Task with one linear layer from 32 to ``out_dim`` features, which minimizes the sum of its outputs."""

    def __init__(self, out_dim: int = 10, learning_rate: float = 0.02) -> None:
        super().__init__()
        self.l1 = nn.Linear(32, out_dim)
        self.learning_rate = learning_rate

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output after ReLU."""
        return torch.relu(self.l1(x.view(x.size(0), -1)))

    def training_step(self, batch: Any, batch_nb: int) -> Any:
        """See `TaskModule.training_step`."""
        x = batch
        return self(x).sum()

    def configure_optimizers(self) -> Optimizer:
        """See `TaskModule.configure_optimizers`."""
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


class Net(nn.Module):
    """Network of two convolutions and two linear layers for images of 28 by 28 pixels and 10 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return log-probabilities, shape ``(batch, 10)``."""
        x = torch.relu(self.conv2(torch.relu(self.conv1(x))))
        x = self.dropout1(nn.functional.max_pool2d(x, 2)).flatten(1)
        return nn.functional.log_softmax(self.fc2(self.dropout2(torch.relu(self.fc1(x)))), dim=1)


__getattr__ = lazy_exports(__name__)[0]  # the names that the tables have
