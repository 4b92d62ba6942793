"""Where batches come from: loaders that were passed, the data module's, or the task's; prepared and limited."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

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
            several = [] if source is None else _collection(source) or [source]
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
        loader = self._accelerator.prepare_data_loader(
            source, shard=self._shard, evaluation=kind != "train", move=self._mover(number)
        )
        loader.limit = flags.limited(f"limit_{kind}_batches", self.limits[kind], loader.length)
        return loader

    def _mover(self, number: int) -> Callable[[Any], Any] | None:
        """The user's own way to the device, or None for the accelerator's."""
        for owner in (self.datamodule, self.task):
            if owner is not None and any(
                getattr(type(owner), name) is not getattr(TransferHooks, name) for name in _TRANSFER
            ):
                return partial(self._transfer, owner, number)
        return None

    def _transfer(self, owner: TransferHooks, number: int, batch: Any) -> Any:
        batch = owner.on_before_batch_transfer(batch, number)
        batch = owner.transfer_batch_to_device(batch, self._accelerator.device, number)
        return owner.on_after_batch_transfer(self._accelerator.precision.cast(batch), number)


def _collection(source: Any) -> list[Any]:
    """The loaders in a list, tuple or dict of loaders; empty for anything else, such as a list of batches."""
    values = list(source.values()) if isinstance(source, Mapping) else source
    if isinstance(values, list | tuple) and values and all(isinstance(each, DataLoader | Loader) for each in values):
        return list(values)
    return []
