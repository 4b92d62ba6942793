"""Data apart from the model: where it comes from and how it is loaded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ..engine import move_data_to_device
from .hparams import HyperparametersMixin

if TYPE_CHECKING:
    from .trainer import Trainer

LOADERS = ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader")


class TransferHooks:
    """How a batch gets to the device; overridden on a task or a data module (the data module's wins)."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change the batch on the host."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move the batch."""
        return move_data_to_device(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change the batch on the device."""
        return batch


class DataModule(HyperparametersMixin, TransferHooks):
    """The data of a task. ``prepare_data`` runs once per machine, ``setup`` on every process.

    Attributes:
        trainer: the Trainer that uses it, once there is one.
    """

    trainer: Trainer | None = None

    def prepare_data(self) -> None:
        """Download or build data on disk: runs on one process per machine, before ``setup``."""

    def setup(self, stage: str) -> None:
        """Make the datasets of a stage (``fit``, ``validate``, ``test``, ``predict``)."""

    def teardown(self, stage: str) -> None:
        """Clean up after a stage."""

    def train_dataloader(self) -> Any:
        """Return the training loader."""
        raise NotImplementedError

    def val_dataloader(self) -> Any:
        """Return the validation loader, or several."""
        raise NotImplementedError

    def test_dataloader(self) -> Any:
        """Return the test loader, or several."""
        raise NotImplementedError

    def predict_dataloader(self) -> Any:
        """Return the predict loader, or several."""
        raise NotImplementedError

    def on_exception(self, exception: BaseException) -> None:
        """Something raised during a stage."""

    def state_dict(self) -> dict[str, Any]:
        """What to save in a checkpoint."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` returned."""

    @classmethod
    def from_datasets(
        cls,
        train_dataset: Dataset[Any] | Iterable[Dataset[Any]] | None = None,
        val_dataset: Dataset[Any] | Iterable[Dataset[Any]] | None = None,
        test_dataset: Dataset[Any] | Iterable[Dataset[Any]] | None = None,
        predict_dataset: Dataset[Any] | Iterable[Dataset[Any]] | None = None,
        batch_size: int = 1,
        num_workers: int = 0,
        **kwargs: Any,
    ) -> DataModule:
        """A data module around datasets you have already; the training set is shuffled."""

        def loader(dataset: Any, shuffle: bool = False) -> Any:
            if isinstance(dataset, list | tuple):
                return [loader(each, shuffle) for each in dataset]
            shuffle = shuffle and not isinstance(dataset, IterableDataset)
            return DataLoader(dataset, batch_size=batch_size, shuffle=shuffle, num_workers=num_workers)

        module = cls(**kwargs)
        given = (train_dataset, val_dataset, test_dataset, predict_dataset)
        for name, dataset in zip(LOADERS, given, strict=True):
            if dataset is not None:
                setattr(module, name, lambda dataset=dataset, name=name: loader(dataset, name == LOADERS[0]))
        return module
