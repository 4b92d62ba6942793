"""Base classes of the Accelerator: a process with its rank and collectives, and the objects prepared on it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from .. import strategies
from ..strategies import apply_nested, distributed
from . import collectives, data, optim
from .collectives import split
from .configuration import GradientAccumulationPlugin, check_tree_settings
from .rng import RunRng
from .running_loaders import get_running_loader

if TYPE_CHECKING:
    from ..strategies import Precision, Strategy, World
    from .configuration import ProjectConfiguration


class Process:
    """Base class of `PartialState` and `Accelerator`, with rank, world size and collectives of this process.

    Args:
        world: All processes.
        data_world: The processes that hold different data, if several processes share each sample. Default: all
            processes.
    """

    _arguments: dict[str, Any] | None = None  # those of __init__, if an equal object can be created from them

    def __init__(self, world: World, data_world: World | None = None) -> None:
        self.world = world
        self.data_world = world if data_world is None else data_world
        self.cursor = data.Cursor()
        self._trigger = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return this object itself, so that a copied model that refers to it stays in the same process group."""
        return self

    def __reduce__(self) -> Any:
        """Return how to create an object with the same arguments, which nothing has been prepared on."""
        if self._arguments is None or self.world.size > 1:
            raise TypeError(
                f"{type(self).__name__} can't be pickled, because it is bound to this process and its process group. "
                "Create one in each process, in the function that the process runs."
            )
        return partial(type(self), **self._arguments), ()

    @property
    def device(self) -> torch.device:
        """Device that this process computes on."""
        return self.world.device

    @property
    def num_processes(self) -> int:
        """World size: the number of processes."""
        return self.world.size

    @property
    def process_index(self) -> int:
        """Rank of this process."""
        return self.world.rank

    @property
    def local_process_index(self) -> int:
        """Rank of this process on its machine."""
        return self.world.local_rank

    @property
    def is_main_process(self) -> bool:
        """True on rank zero."""
        return self.world.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        """True on local rank zero of each machine."""
        return self.world.local_rank == 0

    @property
    def is_last_process(self) -> bool:
        """True on the last rank."""
        return self.world.rank == self.world.size - 1

    @property
    def use_distributed(self) -> bool:
        """True if the world size is larger than one."""
        return self.world.size > 1

    @property
    def distributed_type(self) -> distributed.DistributedType:
        """Kind of distributed training, under Accelerate's name."""
        return distributed.distributed_type(self.world, self._is_sharded())

    def _is_sharded(self) -> bool:
        return False

    @property
    def backend(self) -> str | None:
        """Backend of the process group, such as ``"gloo"`` or ``"nccl"``; None with a world size of one."""
        return distributed.backend_of(self.world)

    # -- exchange ------------------------------------------------------------------------------------------------

    def wait_for_everyone(self) -> None:
        """Wait until every process has reached this call."""
        self.world.barrier()

    def end_training(self) -> None:
        """Wait until all processes have reached the end of the run."""
        self.wait_for_everyone()

    def gather(self, tensor: Any, sync_grads: bool = False) -> Any:
        """Concatenate the tensors of all processes along dimension 0, on every process.

        With ``sync_grads=True``, a loss can be computed on the whole global batch, as contrastive losses (SimCLR, CLIP)
        require. If every process does so, the gradient of a step with DDP or FSDP equals that of a single process with
        this batch. Do not multiply the loss by the world size.

        Args:
            tensor: A tensor, or tensors nested in dicts, lists, tuples or dataclasses. The numbers of rows may differ.
                A 0-d tensor counts as one row.
            sync_grads: Let gradients flow back to the process that each row came from. All processes must then use the
                result in their loss. With tensor parallelism, ranks that share a sample contribute it once. Default:
                False, and the result has no gradient.

        Raises:
            TypeError: If ``tensor`` contains no tensor.
            ShapesDiffer: On every process, if the tensors of the processes are not compatible.
        """
        if not sync_grads:
            collectives.check_equal_shapes("gather", tensor, self.world)
            return collectives.gather(tensor, self.world)
        micro = self.cursor.micro
        is_placeholder = micro is not None and not micro.samples
        return collectives.gather(tensor, self.data_world, empty=is_placeholder, sync_grads=True)

    def gather_object(self, value: Any) -> list[Any]:
        """Return a list of all processes' values, on every process. Lists and tuples are concatenated.

        Results for the shares of `split_between_processes` are in the order of its inputs.

        Args:
            value: Any object that can be pickled.
        """
        return collectives.gather_objects(value, self.world)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather results of the current batch from all processes, each sample once, in the order of the global batch.

        A 0-d tensor, such as a batch's mean loss, becomes one entry per process that had samples. If batches differ in
        size, a mean over the entries is not the mean over the samples. Then gather ``(loss, len(batch))`` and compute a
        weighted mean, or gather ``loss.repeat(len(batch))``.

        Args:
            input_data: Tensors in a nested structure, or other objects.
            use_gather_object: Gather the value as objects. Default: False.

        Returns:
            The structure with tensors concatenated along dimension 0. If the value contains no tensor or
            ``use_gather_object`` is True, a list of the items of all processes; for a tuple or dict of lists, the tuple
            or dict with such a list in place of each.

        Raises:
            ShapesDiffer: On every process, if the values of the processes are not compatible, or if a list has one
                tensor per sample and ``use_gather_object`` is False.
        """
        micro = self.cursor.micro
        is_placeholder = micro is not None and not micro.samples
        items = use_gather_object or not collectives.holds_tensor(input_data)
        if items:
            gathered = collectives.gather_items(input_data, self.data_world, empty=is_placeholder)
        else:
            if micro is not None and (batch_size := self._get_batch_size()) not in (None, micro.samples):
                input_data = collectives.resize_repeated(input_data, batch_size, micro.samples)
            samples = None if micro is None else micro.samples
            gathered = collectives.gather(input_data, self.data_world, empty=is_placeholder, samples=samples)
        return gathered if micro is not None else _drop_repeated(gathered, items)

    def _get_batch_size(self) -> int | None:
        """Return this rank's number of samples in a full batch of the current DataLoader, or None if unknown."""
        return None

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce tensors over the processes to their sum, mean, maximum or minimum.

        Args:
            tensor: A tensor, or tensors nested in collections, with the same shapes on all processes.
            reduction: ``"sum"``, ``"mean"``, ``"max"``, ``"min"``, or ``"none"``. Default: ``"sum"``. The mean of
                integers is float64.
            scale: Factor by which the result is multiplied; it has no effect with ``"none"``. Default: 1.

        Returns:
            The same structure with reduced tensors. The input is not changed.

        Raises:
            ValueError: If ``reduction`` is unknown.
            DistributedOperationException: On every process, if the tensors of the processes are not compatible.
        """
        return collectives.reduce(tensor, self.world, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Pad tensors along ``dim`` to the length of the longest tensor on any process.

        Args:
            tensor: A tensor, or tensors nested in collections.
            dim: The dimension to pad; tensors without it are unchanged. Default: 0.
            pad_index: The value to pad with. Default: 0.
            pad_first: Pad before the first entry rather than after the last. Default: False.

        Raises:
            ShapesDiffer: On every process, if the tensors of the processes are not compatible.
        """
        return collectives.pad_across_processes(tensor, self.world, dim, pad_index, pad_first)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Give each process its share of ``inputs``, which must be the same on all processes.

        `gather_object` (or `gather`, for tensors) returns the results in the order of the inputs. With padding, cut the
        results to the number of inputs.

        Args:
            inputs: The inputs, such as a list, a tensor, or a dict of these.
            apply_padding: Repeat the last input at the end, so that all shares have the same length. Default: False.

        Yields:
            The share of this process.

        Raises:
            TypeError: If ``inputs`` cannot be split or is unordered.
            ValueError: If ``inputs`` is a dict or named tuple whose values differ in length.
        """
        yield split(inputs, self.world.rank, self.world.size, apply_padding)

    def set_trigger(self) -> None:
        """Set a flag on this process. The next `check_trigger` then returns True on every process."""
        self._trigger = True

    def check_trigger(self) -> bool:
        """Return whether any process has set the flag since the last check. Must be called on all processes."""
        raised, self._trigger = self.world.any(self._trigger), False
        return raised

    def destroy_process_group(self) -> None:
        """Destroy the process group. Call it on all processes. A new Accelerator or PartialState creates another."""
        distributed.disconnect()

    # -- on some processes ---------------------------------------------------------------------------------------

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank zero only.

        Args:
            args: Arguments of ``print``.
            kwargs: Keyword arguments of ``print``.
        """
        if self.is_main_process:
            print(*args, **kwargs)

    def on_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate a function so that it runs only on rank zero, and returns None on other ranks.

        Args:
            function: The function to decorate.
        """
        return _run_if(function, self.is_main_process)

    def on_local_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate a function so that it runs only on local rank zero, and returns None on other ranks.

        Args:
            function: The function to decorate.
        """
        return _run_if(function, self.is_local_main_process)

    def on_last_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorate a function so that it runs only on the last rank, and returns None on other ranks.

        Args:
            function: The function to decorate.
        """
        return _run_if(function, self.is_last_process)

    def on_process(
        self, function: Callable[..., Any] | None = None, process_index: int | None = None
    ) -> Callable[..., Any]:
        """Decorate a function so that it runs only on rank ``process_index``, and returns None on other ranks.

        With a world size of one, this process runs the function for any index.

        Args:
            function: The function to decorate. Default: None, which returns a decorator.
            process_index: The rank that runs the function.

        Raises:
            TypeError: If ``process_index`` is missing.
            ValueError: If no process has this rank.
        """
        if function is None:
            return partial(self.on_process, process_index=process_index)
        return _run_if(function, self._is_chosen(process_index, self.world.rank, self.world.size, "process_index"))

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Callable[..., Any]:
        """Decorate a function so that it runs only on one local rank of each machine, and returns None on others.

        Args:
            function: The function to decorate. Default: None, which returns a decorator.
            local_process_index: The local rank that runs the function; see `on_process`.

        Raises:
            TypeError: If ``local_process_index`` is missing.
            ValueError: If no process has this local rank.
        """
        if function is None:
            return partial(self.on_local_process, local_process_index=local_process_index)
        world = self.world
        chosen = self._is_chosen(local_process_index, world.local_rank, world.local_size, "local_process_index")
        return _run_if(function, chosen)

    def _is_chosen(self, index: int | None, rank: int, size: int, name: str) -> bool:
        if index is None:
            raise TypeError(f"{name} is missing. Pass the index of the process that runs the function.")
        if self.world.size == 1 and isinstance(index, int) and index >= 0:
            return True
        collectives.check_process(index, size, name)
        return rank == index

    def main_process_first(self) -> AbstractContextManager[None]:
        """Return a context that rank zero runs before the other ranks. If rank zero fails, all ranks fail.

        Raises:
            RuntimeError, SystemExit: On all other ranks, if rank zero fails or exits.
        """
        return self._run_first(self.is_main_process)

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Return a context that local rank zero of each machine runs before other ranks; see `main_process_first`."""
        return self._run_first(self.is_local_main_process)

    @contextmanager
    def _run_first(self, leads: bool) -> Iterator[None]:
        if not leads:
            self.world.raise_together(None)
        try:
            yield
        except BaseException as error:  # including exits and interrupts, because the others would wait forever
            if leads:
                self.world.raise_together(error)
            raise
        if leads:
            self.world.raise_together(None)


class Prepared(Process):
    """Process with the objects that were prepared on it, which checkpoints save and restore. Base of `Accelerator`.

    Args:
        strategy: Strategy, attached to the processes of the run.
        precision: Precision of the run.
        mixed_precision: Name of the precision, such as ``"bf16"``.
        project: Settings for the run's directories and checkpoints.
        plugin: Settings for gradient accumulation.
        scaler: Loss scaler, or None.
        step_micro_batches: See `Accelerator`. Default: None.

    Attributes:
        weight_digests: The recorded digests of the weights, by optimizer step.
        models, optimizers, schedulers, loaders: The prepared objects, in the order of preparation.
        schedules_built: The schedulers, with the arguments that they were built with.
        accumulation: The counter of micro-batches and optimizer steps.
        rng: The RNG states of the ranks, and the random stream from which the order of samples is drawn.
        registered: The objects registered with `register_for_checkpointing`, by name. A metric object is wrapped.
        save_hooks, load_hooks: Functions that are called before a save, and before models are loaded.
    """

    def __init__(
        self,
        strategy: Strategy,
        precision: Precision,
        mixed_precision: str,
        project: ProjectConfiguration,
        plugin: GradientAccumulationPlugin,
        scaler: torch.amp.GradScaler | None,
        step_micro_batches: int | None = None,
    ) -> None:
        super().__init__(strategy.world, strategy.data_world)
        self.strategy, self.precision, self.mixed_precision = strategy, precision, mixed_precision
        self.project_configuration, self.gradient_accumulation_plugin = project, plugin
        self.models: list[nn.Module] = []
        self.optimizers: list[optim.PreparedOptimizer] = []
        self.schedulers: list[Any] = []
        self.schedules_built: list[optim.BuiltSchedule] = []
        self.loaders: list[data.Loader] = []
        strategy.prepared = self.models, self.optimizers
        self.step_micro_batches = step_micro_batches
        self.weight_digests: dict[int, str] = {}
        self._tree = None if step_micro_batches is None else strategies.FixedTree(step_micro_batches, self.world.size)
        self.rng = RunRng(self.world, strategy, keyed=self._tree is not None)
        self.accumulation = optim.Accumulation(
            plugin, self.world, strategy, scaler, self.cursor, self.models, self.optimizers
        )
        if self._tree is not None:
            check_tree_settings(plugin, self._tree.leaves)
            self.accumulation.add_in_tree(self._tree)
        self.registered: dict[str, Any] = {}
        self.save_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()
        self.load_hooks: OrderedDict[int, Callable[..., Any]] = OrderedDict()

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Return the full state dict of a model; see `Accelerator.get_state_dict`. A user's subclass may override it.

        Args:
            model: A prepared model.
            unwrap: See `Accelerator.get_state_dict`. Default: True.
        """
        raise NotImplementedError


def _drop_repeated(gathered: Any, items: bool) -> Any:
    """Remove the rows, or with ``items`` the items, that a loader without an Accelerator repeated in its last batch."""
    loader = get_running_loader()
    if loader is None or not loader.end_of_dataloader or loader.remainder <= 0:
        return gathered
    if items:
        return collectives.take_first(gathered, loader.remainder)
    return apply_nested(gathered, torch.Tensor, lambda tensor: tensor[: loader.remainder])


def _run_if(function: Callable[..., Any], chosen: bool) -> Callable[..., Any]:
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if chosen else None

    return run
