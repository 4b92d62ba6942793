"""MNIST as a data module, equivalent to Lightning's demo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, random_split

from ...trainer import DataModule

__all__ = ["MNIST", "MNISTDataModule"]


def MNIST(*args: Any, **kwargs: Any) -> Dataset[Any]:
    """Return ``torchvision.datasets.MNIST(*args, **kwargs)``."""
    from torchvision.datasets import MNIST as Images

    images: Dataset[Any] = Images(*args, **kwargs)
    return images


class MNISTDataModule(DataModule):
    """Data module with MNIST's training images, some of which are used for validation, and its test images.

    Args:
        data_dir: Folder of the files, which are downloaded if they are missing. Default: ``"./data"``.
        val_split: Number of training images used for validation. Default: 5000.
        num_workers: Number of dataloader workers. Default: 16.
        normalize: Whether to scale pixels to the range from -1 to 1 instead of 0 to 1. Default: False.
        seed: Accepted and ignored. The split is the same for every seed, as in Lightning.
        batch_size: Images per batch. An incomplete last batch is dropped, also in validation and testing. Default: 32.
    """

    name = "mnist"
    num_classes = 10

    def __init__(
        self,
        data_dir: str = "./data",
        val_split: int = 5000,
        num_workers: int = 16,
        normalize: bool = False,
        seed: int = 42,
        batch_size: int = 32,
    ) -> None:
        super().__init__()
        self.data_dir, self.val_split, self.num_workers = data_dir, val_split, num_workers
        self.normalize, self.seed, self.batch_size = normalize, seed, batch_size

    def prepare_data(self) -> None:
        """Download MNIST's files, unless they exist."""
        for train in (True, False):
            MNIST(self.data_dir, train=train, download=True)

    def setup(self, stage: str) -> None:
        """Split the training images into a training set and a validation set."""
        images: Any = MNIST(self.data_dir, train=True, download=False, transform=self.default_transforms)
        lengths = [len(images) - self.val_split, self.val_split]
        self.dataset_train, self.dataset_val = random_split(images, lengths, torch.Generator().manual_seed(42))

    def _make_loader(self, dataset: Dataset[Any], shuffle: bool) -> DataLoader[Any]:
        return DataLoader(
            dataset,
            batch_size=self.batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            drop_last=True,
            pin_memory=torch.cuda.is_available(),
        )

    def train_dataloader(self) -> Any:
        """Return a shuffled dataloader of the training images."""
        return self._make_loader(self.dataset_train, shuffle=True)

    def val_dataloader(self) -> Any:
        """Return a dataloader of the validation images."""
        return self._make_loader(self.dataset_val, shuffle=False)

    def test_dataloader(self) -> Any:
        """Return a dataloader of the test images."""
        test = MNIST(self.data_dir, train=False, download=False, transform=self.default_transforms)
        return self._make_loader(test, shuffle=False)

    @property
    def default_transforms(self) -> Callable[[Any], Any]:
        """Transform of an image to a tensor."""
        from torchvision import transforms

        parts = [transforms.ToTensor()] + [transforms.Normalize((0.5,), (0.5,))] * self.normalize
        transform: Callable[[Any], Any] = transforms.Compose(parts)
        return transform
