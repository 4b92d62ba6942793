"""Where batches come from: loaders that were passed, the data module's, or the task's; prepared and limited."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ..engine import Accelerator, Loader
from . import flags
from .datamodule import DataModule, TransferHooks
from .task import TaskModule

KINDS = ("train", "val", "test", "predict")
_TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class Sources:
    """The loaders of one stage. Each kind is asked for once, when it is first needed.

    Args:
        task: the user's task.
        datamodule: the user's data module, or None.
        given: by kind (``"train"``, ``"val"``, ``"test"``, ``"predict"``), what was passed to the entry point.
        accelerator: prepares the loaders.
        limits: by kind, the checked ``limit_*_batches``.
        shard: whether to share each loader out over the processes.
    """

    def __init__(
        self,
        task: TaskModule,
        datamodule: DataModule | None,
        given: Mapping[str, Any],
        accelerator: Accelerator,
        limits: Mapping[str, int | float],
        shard: bool,
    ) -> None:
        self.task = task
        self.datamodule = datamodule
        self.given = given
        self.limits = limits
        self._accelerator = accelerator
        self._shard = shard
        self._train: Loader | None = None
        self._evaluation: dict[str, list[Loader]] = {}

    @property
    def train(self) -> Loader:
        """The prepared training loader."""
        if self._train is None:
            source = self._find("train")
            if source is None:
                raise ValueError(
                    "fit needs a training loader: pass train_dataloaders or a datamodule, or give the task a "
                    "train_dataloader."
                )
            if _collection(source):
                raise ValueError("several training loaders at once are not supported yet: pass one.")
            self._train = self._prepare("train", source, 0)
        return self._train

    def evaluation(self, kind: str) -> list[Loader]:
        """The prepared loaders of ``"val"``, ``"test"`` or ``"predict"``; empty where there are none."""
        if kind not in self._evaluation:
            source = self._find(kind)
            none = source is None or (isinstance(source, list | tuple) and not source)
            several = [] if none else _collection(source) or [source]
            self._evaluation[kind] = [self._prepare(kind, each, number) for number, each in enumerate(several)]
        return self._evaluation[kind]

    def _find(self, kind: str) -> Any:
        if self.given.get(kind) is not None:
            return self.given[kind]
        method = f"{kind}_dataloader"
        for owner, base in ((self.datamodule, DataModule), (self.task, TaskModule)):
            if owner is None:
                continue
            if getattr(type(owner), method) is not getattr(base, method) or method in vars(owner):
                return getattr(owner, method)()
        return None

    def _prepare(self, kind: str, source: Any, number: int) -> Loader:
        _refuse_what_yields_no_batches(kind, source)
        loader = self._accelerator.prepare_data_loader(
            source, shard=self._shard, evaluation=kind != "train", move=self._mover(number)
        )
        count = flags.limited(f"limit_{kind}_batches", self.limits[kind], loader.length)
        loader.limit = None if count == loader.length else count
        return loader

    def _mover(self, number: int) -> Callable[[Any], Any] | None:
        """The user's own way to the device, or None for the accelerator's."""
        owners = [owner for owner in (self.datamodule, self.task) if owner is not None]
        # Each hook for itself: a data module may augment while the task moves.
        chosen = [next((o for o in owners if _overrides(o, name)), None) for name in _TRANSFER]
        if all(owner is None for owner in chosen):
            return None
        before, move, after = (
            getattr(self.task if owner is None else owner, name) for owner, name in zip(chosen, _TRANSFER, strict=True)
        )
        return partial(self._transfer, before, move, after, number)

    def _transfer(self, before: Any, move: Any, after: Any, number: int, batch: Any) -> Any:
        batch = move(before(batch, number), self._accelerator.device, number)
        return after(self._accelerator.precision.cast(batch), number)


def check_kinds(stage: str, task: Any, datamodule: Any) -> None:
    """Raise a TypeError if what runs, or its data module, is something else."""
    if not isinstance(task, TaskModule):
        hint = ": put () behind it" if isinstance(task, type) else ""
        raise TypeError(f"{stage} takes a treadle.TaskModule, not {task if hint else type(task).__name__!r}{hint}.")
    if "_metrics" not in vars(task):
        raise TypeError(f"{type(task).__name__}.__init__ must call super().__init__() before anything else.")
    if datamodule is not None and not isinstance(datamodule, DataModule):
        raise TypeError(f"datamodule must be a treadle.DataModule, not {type(datamodule).__name__!r}.")


def _overrides(owner: TransferHooks, name: str) -> bool:
    return getattr(type(owner), name) is not getattr(TransferHooks, name)


def _refuse_what_yields_no_batches(kind: str, source: Any) -> None:
    """Things that can be iterated over and are no loaders: each would train on something else than batches."""
    if isinstance(source, Dataset) and not isinstance(source, IterableDataset):
        raise TypeError(
            f"the {kind} loader is a {type(source).__name__}, which yields single samples: put it into a DataLoader "
            "(with batch_size=None if its items are batches)."
        )
    if isinstance(source, str | bytes | torch.Tensor):
        raise TypeError(
            f"the {kind} loader is a {type(source).__name__}; pass a DataLoader, or another iterable of batches."
        )


def _collection(source: Any) -> list[Any]:
    """The loaders in a list, tuple or dict of loaders; empty for anything else, such as a list of batches."""
    values = list(source.values()) if isinstance(source, Mapping) else source
    if isinstance(source, Mapping):
        return values
    if isinstance(values, list | tuple) and values and all(isinstance(each, DataLoader | Loader) for each in values):
        return list(values)
    return []
