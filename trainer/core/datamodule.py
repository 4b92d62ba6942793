"""`DataModule`: the datasets and dataloaders of a task."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ...engine import honor_type, move_data_to_device
from .hparams import HyperparametersMixin

if TYPE_CHECKING:
    from ..trainer import Trainer

LOADERS = ("train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader")


class DataHooks:
    """Hooks that make the data of a run and move batches to the device.

    Those of a data module take precedence over those of a task.
    """

    prepare_data_per_node: bool = True
    """Run ``prepare_data`` on one process of each machine instead of one process in total."""

    allow_zero_length_dataloader_with_multiple_devices: bool = False
    """Accepted for Lightning compatibility. A process without a share of the data always takes part, with weight 0."""

    def prepare_data(self) -> None:
        """Download data or prepare it on disk. Runs before ``setup``, by default on one process of each machine."""

    def setup(self, stage: str) -> None:
        """Create the datasets or layers of a stage. Runs on every process.

        Args:
            stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        """

    def teardown(self, stage: str) -> None:
        """Clean up after a stage, whether it succeeded or failed.

        Args:
            stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        """

    def train_dataloader(self) -> Any:
        """Return the training dataloader, or several in a dict, list or tuple.

        With several dataloaders, each batch contains one batch of every dataloader.
        """
        raise NotImplementedError

    def val_dataloader(self) -> Any:
        """Return the validation dataloader, or several in a dict, list or tuple."""
        raise NotImplementedError

    def test_dataloader(self) -> Any:
        """Return the test dataloader, or several in a dict, list or tuple."""
        raise NotImplementedError

    def predict_dataloader(self) -> Any:
        """Return the prediction dataloader, or several in a dict, list or tuple."""
        raise NotImplementedError

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return the batch to move to the device, changed on the host. Default: no change.

        Args:
            batch: Batch from the dataloader.
            dataloader_idx: Index among the validation, test or prediction dataloaders; 0 in training.
        """
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move the batch to the device and return it.

        Args:
            batch: Batch on the host.
            device: Device of this process.
            dataloader_idx: Index among the validation, test or prediction dataloaders; 0 in training.
        """
        return move_data_to_device(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return the batch for the step, changed on the device. Default: no change.

        Args:
            batch: Batch on the device.
            dataloader_idx: Index among the validation, test or prediction dataloaders; 0 in training.
        """
        return batch


class DataModule(HyperparametersMixin, DataHooks):
    """Datasets and dataloaders of a task.

    Attributes:
        trainer: The Trainer that uses the data module, or None.
        name: User-defined label. Default: None.
        prepare_data_per_node: Run ``prepare_data`` on one process of each machine instead of only on rank zero.
            Default: True.
        allow_zero_length_dataloader_with_multiple_devices: Ignored. If sharding leaves a process without samples, the
            process takes part in the step with weight 0.

    Examples:
        >>> import torch
        >>> import treadle as tl
        >>> class Numbers(tl.DataModule):
        ...     def setup(self, stage):
        ...         self.numbers = torch.arange(8.0).reshape(8, 1)
        ...     def train_dataloader(self):
        ...         return torch.utils.data.DataLoader(self.numbers, batch_size=4)
        >>> data = Numbers()
        >>> data.setup("fit")
        >>> len(data.train_dataloader())
        2
    """

    CHECKPOINT_HYPER_PARAMS_KEY = "datamodule_hyper_parameters"
    CHECKPOINT_HYPER_PARAMS_NAME = "datamodule_hparams_name"
    CHECKPOINT_HYPER_PARAMS_TYPE = "datamodule_hparams_type"

    trainer: Trainer | None = None
    name: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "trainer": None}  # dataloader workers and copies need none, as with a task

    def on_exception(self, exception: BaseException) -> None:
        """React to an exception on this process. Do not call collectives: other ranks may not reach them.

        Args:
            exception: The exception.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in checkpoints: plain data and tensors. Default: an empty dict."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned.

        Args:
            state_dict: Result of `state_dict`.
        """

    @classmethod
    def from_datasets(
        cls,
        train_dataset: Dataset[Any] | Iterable[Any] | None = None,
        val_dataset: Dataset[Any] | Iterable[Any] | None = None,
        test_dataset: Dataset[Any] | Iterable[Any] | None = None,
        predict_dataset: Dataset[Any] | Iterable[Any] | None = None,
        batch_size: int = 1,
        num_workers: int = 0,
        **kwargs: Any,
    ) -> Self:
        """Return a data module for existing datasets. Map-style training datasets are shuffled.

        Args:
            train_dataset: Dataset for training, or several in an iterable or a dict. Default: none.
            val_dataset: Datasets for validation, in the same forms. Default: none.
            test_dataset: Datasets for testing, in the same forms. Default: none.
            predict_dataset: Datasets for prediction, in the same forms. Default: none.
            batch_size: Batch size of each dataloader; also passed to ``__init__`` if accepted there. Default: 1.
            num_workers: Worker processes of each dataloader; also passed to ``__init__`` if accepted there. Default: 0.
            kwargs: Further arguments of ``__init__``.
        """

        def build_loader(dataset: Any, shuffle: bool) -> Any:
            if isinstance(dataset, Dataset) or (hasattr(dataset, "__getitem__") and not _is_nested(dataset)):
                shuffle = shuffle and not isinstance(dataset, IterableDataset)
                return DataLoader(dataset, batch_size=batch_size, shuffle=shuffle, num_workers=num_workers)
            if isinstance(dataset, Mapping):
                return {name: build_loader(part, shuffle) for name, part in dataset.items()}
            if not isinstance(dataset, Iterable):
                raise TypeError(
                    f"from_datasets got {dataset!r:.100}, but a dataset must have __getitem__ or __iter__. Wrap "
                    "samples in a torch.utils.data.Dataset."
                )
            loaders = [build_loader(part, shuffle) for part in dataset]
            return honor_type(dataset, loaders) if isinstance(dataset, list | tuple) else loaders

        init_parameters = inspect.signature(cls.__init__).parameters
        init_arguments = {"batch_size": batch_size, "num_workers": num_workers}
        if cls.__init__ is object.__init__ or not any(p.kind is p.VAR_KEYWORD for p in init_parameters.values()):
            init_arguments = {name: value for name, value in init_arguments.items() if name in init_parameters}
        module = cls(**{**init_arguments, **kwargs})
        datasets = (train_dataset, val_dataset, test_dataset, predict_dataset)
        for name, dataset in zip(LOADERS, datasets, strict=True):
            if dataset is not None:
                setattr(module, name, lambda dataset=dataset, name=name: build_loader(dataset, name == LOADERS[0]))
        return module

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | os.PathLike[str] | IO[bytes],
        map_location: Any = None,
        hparams_file: str | Path | None = None,
        weights_only: bool | None = None,
        *,
        sha256: str | None = None,
        **kwargs: Any,
    ) -> Self:
        """Build a data module from the hyperparameters in a checkpoint, restore its state, and return it.

        Args:
            checkpoint_path: Path or URL of a Treadle checkpoint or a Lightning ``.ckpt``.
            map_location: Ignored.
            hparams_file: Path of a YAML file of hyperparameters, such as a logger's ``hparams.yaml``. These
                hyperparameters replace the saved ones.
            weights_only: Ignored; code stored in a checkpoint is never executed.
            sha256: Expected SHA-256 digest of the file. Without it, a download only warns with its digest.
            kwargs: Arguments of ``__init__``, which override the saved ones.

        Raises:
            TypeError: If an argument has the wrong type, or a required argument of ``__init__`` is missing.
            ValueError: If an argument is invalid, or the checkpoint cannot be loaded.
            OSError: If a download fails, or a file cannot be opened.
        """
        from .loading import build_datamodule, warn_of_code

        warn_of_code(weights_only)
        return build_datamodule(cls, checkpoint_path, hparams_file, sha256, kwargs)


def _is_nested(value: Any) -> bool:
    return isinstance(value, list | tuple | Mapping)
