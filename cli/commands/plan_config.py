"""The run of a configuration, to be planned: nothing of it is started."""

from __future__ import annotations

import argparse
import copy
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, DataLoader

from ...engine import CombinedLoader, JointLoader, Loader, RandomStream, random_state
from ...engine.data import Cursor, get_length
from ...engine.planning import Plan, Schedule
from ...trainer import Trainer
from ...trainer.core import SchedulerConfig, TaskModule
from ...trainer.loop import Sources, configure, count_positional
from ..config import load
from ..config.instantiate import Checked, check
from .plan_subject import Subject, varied_by

# A second of stepping.
_MOST_STEPS = 100_000
_POINTS = 80

# Where and on what the run is: what a plan asks for itself.
_PLACE = ("strategy", "devices", "num_nodes", "precision", "gradient_clip_val", "compile", "sync_batchnorm")
# How long it is: what the Trainer's own arithmetic is asked. Callbacks, loggers and profilers are not even built.
_LENGTH = (
    "accumulate_grad_batches", "fast_dev_run", "limit_train_batches", "max_epochs", "max_steps", "max_time",
    "min_epochs", "min_steps", "overfit_batches", "use_distributed_sampler",
)  # fmt: skip


def of_config(options: argparse.Namespace) -> Subject:
    """The run of a configuration: its task, the first batch of its data, its optimizer and schedule.

    Raises:
        ConfigError: the configuration is wrong.
        ValueError: its task can't be planned.
    """
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)  # modules beside the configuration can be named in it
    checked = check(load(options.config, options.overrides))
    run = _Run(checked, options)
    return Subject(
        name=checked.model.name or checked.model.target.__name__,
        build_model=run.build_model,
        make_batch=run.make_batch,
        loss=run.loss,
        optimizer=run.optimizer,
        strategy=run.strategy,
        step="training_step",
        settings=run.settings,
        schedule=run.schedule,
    )


class PlannedTrainer(Trainer):
    """The Trainer of a run, in this process, that answers for all of the run's.

    Args:
        processes: of the run.
        flags: as `Trainer` has them.
    """

    def __init__(self, processes: int, **flags: Any) -> None:
        super().__init__(
            accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, enable_report=False, **flags,
        )  # fmt: skip
        self._processes = processes
        self.batches: int | None = None
        self.stage = "fit"

    @property
    def world_size(self) -> int:
        """Processes of the run."""
        return self._processes

    @property
    def num_training_batches(self) -> int | None:
        """Micro-batches of an epoch, of each process; None where that is not known."""
        return self.batches


class _Silent:
    """Takes what a step logs."""

    def log(self, *_: Any, **__: Any) -> None:
        """Nothing: there are no values."""


class _Run:
    """A configuration's parts, as a plan asks for them."""

    def __init__(self, checked: Checked, options: argparse.Namespace) -> None:
        self.checked = checked
        self.options = options
        flags = {name: recipe.make() for name, recipe in checked.trainer.items() if name in (*_PLACE, *_LENGTH)}
        place = {name: flags.pop(name) for name in _PLACE if name in flags}
        self._place(place)
        asked = {
            "accumulate_grad_batches": options.accumulate,
            "max_epochs": options.max_epochs,
            "max_steps": options.max_steps,
        }
        flags.update((name, value) for name, value in asked.items() if value is not None)
        self.trainer = PlannedTrainer(self.settings["world_size"], **flags)
        self._read_data()
        self.settings["accumulate"] = self.trainer.accelerator.gradient_accumulation_steps
        self.settings["micro_batch"] = options.micro_batch or self.size
        self.trainer.batches = self._batches()

    def _place(self, flags: dict[str, Any]) -> None:
        if flags.get("sync_batchnorm"):
            raise ValueError("a plan does not know what sync_batchnorm=True sends; set it to false to plan the rest.")
        devices, nodes = flags.get("devices", 1), flags.get("num_nodes", 1)
        count = len(devices) if isinstance(devices, list) else devices
        count = max(1, int(count)) if isinstance(count, int) or str(count).isdecimal() else 1
        self.settings: dict[str, Any] = {
            "world_size": self.options.world_size or count * nodes,
            "precision": flags.get("precision") or "32-true",
            "clip": flags.get("gradient_clip_val"),
            "compiled": bool(flags.get("compile")),
        }
        if nodes > 1 and self.options.world_size is None:
            self.settings["per_machine"] = count
        self._strategy = self.options.strategy or flags.get("strategy", "auto")

    def _read_data(self) -> None:
        """Its loader, and the first batch of it, as the run's own first process would get it alone."""
        trainer, data = self.trainer, self.checked.datamodule()
        task = self._made()
        if not task.automatic_optimization:
            raise ValueError("a task with automatic_optimization=False decides about its steps itself: no plan of it.")
        trainer.task, trainer.datamodule = task, data
        if data is not None:
            data.trainer = trainer
            data.prepare_data()
        task.prepare_data()
        if data is not None:
            data.setup("fit")
        self._finished(task)
        loader = Sources(task, data, {}, trainer.accelerator, {"train": 1.0}, True).train
        self.source: Any = loader.source
        self.batch = next(iter(loader), None)
        trainer.accelerator.close_loaders()
        if self.batch is None:
            raise ValueError(f"{type(self.source).__name__} yields no batch: a plan needs one to know its form.")
        self.size = _samples(self.source, self.batch)

    def _batches(self) -> int | None:
        """Micro-batches of an epoch and process, by the Trainer's own count."""
        micro, processes = self.settings["micro_batch"], self._data_processes()
        if self.options.samples is not None:
            return -(-self.options.samples // (micro * processes))
        trainer, source = self.trainer, self.source
        resized = _resized(source, micro)
        limits = {"train": trainer.limit_train_batches}
        elsewhere: Any = _Elsewhere(processes)
        shard = trainer.use_distributed_sampler
        found = Sources(trainer.task, None, {"train": resized}, elsewhere, limits, shard).train.length  # type: ignore
        if found is None or resized is not source or micro == self.size:
            return found
        return -(-found * self.size // micro)

    def _data_processes(self) -> int:
        world_size = self.settings["world_size"]
        return int(world_size // self.strategy(world_size).grid(world_size)["tensor"])

    # -- what simulate is given ----------------------------------------------------------------------------------

    def strategy(self, world_size: int) -> Any:
        """The configuration's, or the one that was asked for."""
        return varied_by(self.options, self._strategy, world_size)

    def build_model(self) -> nn.Module:
        """The task, where parameters get no memory."""
        task = self._finished(self._made())
        self.trainer.task = task
        return task

    def make_batch(self, samples: int) -> Any:
        """As the first one, of so many samples."""
        return _like(self.batch, self.size, samples)

    def loss(self, step: Callable[..., Any], batch: Any) -> Tensor:
        """What ``training_step`` returns."""
        assert self.trainer.task is not None
        indexed = count_positional(self.trainer.task.training_step) > 1
        found = step(batch, 0) if indexed else step(batch)
        value = found.get("loss") if isinstance(found, Mapping) else found
        if not isinstance(value, Tensor) or not value.requires_grad:
            what = "a tensor without a graph" if isinstance(value, Tensor) else type(found).__name__
            raise ValueError(f"training_step returned {what}, and a plan needs a loss to go backward from.")
        return value

    def optimizer(self, _: Iterable[nn.Parameter]) -> Optimizer:
        """The task's own."""
        task = self.trainer.task
        assert task is not None
        optimizers, schedulers = configure(task)
        if not optimizers:
            raise ValueError("configure_optimizers returned None: nothing is trained, so there is no step to plan.")
        self.trainer.accelerator.optimizers[:] = optimizers  # type: ignore[assignment]
        self.trainer.lr_scheduler_configs = schedulers
        return optimizers[0]

    def _made(self) -> TaskModule:
        """The task, without memory where its constructor allows that."""
        try:
            with torch.device("meta"):
                task = self.checked.task()
        except (RuntimeError, NotImplementedError):  # it looks at values, as at those of torch.linspace
            with torch.device("cpu"):
                task = self.checked.task()
        task.trainer = self.trainer
        task.__dict__["_metrics"] = _Silent()
        return task

    def _finished(self, task: TaskModule) -> TaskModule:
        """With what its hooks add before a run."""
        with torch.device("cpu"):
            task.setup("fit")  # may read data, so values are needed
        with torch.device("meta"):
            task.configure_model()
        if any(not tensor.is_meta for tensor in (*task.parameters(), *task.buffers())):
            without_values(task)
        return task

    # -- the schedule --------------------------------------------------------------------------------------------

    def schedule(self, plan: Plan) -> Schedule:
        """How long the run is, and its learning rates."""
        steps = self.trainer.estimated_stepping_batches
        total = None if steps == float("inf") else int(steps)
        per_epoch = None if self.trainer.batches is None else -(-self.trainer.batches // plan.accumulate)
        optimizer, schedulers = self._optimizer_anew()
        words, rates = "", []
        by_value = next((config for config in schedulers if config.reduce_on_plateau), None)
        first = f"{float(optimizer.param_groups[0]['lr']):.3g}"
        if not schedulers:
            words = f"learning rate {first} throughout"
        elif by_value is not None:
            words = f"learning rate {first} at first, then as {by_value.monitor} goes"
        elif per_epoch is None and any(config.interval == "epoch" for config in schedulers):
            words = f"learning rate {first} at first; it changes with epochs, and their length is not known"
        elif total is None or total > _MOST_STEPS:
            words = f"learning rate {first} at first; drawn for runs of up to {_MOST_STEPS:,} steps"
        else:
            rates = _stepped(optimizer, schedulers, total, per_epoch)
        samples = self.options.samples or (
            get_length(self.source.batch_sampler.sampler) if _plain(self.source) else None
        )
        return Schedule(steps=total, samples=samples, per_epoch=per_epoch, rates=rates, words=words)

    def _optimizer_anew(self) -> tuple[Optimizer, list[SchedulerConfig]]:
        """The optimizer and its schedulers as they are before the first step."""
        optimizers, schedulers = configure(self._finished(self._made()))
        return optimizers[0], schedulers


class _Elsewhere:
    """Prepares loaders as one of ``processes`` does."""

    def __init__(self, processes: int) -> None:
        self.world: Any = SimpleNamespace(rank=0, size=processes)  # all that a loader asks of a `World`

    def prepare_data_loader(self, source: Any, *, shard: bool, evaluation: bool, move: Any) -> Loader:
        """See `Accelerator.prepare_data_loader`."""
        kind = JointLoader if isinstance(source, CombinedLoader) else Loader
        return kind(
            source, world=self.world, cursor=Cursor(), stream=RandomStream(random_state()), accumulate=lambda: 1,
            shard=shard, evaluation=evaluation, move=move,
        )  # fmt: skip


def without_values(module: nn.Module) -> None:
    """Move a module off its memory; what is tied stays tied."""
    places = [(part, name, p) for part in module.modules() for name, p in part._parameters.items() if p is not None]
    module.to("meta")
    moved: dict[Any, Any] = {}
    for part, name, before in places:
        part._parameters[name] = moved.setdefault(before, part._parameters[name])


def _samples(source: Any, batch: Any) -> int:
    """How many samples the loader's batches hold."""
    if isinstance(source, CombinedLoader):
        parts = batch.values() if isinstance(batch, Mapping) else batch
        return sum(_samples(each, part) for each, part in zip(source.flattened, parts, strict=False))
    size = getattr(source, "batch_size", None)
    return size if isinstance(size, int) else _leading(batch)


def _leading(batch: Any) -> int:
    """The first size of the first tensor in a batch."""
    pending = [batch]
    while pending:
        value = pending.pop(0)
        if isinstance(value, Tensor) and value.dim():
            return len(value)
        if isinstance(value, Mapping):
            pending[:0] = value.values()
        elif isinstance(value, list | tuple):
            pending[:0] = value
    raise ValueError(f"a plan can't tell how many samples a {type(batch).__name__} holds: there is no tensor in it.")


def _plain(source: Any) -> bool:
    """Whether its batches are cut from a sampler by torch's own batch sampler."""
    return isinstance(source, DataLoader) and type(source.batch_sampler) is BatchSampler


def _resized(source: Any, micro: int) -> Any:
    """The loader with batches of another size; as it is where its batches are its own."""
    if not _plain(source):
        return source
    other, own = copy.copy(source), source.batch_sampler
    # DataLoader forbids to set these by name once it is built.
    other.__dict__["batch_sampler"] = BatchSampler(own.sampler, micro, own.drop_last)
    other.__dict__["batch_size"] = micro
    return other


def _like(batch: Any, size: int, samples: int) -> Any:
    """The same without values, with ``samples`` where the loader's own size stands first."""
    if isinstance(batch, Tensor):
        shape = list(batch.shape)
        if shape:
            shape[0] = max(1, shape[0] * samples // size)
        return torch.zeros(shape, dtype=batch.dtype)
    again = partial(_like, size=size, samples=samples)
    if isinstance(batch, Mapping):
        return {key: again(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*map(again, batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map(again, batch))
    return batch


def _stepped(optimizer: Optimizer, schedulers: list[SchedulerConfig], steps: int, per_epoch: int | None) -> list[float]:
    """Learning rates of the first group, evenly over so many steps."""
    every = max(1, steps // _POINTS)
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no optimizer stepped before them
        for step in range(1, steps + 1):
            if (step - 1) % every == 0:
                rates.append(float(optimizer.param_groups[0]["lr"]))
            for config in schedulers:
                count = step
                if config.interval == "epoch":
                    assert per_epoch is not None
                    count, within = divmod(step, per_epoch)
                    if within:
                        continue
                if count % config.frequency == 0:
                    config.scheduler.step()
    return rates
