"""Data apart from the model: where it comes from and how it is loaded."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ...engine import honor_type, move_data_to_device
from ...engine.data import CombinedLoader, get_length, is_collection
from .hparams import HyperparametersMixin

if TYPE_CHECKING:
    from ..trainer import Trainer

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
        trainer: The Trainer that uses it, once there is one.
        name: A name of your own.
        prepare_data_per_node: Whether ``prepare_data`` runs on one process of each machine, or on one of all.
        allow_zero_length_dataloader_with_multiple_devices: Accepted for Lightning's users: a process without a share of
            the data always takes part, with weight zero.
    """

    trainer: Trainer | None = None
    name: str | None = None
    prepare_data_per_node: bool = True
    allow_zero_length_dataloader_with_multiple_devices: bool = False

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

    def __str__(self) -> str:
        """What each loader's dataset holds, as far as it can be made now."""
        names = ("Train", "Validation", "Test", "Predict")
        pairs = zip(names, LOADERS, strict=True)
        return "\n".join(f"{{{name} dataloader: {', '.join(_describe_sizes(self, method))}}}" for name, method in pairs)

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
        train_dataset: Dataset[Any] | Iterable[Any] | None = None,
        val_dataset: Dataset[Any] | Iterable[Any] | None = None,
        test_dataset: Dataset[Any] | Iterable[Any] | None = None,
        predict_dataset: Dataset[Any] | Iterable[Any] | None = None,
        batch_size: int = 1,
        num_workers: int = 0,
        **kwargs: Any,
    ) -> Self:
        """A data module around datasets you have already; the training set is shuffled.

        Args:
            train_dataset: A dataset, or several in lists, tuples and dicts.
            val_dataset, test_dataset, predict_dataset: The same.
            batch_size: Of each loader; ``__init__`` gets it too, if it has an argument of this name.
            num_workers: The same.
            kwargs: More for ``__init__``.
        """

        def build_loader(dataset: Any, shuffle: bool) -> Any:
            if isinstance(dataset, Dataset) or (hasattr(dataset, "__getitem__") and not _is_nested(dataset)):
                shuffle = shuffle and not isinstance(dataset, IterableDataset)
                return DataLoader(dataset, batch_size=batch_size, shuffle=shuffle, num_workers=num_workers)
            if isinstance(dataset, Mapping):
                return {name: build_loader(part, shuffle) for name, part in dataset.items()}
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
        checkpoint_path: str | os.PathLike[str],
        map_location: Any = None,
        hparams_file: str | Path | None = None,
        weights_only: bool | None = None,
        *,
        sha256: str | None = None,
        **kwargs: Any,
    ) -> Self:
        """Build the data module from the hyperparameters in a checkpoint, and load its state. No code in it is run.

        Args:
            checkpoint_path: A checkpoint of ours; a Lightning ``.ckpt``; or the URL of a file, with ``sha256``.
            map_location: Accepted for Lightning's signature: a data module's tensors stay on the CPU.
            hparams_file: The ``hparams.yaml`` or ``.csv`` of a logger, in place of the saved hyperparameters.
            weights_only: Accepted for Lightning's signature; code in a file never runs.
            sha256: The digest of the file, compared before anything in it is looked at.
            kwargs: Arguments of ``__init__``, in place of the saved ones.

        Raises:
            ValueError: If it is no checkpoint, is damaged or harmful.
        """
        from .loading import build_datamodule, warn_of_code

        warn_of_code(weights_only)
        return build_datamodule(cls, checkpoint_path, hparams_file, sha256, kwargs)


def _is_nested(value: Any) -> bool:
    return isinstance(value, list | tuple | Mapping)


def _describe_sizes(module: DataModule, method: str) -> Iterator[str]:
    """How many samples each of a method's loaders has; "None" where there is none, or none yet."""
    try:
        loaders = getattr(module, method)()
    except Exception:  # the user's hook, which may need a setup() that has not been
        loaders = None
    if loaders is None:
        yield "None"
        return
    combined = CombinedLoader(loaders) if is_collection(loaders) else loaders
    for loader in combined.flattened if isinstance(combined, CombinedLoader) else [combined]:
        size = get_length(getattr(loader, "dataset", None))
        yield "size=NA" if size is None else f"size={size}"
