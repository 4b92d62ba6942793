"""Dataloaders that the user passes or that the data module or task returns."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset, IterableDataset

from ...common.messages import format_count, name_type, warn
from ...common.validation import WrongTypeError
from ...engine import Accelerator, CombinedLoader, JointLoader, Loader, check_values_match
from ...engine.data import has_user_iter, is_collection
from .. import arguments
from ..core import DataHooks, DataModule, TaskModule, has_own

if TYPE_CHECKING:
    from ..trainer import Trainer

KINDS = ("train", "val", "test", "predict")
KIND_OF_STAGE = {"fit": "train", "validate": "val", "test": "test", "predict": "predict"}
LOADER_NAMES = {"train": "training", "val": "validation", "test": "test", "predict": "predict"}
_TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class Sources:
    """Dataloaders of one stage, created on first use.

    Args:
        task: The user's task.
        datamodule: The user's data module, or None.
        passed_loaders: Dataloaders that the user passed, by kind: ``"train"``, ``"val"``, ``"test"`` or ``"predict"``.
        accelerator: Accelerator that prepares the dataloaders.
        limits: The checked ``limit_*_batches``, by kind.
        shard: Whether to shard the dataloaders over the processes.
        fixed_order: Whether training and validation read the same batches in each epoch. Default: False.

    Attributes:
        prepared_train: The training dataloader; None before its first use.
        outdated: Whether a search within the run has changed the batch size since the dataloaders were created.
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
        self.prepared_train: Loader | None = None
        self.outdated = False
        self._evaluation: dict[str, list[Loader]] = {}
        self._empty: dict[str, list[Loader]] = {}
        self._evaluation_source: dict[str, Any] = {}

    @property
    def train(self) -> Loader:
        """Prepared training dataloader, created on first use.

        Raises:
            TypeError, ValueError: If there is no training dataloader, or it is invalid.
        """
        if self.prepared_train is None:
            source = self._find("train")
            if source is None:
                raise WrongTypeError(
                    "fit has no training dataloader. Pass train_dataloaders or a datamodule, or define "
                    "train_dataloader in the task."
                )
            if is_collection(source):
                source = CombinedLoader(source, "max_size_cycle")
            self.prepared_train = self._prepare("train", source, 0)
        return self.prepared_train

    def evaluation(self, kind: str) -> list[Loader]:
        """Return the prepared dataloaders of a kind; an empty list if there are none. Call it on all processes.

        Args:
            kind: ``"val"``, ``"test"`` or ``"predict"``.

        Raises:
            TypeError, ValueError: If a dataloader is invalid, or the processes have different numbers of them.
        """
        if kind not in self._evaluation:
            self._evaluation_source[kind] = self._find(kind)
            sources = list(_split_sources(self._evaluation_source[kind]))
            world, count = self._accelerator.world, {f"{kind} dataloaders": len(sources)}
            check_values_match("the ranks have different numbers of dataloaders", count, world)
            loaders = [self._prepare(kind, source, number) for number, source in enumerate(sources)]
            self._empty[kind] = [loader for loader in loaders if world.all(loader.length == 0)]
            self._evaluation[kind] = loaders
        return self._evaluation[kind]

    def get_evaluation_source(self, kind: str) -> Any:
        """Return the dataloaders of a kind as the user passed or returned them; None if there are none.

        Args:
            kind: ``"val"``, ``"test"`` or ``"predict"``.
        """
        return self._evaluation_source[kind] if self.evaluation(kind) else None

    def empty(self, kind: str) -> list[Loader]:
        """Return the dataloaders whose length is known to be 0 on all processes.

        Args:
            kind: ``"val"``, ``"test"`` or ``"predict"``.
        """
        self.evaluation(kind)
        return self._empty[kind]

    def warn_of_empty_validation(self) -> None:
        """Warn about validation dataloaders without batches, which are not an error within ``fit``."""
        if self.limits["val"] == 0:
            return
        loaders = self.evaluation("val")
        for loader in self.empty("val"):
            position = f" with index {loaders.index(loader)}" if len(loaders) > 1 else ""
            reason = explain_empty(loader, self._accelerator.num_processes)
            warn(f"the validation dataloader{position} is empty, so validation skips it. {reason}")

    def hook_loaders(self, kind: str) -> list[Loader]:
        """Return the dataloaders of a kind that hooks returned.

        Args:
            kind: ``"train"`` or ``"val"``.
        """
        if self.passed_loaders.get(kind) is not None:
            return []
        return [self.train] if kind == "train" else self.evaluation(kind)

    def reload(self, kind: str, epoch: int) -> None:
        """Call the hook of the training or validation dataloaders again; passed dataloaders are kept.

        Args:
            kind: ``"train"`` or ``"val"``.
            epoch: Index of the epoch that uses the dataloaders first.
        """
        self._epoch = epoch
        for loader in self.hook_loaders(kind):
            loader.close()
            self._accelerator.loaders.remove(loader)
        if self.passed_loaders.get(kind) is not None:
            return
        if kind == "train":
            self.prepared_train = None
        else:
            self._evaluation.pop(kind, None)
        for loader in self.hook_loaders(kind):
            loader.set_epoch(epoch)

    def for_another(self, trainer: Trainer, watch: Callable[[str, Any], None]) -> Sources:
        """Return sources for copies of the task and the data module.

        Args:
            trainer: Trainer with these copies and with the accelerator that prepares the dataloaders.
            watch: Function that is called with each kind and dataloader.
        """
        other = copy.copy(self)
        other.task, other.datamodule, other._accelerator = trainer.task, trainer.datamodule, trainer.accelerator
        other._watch = watch
        other._warned, other.prepared_train, other._evaluation, other._empty = set(self._warned), None, {}, {}
        other._evaluation_source = {}
        return other

    def _find(self, kind: str) -> Any:
        if self.passed_loaders.get(kind) is not None:
            return self.passed_loaders[kind]
        method = f"{kind}_dataloader"
        for owner, base in ((self.datamodule, DataModule), (self.task, TaskModule)):
            if owner is not None and has_own(owner, method, base):
                if owner is self.datamodule and has_own(self.task, method, TaskModule):
                    self._warn_of_unused(method)
                with self._accelerator.rng.drawing_alike(f"{kind} loaders of epoch {self._epoch}"):
                    loaders = getattr(owner, method)()
                if loaders is None and kind == "train":
                    raise WrongTypeError(f"{type(owner).__name__}.{method} returned None. Return the dataloader.")
                return loaders
        return None

    def _prepare(self, kind: str, source: Any, number: int) -> Loader:
        if self._watch is not None:
            self._watch(kind, source)
        for single_source in source.flattened if isinstance(source, CombinedLoader) else [source]:
            _refuse_non_loaders(kind, single_source)
        loader = self._accelerator.prepare_data_loader(
            source,
            shard=self._shard,
            evaluation=kind != "train",
            move=self._choose_transfer(number),
            in_tree=kind != "predict",  # whose results are sorted by rank
        )
        is_sequential = isinstance(loader, JointLoader) and loader.mode == "sequential"
        for single_loader in loader.loaders if is_sequential else [loader]:  # type: ignore[attr-defined]
            if kind == "predict":
                single_loader.keep_tail()  # each sample has a prediction, as with Lightning
            length = single_loader.global_length
            count = arguments.limited(f"limit_{kind}_batches", self.limits[kind], length)
            if count is None and has_user_iter(single_loader.source):
                single_loader.limit = length  # reading on may be an error there, as in zip(strict=True) with a cycle
            elif count is not None and count != length:
                single_loader.limit = single_loader.count_own(count)
        if self._fixed_order and kind in ("train", "val") and loader.keep_order() and kind not in self._warned:
            self._warned.add(kind)
            warn(
                f"overfit_batches disables shuffling in the {LOADER_NAMES[kind]} dataloader: each epoch reads the same "
                "batches in the same order."
            )
        return loader

    def _choose_transfer(self, number: int) -> Callable[[Any], Any] | None:
        owners = [owner for owner in (self.datamodule, self.task) if owner is not None]
        # Each hook separately: a data module may augment while the task moves.
        chosen = [next((o for o in owners if has_own(o, name, DataHooks)), None) for name in _TRANSFER]
        for name, owner in zip(_TRANSFER, chosen, strict=True):
            if owner is self.datamodule is not None and has_own(self.task, name, DataHooks):
                self._warn_of_unused(name)
        if all(owner is None for owner in chosen):
            return None
        prepare, move, complete = (
            getattr(self.task if owner is None else owner, name) for owner, name in zip(chosen, _TRANSFER, strict=True)
        )
        return partial(self._transfer, prepare, move, complete, number)

    def _warn_of_unused(self, method: str) -> None:
        """Warn once that a method of the task is not called, because the data module has it too."""
        if method not in self._warned:
            self._warned.add(method)
            task, datamodule = type(self.task).__name__, type(self.datamodule).__name__
            warn(
                f"{task} and {datamodule} both define {method}. {datamodule}.{method} is used, because a data module "
                f"takes precedence, and {task}.{method} is not called. Remove one of them."
            )

    def _transfer(self, prepare: Any, move: Any, complete: Any, number: int, batch: Any) -> Any:
        batch = move(prepare(batch, number), self._accelerator.device, number)
        return complete(self._accelerator.precision.cast(batch), number)


def check_kinds(stage: str, task: Any, datamodule: Any) -> None:
    """Raise a TypeError unless the task is an initialized TaskModule and the data module is a DataModule or None."""
    if not isinstance(task, TaskModule):
        hint = ""
        if isinstance(task, type):
            hint = f" Pass {task.__name__}() instead of the class."
        elif isinstance(task, torch.nn.Module):
            hint = f" Use the {type(task).__name__} within a TaskModule that defines training_step."
        value = f"the class {task.__name__}" if isinstance(task, type) else name_type(task)
        raise TypeError(f"{stage} needs a treadle.TaskModule, not {value}.{hint}")
    if "_metrics" not in vars(task):
        raise TypeError(f"{type(task).__name__}.__init__ must call super().__init__() first.")
    if datamodule is not None and not isinstance(datamodule, DataModule):
        hint = f" Pass {datamodule.__name__}() instead of the class." if isinstance(datamodule, type) else ""
        value = f"the class {datamodule.__name__}" if hint else name_type(datamodule)
        raise TypeError(f"datamodule must be a treadle.DataModule, not {value}.{hint}")


def explain_empty(loader: Loader, processes: int) -> str:
    """Return the likely reason why a dataloader yielded nothing, and the fix."""
    source = loader.source
    dataset = getattr(source, "dataset", None)
    try:
        samples: int | None = len(dataset)  # type: ignore[arg-type]
    except TypeError:
        samples = None
    kind = type(source).__name__
    if samples == 0:
        return f"The {kind} has an empty dataset ({type(dataset).__name__}). Add samples."
    size = getattr(source, "batch_size", None)
    if samples is not None and size and getattr(source, "drop_last", False) and samples < size * processes:
        return (
            f"The {kind} has {format_count(samples, 'sample')} and drop_last=True, which drops a global batch of fewer "
            f"than {format_count(size * processes, 'sample')} ({size} x {format_count(processes, 'process')}). Lower "
            "batch_size, or remove drop_last."
        )
    return f"Pass an iterable that has at least one batch and can be iterated more than once, not this {kind}."


def _refuse_non_loaders(kind: str, source: Any) -> None:
    """Raise a TypeError for an iterable that does not yield batches, such as a map-style dataset."""
    if isinstance(source, Dataset) and not isinstance(source, IterableDataset):
        raise TypeError(
            f"the {LOADER_NAMES[kind]} dataloader is {name_type(source)}, which yields single samples. Wrap it in a "
            "DataLoader (with batch_size=None if its items are batches)."
        )
    if isinstance(source, str | bytes | torch.Tensor | type):
        name = f"the class {source.__name__}" if isinstance(source, type) else name_type(source)
        advice = f"{source.__name__}()" if isinstance(source, type) else "a DataLoader, or another iterable of batches"
        raise TypeError(f"the {LOADER_NAMES[kind]} dataloader is {name}. Pass {advice}.")


def _split_sources(source: Any) -> Iterable[Any]:
    """Return the evaluation dataloaders in order.

    A `CombinedLoader` counts as one dataloader unless its mode is ``"sequential"`` and it has no limits.
    """
    if source is None or (isinstance(source, list | tuple | Mapping) and not source):
        return []
    if is_collection(source):
        source = CombinedLoader(source, "sequential")
    sequential = isinstance(source, CombinedLoader) and source.mode == "sequential" and source.limits is None
    return source.flattened if sequential else [source]
