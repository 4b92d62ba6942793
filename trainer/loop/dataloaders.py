"""Where batches come from: loaders that were passed, the data module's, or the task's; prepared and limited."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from ...common.messages import warn
from ...engine import Accelerator, CombinedLoader, JointLoader, Loader, check_values_match
from ...engine.data import is_collection
from .. import arguments
from ..core import DataModule, TaskModule, TransferHooks, has_own

KINDS = ("train", "val", "test", "predict")
KIND_OF_STAGE = {"fit": "train", "validate": "val", "test": "test", "predict": "predict"}
_TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class Sources:
    """The loaders of one stage. Each kind is asked for once, when it is first needed.

    Args:
        task: The user's task.
        datamodule: The user's data module, or None.
        passed_loaders: By kind (``"train"``, ``"val"``, ``"test"``, ``"predict"``), what was passed to the entry point.
        accelerator: Prepares the loaders.
        limits: By kind, the checked ``limit_*_batches``.
        shard: Whether to share each loader out over the processes.
        fixed_order: Training and validation read the same batches in each epoch, and shuffle nothing.
    """

    def __init__(
        self,
        task: TaskModule,
        datamodule: DataModule | None,
        passed_loaders: Mapping[str, Any],
        accelerator: Accelerator,
        limits: Mapping[str, int | float],
        shard: bool,
        fixed_order: bool = False,
    ) -> None:
        self.task = task
        self.datamodule = datamodule
        self.passed_loaders = passed_loaders
        self.limits = limits
        self._accelerator = accelerator
        self._shard = shard
        self._fixed_order = fixed_order
        self._epoch = 0
        self._warned: set[str] = set()
        self._watch: Callable[[str, Any], None] | None = None
        self._train: Loader | None = None
        self._evaluation: dict[str, list[Loader]] = {}
        self._empty: dict[str, list[Loader]] = {}

    @property
    def has_train(self) -> bool:
        """Whether the training loader was prepared."""
        return self._train is not None

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
            if is_collection(source):
                source = CombinedLoader(source, "max_size_cycle")
            self._train = self._prepare("train", source, 0)
        return self._train

    def evaluation(self, kind: str) -> list[Loader]:
        """The prepared loaders of ``"val"``, ``"test"`` or ``"predict"``; empty where there are none."""
        if kind not in self._evaluation:
            sources = list(_split_sources(self._find(kind)))
            world, count = self._accelerator.world, {f"{kind} loaders": len(sources)}
            check_values_match("the ranks have different loaders", count, world)
            loaders = [self._prepare(kind, source, number) for number, source in enumerate(sources)]
            self._empty[kind] = [loader for loader in loaders if world.all(loader.length == 0)]
            self._evaluation[kind] = loaders
        return self._evaluation[kind]

    def empty(self, kind: str) -> list[Loader]:
        """Those of `evaluation` whose length is 0 on all processes. A loader without a length is known only later."""
        self.evaluation(kind)
        return self._empty[kind]

    def warn_of_empty_validation(self) -> None:
        """Warn of validation loaders without batches. Within ``fit`` that is no error: a small split may leave none."""
        if self.limits["val"] == 0:
            return
        loaders = self.evaluation("val")
        for loader in self.empty("val"):
            position = f" {loaders.index(loader)} (of {len(loaders)})" if len(loaders) > 1 else ""
            reason = explain_empty(loader, self._accelerator.num_processes)
            warn(f"validation loader{position} is empty: nothing is validated on it. {reason}")

    @property
    def hook_loaders(self) -> list[Loader]:
        """The training and validation loaders that come from a hook."""
        train = [] if self.passed_loaders.get("train") is not None else [self.train]
        return train + ([] if self.passed_loaders.get("val") is not None else self.evaluation("val"))

    def reload(self, epoch: int) -> None:
        """Ask the hooks anew for the training and validation loaders, as of now; what was passed is kept.

        Args:
            epoch: The one that comes.
        """
        self._epoch = epoch
        for loader in self.hook_loaders:
            loader.close()
            self._accelerator.loaders.remove(loader)
        if self.passed_loaders.get("train") is None:
            self._train = None
        if self.passed_loaders.get("val") is None:
            self._evaluation.pop("val", None)
        for loader in self.hook_loaders:
            loader.set_epoch(epoch)

    def for_another(
        self, task: TaskModule, datamodule: DataModule | None, watch: Callable[[str, Any], None]
    ) -> Sources:
        """The same for copies of the task and the data module, of which nothing was asked yet.

        Args:
            task: The copy.
            datamodule: The copy.
            watch: Called with each kind and what is about to be prepared of it.
        """
        other = copy.copy(self)
        other.task, other.datamodule, other._watch = task, datamodule, watch
        other._warned, other._train, other._evaluation, other._empty = set(self._warned), None, {}, {}
        return other

    def _find(self, kind: str) -> Any:
        if self.passed_loaders.get(kind) is not None:
            return self.passed_loaders[kind]
        method = f"{kind}_dataloader"
        for owner, base in ((self.datamodule, DataModule), (self.task, TaskModule)):
            if owner is not None and has_own(owner, method, base):
                with self._accelerator.drawing_alike(f"{kind} loaders of epoch {self._epoch}"):
                    return getattr(owner, method)()
        return None

    def _prepare(self, kind: str, source: Any, number: int) -> Loader:
        if self._watch is not None:
            self._watch(kind, source)
        for single_source in source.flattened if isinstance(source, CombinedLoader) else [source]:
            _refuse_non_loaders(kind, single_source)
        loader = self._accelerator.prepare_data_loader(
            source, shard=self._shard, evaluation=kind != "train", move=self._choose_transfer(number)
        )
        is_sequential = isinstance(loader, JointLoader) and loader.mode == "sequential"
        for single_loader in loader.loaders if is_sequential else [loader]:  # type: ignore[attr-defined]
            count = arguments.limited(f"limit_{kind}_batches", self.limits[kind], single_loader.length)
            single_loader.limit = single_loader.limit if count is None or count == single_loader.length else count
        if self._fixed_order and kind in ("train", "val") and loader.keep_order() and kind not in self._warned:
            self._warned.add(kind)
            warn(
                f"overfit_batches: the {kind} loader would shuffle; its batches come in one order, the same each epoch."
            )
        return loader

    def _choose_transfer(self, number: int) -> Callable[[Any], Any] | None:
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


def explain_empty(loader: Loader, processes: int) -> str:
    """Return why a loader may have yielded nothing, and what to change."""
    source = loader.source
    dataset = getattr(source, "dataset", None)
    try:
        samples: int | None = len(dataset)  # type: ignore[arg-type]
    except TypeError:
        samples = None
    kind = type(source).__name__
    if samples == 0:
        return f"{kind}'s dataset ({type(dataset).__name__}) is empty: give it samples."
    size = getattr(source, "batch_size", None)
    if samples is not None and size and getattr(source, "drop_last", False) and samples < size * processes:
        return (
            f"{kind} has {samples} samples and drop_last=True, which drops a global batch of fewer than "
            f"{size * processes} ({size} x {processes} processes): lower batch_size, or leave drop_last out."
        )
    if loader.limit == 0:
        return "its limit is 0 batches: raise limit_*_batches."
    return f"{kind} ended at once: give an iterable that can be run through again, with at least one batch."


def _overrides(owner: TransferHooks, name: str) -> bool:
    return getattr(type(owner), name) is not getattr(TransferHooks, name)


def _refuse_non_loaders(kind: str, source: Any) -> None:
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


def _split_sources(source: Any) -> Iterable[Any]:
    """Evaluation's loaders in order; one that combines several otherwise than in sequence is one."""
    if source is None or (isinstance(source, list | tuple | Mapping) and not source):
        return []
    if is_collection(source):
        source = CombinedLoader(source, "sequential")
    sequential = isinstance(source, CombinedLoader) and source.mode == "sequential" and source.limits is None
    return source.flattened if sequential else [source]
