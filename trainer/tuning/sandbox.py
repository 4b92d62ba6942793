"""Temporary copy of a stage for a search, the training of this copy, and the attribute that a search sets."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from ...callbacks import Callback
from ...common.messages import describe_error, name_type, nearest
from ...engine import Accelerator, CombinedLoader, isolated_random_state
from ...engine.data import preserve_loader_state
from ...engine.profilers import PassThroughProfiler
from ...loggers import Logger
from ...strategies.distributed import is_sharded
from ..checkpointing import TrainerCheckpointer
from ..logging import History, Logbook, SilentLogger
from ..loop import LOADER_NAMES, FitLoop, Hooks, Phase, prepare_training
from ..watched import find_directory, locate

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
    accelerator, within_run = trainer.accelerator, bool(trainer.accelerator.models)
    if within_run:  # its prepared objects stay as they are
        accelerator = trainer.build_accelerator(strategy=copy.copy(accelerator.strategy))
    loss_scale = accelerator.accumulation.loss_scale
    scaler = None if loss_scale is None else loss_scale.state_dict()
    accumulate = accelerator.gradient_accumulation_steps
    host_memory = nullcontext() if within_run else _in_host_memory(trainer.task)
    with isolated_random_state(), ExitStack() as put_back, host_memory:
        inner = _copy_trainer(trainer, accelerator, put_back)
        for name, value in settings.items():
            set_attribute(inner, name, value)
        try:
            with inner.init_module():
                inner.task.configure_model()
            yield inner
        finally:
            inner.hooks = inner.sources = inner.task = inner.steps = None  # type: ignore[assignment]
            accelerator.free_memory()
            accelerator.gradient_accumulation_steps = accumulate
            if loss_scale is not None and scaler is not None:
                loss_scale.load_state_dict(scaler)
            if within_run:
                trainer.accelerator._make_current()
                if accelerator.watchdog is not None:
                    accelerator.watchdog.follow(trainer, locate, find_directory)


def _preserve(put_back: ExitStack, kind: str, source: Any) -> None:
    """Register a dataloader, or those that it combines, for restoration at the end of the search."""
    for loader in source.flattened if isinstance(source, CombinedLoader) else [source]:
        if isinstance(loader, Iterator):
            raise ValueError(
                f"the {LOADER_NAMES[kind]} dataloader is {name_type(loader)}, which can be read only once, but a "
                "search reads it before the run. Pass an iterable that restarts with each iter(), such as a DataLoader."
            )
        put_back.enter_context(preserve_loader_state(loader))


def _copy_trainer(trainer: Trainer, accelerator: Accelerator, put_back: ExitStack) -> Trainer:
    inner, sources = copy.copy(trainer), trainer.sources
    inner.accelerator = accelerator
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
    inner.max_steps, inner.max_seconds, inner.val_check_seconds = -1, None, None
    inner.reload_dataloaders_every_n_epochs = 0
    inner.ckpt_path = inner.opened_checkpoint = None
    inner.lr_scheduler_configs = []
    inner.datamodule = _copy_datamodule(trainer)
    task = inner.task = _copy_task(trainer, inner.datamodule)
    task.trainer = inner
    if inner.datamodule is not None:
        inner.datamodule.trainer = inner
    inner.hooks = Hooks(inner, task, [])
    inner.sources = sources.for_another(inner, partial(_preserve, put_back))
    return inner


def _copy_datamodule(trainer: Trainer) -> DataModule | None:
    """Copy the data module. The copy shares its data, and attributes that cannot be copied, such as open files."""
    if (datamodule := trainer.datamodule) is None:
        return None
    memo = _collect_shared(trainer, [datamodule])
    memo[id(trainer.task)] = trainer.task
    copied = memo[id(datamodule)] = copy.copy(datamodule)
    for name, value in vars(datamodule).items():
        copied_ids = set(memo)
        try:
            copied.__dict__[name] = copy.deepcopy(value, memo)
        except Exception:
            for half_copied in memo.keys() - copied_ids:
                del memo[half_copied]
    return copied


def _copy_task(trainer: Trainer, datamodule: DataModule | None) -> TaskModule:
    """Copy the task. The copy shares only its data, and the Trainer with its parts."""
    task, name = trainer.task, type(trainer.task).__name__
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
def _in_host_memory(task: TaskModule) -> Iterator[None]:
    """Keep the task's tensors in host memory within a context, so that copies are made there and not on a device."""
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


# -- training --------------------------------------------------------------------------------------------------------


class _TrialOver(Exception):
    """Error that leaves the training loop, because a trial has taken its steps."""


class Trial(Callback):
    """Callback that ends the training of a copy after ``count`` optimizer steps."""

    def __init__(self, count: int) -> None:
        self.count, self.done = count, 0
        self._done_at_start = 0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Note how many steps earlier epochs took."""
        self._done_at_start = self.done

    def on_step_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Count the step, and end the training after the last one."""
        self.done += 1
        if self.done == self.count:
            self.end()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Raise a ValueError if the epoch took no step, because the training would never end."""
        if self.done == self._done_at_start:
            raise ValueError(
                "an epoch had no batch to train on, but a search needs at least one. Check the training dataloader, "
                "and any on_train_batch_start hook that returns -1."
            )

    def end(self) -> None:
        """End the training."""
        raise _TrialOver


class _TrialLoop(FitLoop):
    """Training loop without a limit: only the `Trial` ends it."""

    def _wants_to_stop(self) -> bool:
        return False

    def _is_complete(self) -> bool:
        return False

    def _compute_validation_interval(self) -> int | None:
        return None

    def _close_epoch(self) -> None:
        self.progress.phase = Phase.EPOCH_TRAINED


def train(inner: Trainer, trial: Trial) -> None:
    """Train the copy over as many epochs as needed, without validation, until the trial ends.

    Raises:
        ValueError: If an epoch has no batch to train on, or the task cannot be trained.
    """
    task, sources = inner.task, inner.sources
    hooks = inner.hooks = Hooks(inner, task, [trial])
    model = prepare_training(inner, task)
    for hook in hooks.on_fit_start:
        hook()
    with inner.logging_to(inner.metrics), suppress(_TrialOver):
        _TrialLoop(inner, task, model, hooks, sources.train, [], lambda: None).run()


# -- attribute -------------------------------------------------------------------------------------------------------


def attribute_owners(trainer: Trainer, name: str) -> list[Any]:
    """Return the objects that have an attribute ``name``: the task, the data module, or the hparams of either."""
    owners: list[Any] = []
    for module in (trainer.task, trainer.datamodule):
        if module is None:
            continue
        if name in module.hparams:
            owners.append(module.hparams)
        if hasattr(module, name):
            owners.append(module)
    return owners


def get_attribute(trainer: Trainer, name: str) -> Any:
    """Return the value of the attribute; a data module's value takes precedence over the task's."""
    owner = attribute_owners(trainer, name)[-1]
    return owner[name] if isinstance(owner, dict) else getattr(owner, name)


def set_attribute(trainer: Trainer, name: str, value: Any) -> None:
    """Set the attribute on every object that `attribute_owners` returns."""
    for owner in attribute_owners(trainer, name):
        setattr(owner, name, value)


def check_attribute(trainer: Trainer, finder: Callback, name: str, argument: str) -> None:
    """Raise a ValueError if neither the task, the data module nor their hparams have the attribute."""
    if attribute_owners(trainer, name):
        return
    modules = [module for module in (trainer.task, trainer.datamodule) if module is not None]
    valid_names = {key for module in modules for key in (*vars(module), *module.hparams) if not key.startswith("_")}
    places = " or ".join(type(module).__name__ for module in modules)
    raise ValueError(
        f"{type(finder).__name__}: {argument}={name!r} is neither an attribute nor a hyperparameter of {places}. Set "
        f"self.{name} in __init__ and use it.{nearest(name, valid_names)}"
    )
