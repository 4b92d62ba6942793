"""Temporary copy of a stage for a search."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from ...common.messages import describe_error, name_type
from ...engine import CombinedLoader, isolated_random_state
from ...engine.data import preserve_loader_state
from ...engine.profilers import PassThroughProfiler
from ...loggers import Logger
from ...strategies.distributed import is_sharded
from ..checkpointing import TrainerCheckpointer
from ..logging import History, Logbook, SilentLogger
from ..loop import LOADER_NAMES, Hooks
from .tuned_attribute import set_attribute

if TYPE_CHECKING:
    from ..core import DataModule, TaskModule
    from ..trainer import Trainer


@contextmanager
def rehearsal(trainer: Trainer, **settings: Any) -> Iterator[Trainer]:
    """Create a Trainer with the settings of ``trainer`` and a built copy of its task, within a context.

    The new Trainer has no callbacks, writes nothing and ignores values that are not finite. The values of the original
    task's tensors do not change. Afterwards, the RNG state, the accelerator and the states of the dataloaders are
    restored. ``settings`` are attributes to set on the copies of the task and the data module, where they exist.

    Raises:
        ValueError: If the task cannot be copied, or a dataloader can be read only once.
    """
    accelerator = trainer.accelerator
    loss_scale = accelerator.accumulation.loss_scale
    scaler = None if loss_scale is None else loss_scale.state_dict()
    accumulate = accelerator.gradient_accumulation_steps
    with isolated_random_state(), ExitStack() as put_back, _in_host_memory(trainer.task):
        inner = _make_understudy(trainer, put_back)
        for name, value in settings.items():
            set_attribute(inner, name, value)
        try:
            with inner.init_module():
                inner.task.configure_model()  # type: ignore[union-attr]
            yield inner
        finally:
            inner.hooks = inner.sources = inner.task = inner.steps = None
            accelerator.free_memory()
            accelerator.gradient_accumulation_steps = accumulate
            if loss_scale is not None and scaler is not None:
                loss_scale.load_state_dict(scaler)


def _leave(put_back: ExitStack, kind: str, source: Any) -> None:
    """Register a dataloader, or those that it combines, for restoration at the end of the search."""
    for loader in source.flattened if isinstance(source, CombinedLoader) else [source]:
        if isinstance(loader, Iterator):
            raise ValueError(
                f"the {LOADER_NAMES[kind]} dataloader is {name_type(loader)}, which can be read only once, but a "
                "search reads it before the run. Pass an iterable that restarts with each iter(), such as a DataLoader."
            )
        put_back.enter_context(preserve_loader_state(loader))


def _make_understudy(trainer: Trainer, put_back: ExitStack) -> Trainer:
    inner, accelerator, sources = copy.copy(trainer), trainer.accelerator, trainer.sources
    assert trainer.task is not None
    assert sources is not None
    silent: list[Logger] = [SilentLogger()] if trainer.loggers else []
    inner.callbacks, inner.stop_requests = [], set()
    inner.history = History(accelerator.cursor)
    inner.logbook = Logbook(accelerator.world, accelerator.data_world, silent, inner.history)
    inner.profiler = PassThroughProfiler()
    inner.progress = replace(trainer.progress)
    inner.progress.restart_epoch()
    inner.checkpointer = TrainerCheckpointer(inner)
    inner.metrics = trainer.new_metrics(training=True)
    inner.log_every_n_steps, inner.on_nonfinite = 0, "ignore"
    inner.ckpt_path = inner.opened_checkpoint = None
    inner.lr_scheduler_configs = []
    inner.datamodule = _copy_datamodule(trainer)
    task = inner.task = _copy_task(trainer, inner.datamodule)
    task.trainer = inner
    if inner.datamodule is not None:
        inner.datamodule.trainer = inner
    inner.hooks = Hooks(inner, task, [])
    inner.sources = sources.for_another(task, inner.datamodule, partial(_leave, put_back))
    return inner


def _copy_datamodule(trainer: Trainer) -> DataModule | None:
    """Copy the data module. The copy shares its data, and attributes that cannot be copied, such as open files."""
    datamodule = trainer.datamodule
    if datamodule is None:
        return None
    memo = _collect_shared(trainer, [datamodule])
    memo[id(trainer.task)] = trainer.task
    copied = memo[id(datamodule)] = copy.copy(datamodule)
    for name, value in vars(datamodule).items():
        ids_before = set(memo)
        try:
            copied.__dict__[name] = copy.deepcopy(value, memo)
        except Exception:
            for half_copied in memo.keys() - ids_before:
                del memo[half_copied]
    return copied


def _copy_task(trainer: Trainer, datamodule: DataModule | None) -> TaskModule:
    """Copy the task. The copy shares only its data, and the Trainer with its parts."""
    task, name = trainer.task, type(trainer.task).__name__
    assert task is not None
    if any(map(is_sharded, task.parameters())):
        raise ValueError(
            f"this {name} was sharded by an earlier stage, so a search cannot copy it. Search before that stage, or "
            "create a new task and load the weights."
        )
    memo = _collect_shared(trainer, task.modules())
    memo[id(trainer.datamodule)] = datamodule
    try:
        return copy.deepcopy(task, memo)
    except Exception as error:
        raise ValueError(
            f"{name} cannot be copied, but a search works on a copy: {describe_error(error)}. Create what "
            "cannot be copied (an open file, a lock, the result of a computation with gradients) in on_fit_start, "
            "which runs after the search."
        ) from error


def _collect_shared(trainer: Trainer, owners: Iterable[Any]) -> dict[int, Any]:
    """Return a memo that makes ``deepcopy`` share the Trainer, its parts, and the owners' data.

    A task's data are its datasets and dataloaders; a data module's data also include its tensors and arrays.
    """
    shared = [trainer, trainer.accelerator, *trainer.callbacks, *trainer.loggers]
    memo: dict[int, Any] = {id(part): part for part in shared}
    for owner in owners:
        kinds = (Dataset, DataLoader) if isinstance(owner, nn.Module) else (Dataset, DataLoader, Tensor, np.ndarray)
        for value in vars(owner).values():
            items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
            memo |= {id(item): item for item in items if isinstance(item, kinds)}
            if isinstance(value, torch.Generator):
                memo[id(value)] = torch.Generator(value.device).set_state(value.get_state())
    return memo


@contextmanager
def _in_host_memory(task: TaskModule | None) -> Iterator[None]:
    """Keep the task's tensors in host memory within a context, so that copies are made there and not on a device."""
    assert task is not None
    moved = [
        (tensor, tensor.device)
        for tensor in (*task.parameters(), *task.buffers())
        if tensor.device.type not in ("cpu", "meta") and not is_sharded(tensor)
    ]
    for tensor, _ in moved:
        tensor.data = tensor.data.cpu()
    try:
        yield
    finally:
        for tensor, device in moved:
            tensor.data = tensor.data.to(device)
