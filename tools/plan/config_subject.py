"""Construction of the `Subject` of a plan from a run's configuration."""

from __future__ import annotations

import argparse
import copy
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import BatchSampler, DataLoader

from ...cli.config import load
from ...cli.config.instantiate import CheckedConfig, check
from ...common.messages import join_words, name_type
from ...engine import CombinedLoader, JointLoader, Loader, RandomStream, random_state
from ...engine.data import Cursor, get_length
from ...strategies import FixedTree, apply_nested, iter_tensors
from ...trainer import Trainer
from ...trainer.core import TaskModule
from ...trainer.loop import Sources, configure, count_positional, pass_by_keyword
from .plan import Plan
from .report import Schedule
from .simulated_world import keep_ties
from .strategy_facts import facts_of
from .subject import Subject, vary_strategy

# Flags that set the place and the hardware of the run, which a plan needs itself.
_PLACE = ("strategy", "devices", "num_nodes", "precision", "gradient_clip_val", "compile", "sync_batchnorm")
# Flags that set the length of the run, for the Trainer's own computation. Callbacks, loggers and profilers are not even
# built.
_LENGTH = (
    "accumulate_grad_batches", "fast_dev_run", "limit_train_batches", "max_epochs", "max_steps", "max_time",
    "min_epochs", "min_steps", "overfit_batches", "use_distributed_sampler",
)  # fmt: skip


def build_config_subject(options: argparse.Namespace) -> Subject:
    """Build the `Subject` of a configuration from its task, the first batch of its data, its optimizer and schedule."""
    if (current_directory := os.getcwd()) not in sys.path:
        sys.path.insert(0, current_directory)  # so that it can name modules next to the configuration
    checked = check(load(options.config, options.overrides))
    run = _PlannedRun(checked, options)
    return Subject(
        name=checked.model.name or checked.model.target.__name__,
        build_model=run.build_model,
        make_batch=run.make_batch,
        loss=run.compute_loss,
        optimizer=run.make_optimizers,
        strategy=run.make_strategy,
        step="training_step",
        settings=run.settings,
        schedule=run.make_schedule,
    )


class PlannedTrainer(Trainer):
    """Trainer that runs in this process only but reports the world size of the planned run."""

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
        """World size of the planned run."""
        return self._processes

    @property
    def num_training_batches(self) -> int | float:
        """Micro-batches per epoch and rank; infinite if unknown."""
        return float("inf") if self.batches is None else self.batches


class _SilentMetrics:
    """Metrics that discard all values that a step logs."""

    def log(self, *_: Any, **__: Any) -> None:
        """Discard the arguments, because a plan computes no values."""


class _PlannedRun:
    """Functions and settings that a plan needs, derived from a checked configuration."""

    def __init__(self, checked: CheckedConfig, options: argparse.Namespace) -> None:
        self.checked = checked
        self.options = options
        # The last one applies to the whole process, and the costs depend on it.
        planned = (*_PLACE, *_LENGTH, "float32_matmul_precision", "step_micro_batches")
        flags = {name: recipe.make() for name, recipe in checked.trainer.items() if name in planned}
        placement = {name: flags.pop(name) for name in _PLACE if name in flags}
        self._read_placement(placement)
        if (leaves := flags.pop("step_micro_batches", None)) is not None:
            flags["accumulate_grad_batches"] = self._divide(leaves)
        requested = {
            "accumulate_grad_batches": options.accumulate,
            "max_epochs": options.max_epochs,
            "max_steps": options.max_steps,
        }
        flags.update((name, value) for name, value in requested.items() if value is not None)
        self.trainer = PlannedTrainer(self.settings["world_size"], **flags)
        self._read_data()
        self.settings["accumulate"] = self.trainer.accelerator.gradient_accumulation_steps
        self.settings["micro_batch"] = options.micro_batch or self.size
        self.trainer.batches = self._count_batches()

    def _divide(self, leaves: int) -> int:
        """Return the number of micro-batches per process, and plan the sums that it holds of them."""
        if self.options.accumulate is not None:
            raise ValueError(
                f"--accumulate {self.options.accumulate} contradicts step_micro_batches={leaves} of the configuration, "
                "which determines it. Remove one of them."
            )
        most = FixedTree(leaves, self.settings["world_size"]).most
        self.settings["partial_sums"] = most.bit_length() - 1
        return most

    def _read_placement(self, flags: dict[str, Any]) -> None:
        if flags.get("sync_batchnorm"):
            raise ValueError(
                "sync_batchnorm=True can't be planned, because its communication can't be estimated. Set it to False."
            )
        devices, nodes = flags.get("devices", 1), flags.get("num_nodes", 1)
        count = len(devices) if isinstance(devices, list) else devices
        count = max(1, int(count)) if isinstance(count, int) or str(count).isdecimal() else 1
        clip = flags.get("gradient_clip_val")
        self.settings: dict[str, Any] = {
            "world_size": self.options.world_size or count * nodes,
            "precision": flags.get("precision") or "32-true",
            "clip": max(filter(None, clip.values()), default=None) if isinstance(clip, dict) else clip,
            "compiled": bool(flags.get("compile")),
        }
        if nodes > 1 and self.options.world_size is None:
            self.settings["per_machine"] = count
        self._strategy = self.options.strategy or flags.get("strategy", "auto")

    def _read_data(self) -> None:
        """Set up the dataloader and load its first batch, as in a run with one process."""
        trainer, data = self.trainer, self.checked.build_datamodule()
        task = self._make_task()
        if not task.automatic_optimization:
            raise ValueError(
                "a task with automatic_optimization=False can't be planned, because it steps its optimizers itself. "
                "Plan a task with automatic optimization."
            )
        trainer.task, trainer.datamodule = task, data
        if data is not None:
            data.trainer = trainer
            data.prepare_data()
        task.prepare_data()
        if data is not None:
            pass_by_keyword(data.setup, "stage")("fit")
        self._configure_task(task)
        loader = Sources(task, data, {}, trainer.accelerator, {"train": 1.0}, True).train
        self.source: Any = loader.source
        self.batch = next(iter(loader), None)
        trainer.accelerator.close_loaders()
        if self.batch is None:
            raise ValueError(
                f"the training dataloader ({name_type(self.source)}) yields no batch, but a plan needs the shapes of a "
                "batch. Check the dataset."
            )
        self.size = _count_samples(self.source, self.batch)

    def _count_batches(self) -> int | None:
        """Return the number of micro-batches per epoch and rank; None if unknown."""
        micro, processes = self.settings["micro_batch"], self._count_data_processes()
        if self.options.samples is not None:
            return -(-self.options.samples // (micro * processes))
        trainer, source = self.trainer, self.source
        resized = _resize_batches(source, micro)
        limits = {"train": trainer.limit_train_batches}
        accelerator: Any = _SimulatedAccelerator(processes)
        shard = trainer.use_distributed_sampler
        batch_count = Sources(trainer.task, None, {"train": resized}, accelerator, limits, shard).train.length  # type: ignore
        if batch_count is None or resized is not source or micro == self.size:
            return batch_count
        return -(-batch_count * self.size // micro)

    def _count_data_processes(self) -> int:
        world_size = self.settings["world_size"]
        return int(world_size // facts_of(self.make_strategy(world_size)).grid(world_size)["tensor"])

    # -- inputs of simulate --------------------------------------------------------------------------------------

    def make_strategy(self, world_size: int) -> Any:
        return vary_strategy(self.options, self._strategy, world_size)

    def build_model(self) -> nn.Module:
        """Build the task with parameters on the meta device."""
        task = self._configure_task(self._make_task())
        self.trainer.task = task
        return task

    def make_batch(self, samples: int) -> Any:
        """Return a batch like the run's first one, but with ``samples`` samples and tensors of zeros."""
        return _make_like(self.batch, self.size, samples)

    def compute_loss(self, step: Callable[..., Any], batch: Any) -> Tensor:
        """Run ``training_step`` and return its loss."""
        indexed = count_positional(self.trainer.task.training_step) > 1
        output = step(batch, 0) if indexed else step(batch)
        value = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(value, Tensor) or not value.requires_grad:
            detached = "a tensor that does not require grad"
            raise ValueError(
                f"training_step returned {detached if isinstance(value, Tensor) else name_type(output)}, but a plan "
                "needs a loss tensor with requires_grad=True, returned alone or under 'loss' in a dict."
            )
        return value

    def make_optimizers(self, _: Iterable[nn.Parameter]) -> list[Optimizer]:
        """Return the optimizers that the task's ``configure_optimizers`` returns."""
        task = self.trainer.task
        optimizers, schedulers = configure(task)
        if not optimizers:
            raise ValueError(
                "configure_optimizers returned None, so there is no optimizer step to plan. Return an optimizer."
            )
        self.trainer.accelerator.optimizers[:] = optimizers  # type: ignore[assignment]
        self.trainer.lr_scheduler_configs = schedulers
        return optimizers

    def _make_task(self) -> TaskModule:
        """Build the task on the meta device if its constructor allows that, otherwise on the CPU."""
        try:
            with torch.device("meta"):
                task = self.checked.build_task()
        except (RuntimeError, NotImplementedError):  # it reads values, such as those of torch.linspace
            with torch.device("cpu"):
                task = self.checked.build_task()
        task.trainer = self.trainer
        task.__dict__["_metrics"] = _SilentMetrics()
        return task

    def _configure_task(self, task: TaskModule) -> TaskModule:
        """Run the task's ``setup`` and ``configure_model``, and move the task to the meta device."""
        with torch.device("cpu"):
            pass_by_keyword(task.setup, "stage")("fit")  # it may read data, so values are needed
        with torch.device("meta"):
            task.configure_model()
        if any(not tensor.is_meta for tensor in (*task.parameters(), *task.buffers())):
            keep_ties(task, lambda: task.to("meta"))
        return task

    # -- the schedule --------------------------------------------------------------------------------------------

    def make_schedule(self, plan: Plan) -> Schedule:
        """Return the run's length, and a description of its learning rate."""
        steps = self.trainer.estimated_stepping_batches
        batches = self.trainer.batches
        samples = self.options.samples or (
            get_length(self.source.batch_sampler.sampler) if _is_plain_loader(self.source) else None
        )
        return Schedule(
            steps=None if steps == float("inf") else int(steps),
            samples=samples,
            per_epoch=None if batches is None else -(-batches // plan.accumulate),
            rate=self._describe_rate(),
        )

    def _describe_rate(self) -> str:
        first = float(self.trainer.accelerator.optimizers[0].param_groups[0]["lr"])
        schedulers = [
            type(config.scheduler).__name__ + (f" on {config.monitor}" if config.reduce_on_plateau else "")
            for config in self.trainer.lr_scheduler_configs
        ]
        later = f"at first, then {join_words(schedulers, 'and')}" if schedulers else "throughout"
        return f"learning rate {first:.3g} {later}"


class _SimulatedAccelerator:
    """Minimal accelerator that prepares dataloaders for rank zero of ``processes`` ranks."""

    def __init__(self, processes: int) -> None:
        self.world: Any = SimpleNamespace(rank=0, size=processes)  # all attributes of a `World` that a loader uses

    def prepare_data_loader(self, source: Any, *, shard: bool, evaluation: bool, move: Any, in_tree: bool) -> Loader:
        kind = JointLoader if isinstance(source, CombinedLoader) else Loader
        return kind(
            source, world=self.world, cursor=Cursor(), stream=RandomStream(random_state()), accumulate=lambda _: 1,
            shard=shard, evaluation=evaluation, move=move,
        )  # fmt: skip


def _count_samples(source: Any, batch: Any) -> int:
    if isinstance(source, CombinedLoader):
        parts = batch.values() if isinstance(batch, Mapping) else batch
        return sum(_count_samples(loader, part) for loader, part in zip(source.flattened, parts, strict=False))
    size = getattr(source, "batch_size", None)
    return size if isinstance(size, int) else _read_leading_size(batch)


def _read_leading_size(batch: Any) -> int:
    """Return the length of the first tensor in a batch that is not a scalar."""
    size = next((len(tensor) for tensor in iter_tensors(batch) if tensor.dim()), None)
    if size is None:
        raise ValueError(
            f"the number of samples in the batch ({name_type(batch)}) is unknown, because the batch contains no tensor "
            "with a batch dimension. Pass batch_size=... to the DataLoader."
        )
    return size


def _is_plain_loader(source: Any) -> bool:
    """Return whether a dataloader uses torch's own ``BatchSampler``."""
    return isinstance(source, DataLoader) and type(source.batch_sampler) is BatchSampler


def _resize_batches(source: Any, micro: int) -> Any:
    """Return a copy of a dataloader with batch size ``micro``; ``source`` itself if its batch sampler is custom."""
    if not _is_plain_loader(source):
        return source
    resized, batch_sampler = copy.copy(source), source.batch_sampler
    # A DataLoader refuses to set these by name after its construction.
    resized.__dict__["batch_sampler"] = BatchSampler(batch_sampler.sampler, micro, batch_sampler.drop_last)
    resized.__dict__["batch_size"] = micro
    return resized


def _make_like(batch: Any, size: int, samples: int) -> Any:
    """Return ``batch`` with tensors of zeros, whose first dimensions are scaled from ``size`` to ``samples``."""

    def make_zeros(tensor: Tensor) -> Tensor:
        first = [max(1, length * samples // size) for length in tensor.shape[:1]]
        return torch.zeros([*first, *tensor.shape[1:]], dtype=tensor.dtype)

    return apply_nested(batch, Tensor, make_zeros)
