"""Lightning's names for attributes and methods of a strategy or its world."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from ..common.messages import format_count, warn
from .distributed import World

# Methods of Lightning's strategies and precision plugins that Treadle never calls. Without the first, a run differs.
_OF_TASK = dict.fromkeys(
    ("backward", "optimizer_step", "training_step"),
    "override the task's method of this name, or do this in your own loop",
)
_CLIPPING = "override the task's configure_gradient_clipping, or clip in your own loop"
_LOST = {
    "Strategy": {
        **_OF_TASK,
        "setup_optimizers": "change the optimizers before they are prepared",
        "process_dataloader": "change the dataloader before it is prepared",
        **dict.fromkeys(
            ("lightning_module_state_dict", "load_checkpoint", "save_checkpoint"),
            "change the checkpoint in on_save_checkpoint and on_load_checkpoint of the task, or pass a CheckpointIO",
        ),
        "load_model_state_dict": "set strict_loading=False in the task, or override its load_state_dict",
    },
    "Precision": {
        **_OF_TASK,
        **dict.fromkeys(("clip_gradients", "clip_grad_by_norm"), _CLIPPING),
        **dict.fromkeys(("forward_context", "autocast_context_manager"), "override context(device)"),
        "convert_module": "override cast_module(module)",
        "convert_input": "override cast(batch)",
    },
}
_UNUSED = frozenset((
    *("_setup_model", "configure_ddp", "model_to_device", "post_backward", "pre_backward", "predict_step", "setup"),
    *("setup_environment", "teardown", "test_step", "validation_step"),
))  # fmt: skip


def check_overrides(strategy: Any, precision: Any) -> None:
    """Check what a user's strategy and precision add: raise a ValueError or warn if only Lightning would call it.

    Args:
        strategy: The strategy.
        precision: The precision.
    """
    for role, plugin in (("Strategy", strategy), ("Precision", precision)):
        bases = [base for base in type(plugin).__mro__ if not base.__module__.startswith("treadle.")]
        for name in (name for base in bases for name in vars(base)):
            place = f"{type(plugin).__name__}.{name}"
            if name in _LOST[role]:
                raise ValueError(
                    f"{place} overrides a method of Lightning's that Treadle would never call. Instead, "
                    f"{_LOST[role][name]}."
                )
            if name in _UNUSED:
                warn(f"{place} is never called. Override a method of treadle.strategies.{role}.")


def unattached_world(device: torch.device) -> World:
    """Return the rank, size and device that a strategy reports before a run.

    Args:
        device: The device.
    """
    return cast(World, SimpleNamespace(rank=0, local_rank=0, size=1, is_main=True, device=device))


class StrategyAliases:
    """Base class of `Strategy` that adds Lightning's names, for ``trainer.strategy.barrier()`` and similar calls.

    Attributes:
        prepared: The Accelerator's lists of prepared models and optimizers.
        checkpoint_io: The Trainer's `CheckpointIO`: the user's plugin, which then writes the run's checkpoints, or a
            `TorchCheckpointIO`.
        cluster_environment: The plugin of this kind that was passed to the strategy.
        requested_accelerator: The Trainer's ``accelerator`` that was passed to the strategy, or None.
        plugins: The Trainer's plugins that were passed to the strategy.
    """

    checkpoint_io: Any = None
    cluster_environment: Any = None
    requested_accelerator: str | None = None
    plugins: Sequence[Any] = ()

    world: World = unattached_world(torch.device("cpu"))
    unwrap: Callable[[nn.Module], nn.Module]  # the strategy's method
    no_sync: Callable[[nn.Module], AbstractContextManager[None]]  # the strategy's method
    place: Callable[[nn.Module], nn.Module]  # the strategy's method
    prepared: tuple[list[nn.Module], Sequence[Any]] = ([], ())

    def take_flags(self, options: dict[str, Any]) -> dict[str, Any]:
        """Keep the arguments that act like flags and plugins of the Trainer, and return the other arguments."""
        names = ("accelerator", "cluster_environment", "checkpoint_io", "precision_plugin")
        self.requested_accelerator, *plugins = (options.pop(name, None) for name in names)
        self.cluster_environment, *_ = plugins
        self.plugins = [plugin for plugin in plugins if plugin is not None]
        return options

    @property
    def root_device(self) -> torch.device:
        """Device of this process."""
        return self.world.device

    @property
    def is_global_zero(self) -> bool:
        """True on rank zero."""
        return self.world.is_main

    @property
    def global_rank(self) -> int:
        """Rank of this process."""
        return self.world.rank

    @property
    def local_rank(self) -> int:
        """Rank of this process on its machine."""
        return self.world.local_rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.world.size

    @property
    def model(self) -> nn.Module | None:
        """The first prepared model, as training calls it; None before a model is prepared."""
        return next(iter(self.prepared[0]), None)

    def connect(self, model: nn.Module) -> None:
        """Make ``model`` the model of the run without training it, for example to save a checkpoint of its weights.

        Args:
            model: The user's model. It is moved to the device and cast to the storage dtype.
        """
        self.prepared[0][:] = [self.place(model)]

    @property
    def optimizers(self) -> list[Optimizer]:
        """The user's optimizers. May be set to other optimizers of the same parameters."""
        return [prepared.optimizer for prepared in self.prepared[1]]

    @optimizers.setter
    def optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Replace the optimizers with others of the same parameters.

        Raises:
            ValueError: If their number differs from that of the prepared optimizers.
        """
        prepared = self.prepared[1]
        if len(optimizers) != len(prepared):
            raise ValueError(
                f"strategy.optimizers can't be set to a list of length {len(optimizers)}, because "
                f"configure_optimizers returned {format_count(len(prepared), 'optimizer')}. Assign a list "
                f"of length {len(prepared)}."
            )
        for slot, optimizer in zip(prepared, optimizers, strict=True):
            slot.replace(optimizer)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Return a context in which backward passes do not reduce gradients, to accumulate them on each process."""
        with ExitStack() as stack:
            for model in self.prepared[0]:
                stack.enter_context(self.no_sync(model))
            yield

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write a checkpoint on rank zero, such as the dict that ``trainer._checkpoint_connector`` dumps.

        Args:
            checkpoint: The dict that is written.
            filepath: The path to write to.
            storage_options: Options of the Trainer's `CheckpointIO`.
        """
        if self.world.is_main:
            self.checkpoint_io.save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        """Read a checkpoint, and return its content as a dict, without loading it into the run.

        Args:
            checkpoint_path: The path to read from.
            weights_only: As in ``torch.load``, which the Trainer's own `CheckpointIO` reads with: True, or None, builds
                no objects but those of ``torch.serialization.safe_globals``; False runs code in the file.
        """
        return self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=weights_only)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint on rank zero.

        Args:
            filepath: The checkpoint's path.
        """
        if self.world.is_main:
            self.checkpoint_io.remove_checkpoint(filepath)

    def barrier(self, name: str | None = None) -> None:
        """Wait until every process has reached this call.

        Args:
            name: Ignored.
        """
        self.world.barrier()

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the mean or the sum of the tensors of all processes. Must be called on all ranks of the group.

        Args:
            tensor: The tensor; any other object is returned unchanged.
            group: A torch process group. Default: all processes.
            reduce_op: ``"mean"``, ``"avg"`` or ``"sum"``, torch's ``ReduceOp.AVG`` or ``ReduceOp.SUM``, or None for the
                mean. The mean of integers is rounded down. Default: ``"mean"``.

        Raises:
            ValueError: If an argument is not supported, or if this process is not in ``group``.
        """
        operation = str(getattr(reduce_op, "name", reduce_op) or "mean").rpartition(".")[2].lower()
        if operation not in ("mean", "avg", "sum"):
            raise ValueError(
                f'reduce_op={reduce_op!r} must be "mean" or "sum". For other operations, use torch.distributed.'
            )
        if not isinstance(tensor, torch.Tensor):
            return tensor
        world = self.world if group is None else self.world.of_group(group)
        return world.all_reduce(tensor.to(self.root_device, copy=True), "sum" if operation == "sum" else "mean")

    def all_gather(self, tensor: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
        """Return the tensors of all processes, stacked if there are several. Must be called on all ranks of the group.

        Args:
            tensor: The tensor, with the same shape on all processes.
            group: A torch process group. Default: all processes.
            sync_grads: Must be False.

        Raises:
            ValueError: If ``sync_grads`` is True, or if this process is not in ``group``.
        """
        if sync_grads:
            raise ValueError(
                "strategy.all_gather(sync_grads=True) is not supported. Call self.all_gather in the task, which "
                "propagates gradients."
            )
        world = self.world if group is None else self.world.of_group(group)
        return tensor if world.size == 1 else torch.stack(world.all_gather(tensor))

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch to the device with the task's transfer hooks, and return it.

        Args:
            batch: Batch in the form that the dataloader yields.
            device: Target device. Default: that of this process.
            dataloader_idx: The index of the batch's dataloader.

        Raises:
            ValueError: If no task is prepared.
        """
        task: Any = None if self.model is None else self.unwrap(self.model)
        if task is None or not hasattr(task, "transfer_batch_to_device"):
            raise ValueError("strategy.batch_to_device needs a prepared task. Call it within a stage of the Trainer.")
        batch = task.on_before_batch_transfer(batch, dataloader_idx)
        batch = task.transfer_batch_to_device(batch, device or self.root_device, dataloader_idx)
        return task.on_after_batch_transfer(batch, dataloader_idx)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of process ``src`` on all processes. Must be called on all ranks.

        Args:
            obj: Any object that can be pickled.
            src: The rank whose object is returned.
        """
        return self.world.broadcast(obj, src)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return whether the decision is True on all processes. Must be called on all ranks.

        Args:
            decision: The decision of this process.
            all: If False, return whether it is True on at least one process. Default: True.
        """
        return self.world.all(decision) if all else self.world.any(decision)
