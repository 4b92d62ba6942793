"""The run of a configuration, to be planned: nothing of it is started."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .build import Checked, check
from .config import load
from .datamodule import DataModule
from .optimizers import SchedulerConfig, parse_optimizers
from .plan_subject import Subject, varied_by
from .task import TaskModule

# A second of stepping; who plans more steps sees no curve.
_MOST_STEPS = 100_000
_POINTS = 80


def of_config(options: argparse.Namespace) -> Subject:
    """The run of a configuration: its task, the first batch of its data, its optimizer and schedule.

    Raises:
        ConfigError: the configuration is wrong.
        ValueError: its task can't be planned.
    """
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)  # modules beside the configuration can be named in it
    checked = check(load(options.config, options.overrides))
    flags = {name: recipe.make() for name, recipe in checked.trainer.items() if name in _FLAGS}
    run = _Run(checked, flags, options)
    return Subject(
        name=checked.model.name or checked.model.target.__name__,
        build_model=run.build_model,
        make_batch=run.make_batch,
        loss=_loss,
        optimizer=run.optimizer,
        strategy=partial(varied_by, options, options.strategy or flags.get("strategy", "auto")),
        step="training_step",
        settings=run.settings(),
        length=run.length(),
        rates=run.rates,
    )


# What a plan asks of the Trainer's flags; callbacks, loggers and profilers are not even built.
_FLAGS = (
    "strategy", "devices", "num_nodes", "precision", "accumulate_grad_batches", "max_epochs", "max_steps",
    "gradient_clip_val",
)  # fmt: skip


class _Silent:
    """Takes what a step logs."""

    def log(self, *_: Any, **__: Any) -> None:
        """Nothing: there are no values."""


@dataclass
class _Run:
    """A configuration's parts, as a plan asks for them."""

    checked: Checked
    flags: Mapping[str, Any]
    options: argparse.Namespace

    def __post_init__(self) -> None:
        self.task: TaskModule | None = None
        task = self._built()
        if not task.automatic_optimization:
            raise ValueError("a task with automatic_optimization=False decides about its steps itself: no plan of it.")
        data = self.checked.datamodule()
        self.loader = _loader(task, data)
        self.size = _batch_size(self.loader)
        self.batch = next(iter(self.loader))

    # -- what simulate is given ----------------------------------------------------------------------------------

    def build_model(self) -> nn.Module:
        """The task, where parameters get no memory."""
        self.task = self._built()
        return self.task

    def make_batch(self, samples: int) -> Any:
        """As the first one, of so many samples."""
        return _like(self.batch, self.size, samples)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """The task's own."""
        assert self.task is not None
        optimizers, _ = parse_optimizers(self.task.configure_optimizers())
        if len(optimizers) != 1:
            raise ValueError(f"configure_optimizers returned {len(optimizers)} optimizers; a plan is of one.")
        return optimizers[0]

    def settings(self) -> dict[str, Any]:
        """What the Trainer's flags say."""
        devices, nodes = self.flags.get("devices", 1), self.flags.get("num_nodes", 1)
        count = len(devices) if isinstance(devices, list) else devices
        count = int(count) if isinstance(count, int) or str(count).isdecimal() else 1
        return {
            "world_size": max(1, count) * nodes,
            "micro_batch": self.size,
            "accumulate": _number(self.flags.get("accumulate_grad_batches"), 1),
            "precision": self.flags.get("precision") or "32-true",
            "clip": self.flags.get("gradient_clip_val"),
        }

    def length(self) -> dict[str, int]:
        """How long the run is, as far as it is known."""
        found: dict[str, int] = {}
        dataset: Any = getattr(self.loader, "dataset", None)
        if hasattr(dataset, "__len__"):
            found["samples"] = len(dataset)
        steps = _number(self.flags.get("max_steps"), -1)
        epochs = self.flags.get("max_epochs")
        epochs = 1000 if epochs is None and steps == -1 else epochs  # as the Trainer has it
        if steps > 0:
            found["steps"] = steps
        if epochs is not None and epochs > 0:
            found["epochs"] = epochs
        return found

    # -- the schedule --------------------------------------------------------------------------------------------

    def rates(self, steps: int, per_epoch: int | None = None) -> list[float]:
        """Learning rates over so many steps; none where there is no schedule, or one that waits for values."""
        if steps > _MOST_STEPS:
            return []
        with torch.device("meta"):
            optimizers, schedulers = parse_optimizers(self._built(steps).configure_optimizers())
        if not schedulers or any(config.reduce_on_plateau for config in schedulers):
            return []
        return _stepped(optimizers[0], schedulers, steps, per_epoch)

    def _built(self, steps: int = 1000) -> TaskModule:
        with torch.device("meta"):
            task = self.checked.task()
            stand_in: Any = SimpleNamespace(
                estimated_stepping_batches=steps, max_steps=steps, max_epochs=self.flags.get("max_epochs"),
                world_size=self.options.world_size or 1, global_rank=0, local_rank=0, is_global_zero=True,
                current_epoch=0, global_step=0, training=True, sanity_checking=False, loggers=[], logger=None,
            )  # fmt: skip
            task.__dict__["_trainer"] = stand_in
            task.__dict__["_metrics"] = _Silent()
            task.configure_model()
        return task


def _loss(step: Callable[..., Any], batch: Any) -> Tensor:
    """What ``training_step`` returns."""
    found = step(batch, 0)
    value = found.get("loss") if isinstance(found, Mapping) else found
    if not isinstance(value, Tensor):
        raise ValueError(f"training_step returned {type(found).__name__}, and a plan needs the loss as a tensor.")
    return value


def _loader(task: TaskModule, data: DataModule | None) -> Any:
    source: Any = task if data is None else data
    if data is not None:
        data.prepare_data()
        data.setup("fit")
    elif hasattr(task, "setup"):
        task.setup("fit")
    loader = source.train_dataloader()
    if loader is None or isinstance(loader, list | dict):
        raise ValueError("a plan needs one train_dataloader, of the data module or of the task.")
    return loader


def _batch_size(loader: Any) -> int:
    size = getattr(loader, "batch_size", None)
    if not isinstance(size, int):
        raise ValueError(f"a {type(loader).__name__} says no batch_size, so a plan can't tell samples from features.")
    return size


def _like(batch: Any, size: int, samples: int) -> Any:
    """The same without values, with ``samples`` where the loader's own size stands first."""
    if isinstance(batch, Tensor):
        shape = list(batch.shape)
        if shape:
            shape[0] = max(1, shape[0] * samples // size)
        return torch.zeros(shape, dtype=batch.dtype)
    if isinstance(batch, Mapping):
        return {key: _like(value, size, samples) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_like(value, size, samples) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_like(value, size, samples) for value in batch)
    return batch


def _number(value: Any, default: int) -> int:
    return value if isinstance(value, int) else default


def _stepped(optimizer: Optimizer, schedulers: list[SchedulerConfig], steps: int, per_epoch: int | None) -> list[float]:
    every = max(1, steps // _POINTS)
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that no optimizer stepped before them
        for step in range(steps):
            if step % every == 0:
                rates.append(float(optimizer.param_groups[0]["lr"]))
            for config in schedulers:
                by_epoch = config.interval == "epoch"
                due = per_epoch is not None and (step + 1) % per_epoch == 0 if by_epoch else True
                count = (step + 1) // per_epoch if by_epoch and per_epoch else step + 1
                if due and count % config.frequency == 0:
                    config.scheduler.step()
    return rates
