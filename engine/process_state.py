"""Rank, world size and collectives of a process, and the state objects of Accelerate's API."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch

from ..common.durations import parse_duration
from ..common.messages import nearest
from ..strategies import World, apply_nested, open_world
from ..strategies.distributed import (
    DistributedType,
    backend_of,
    connected,
    current_world,
    disconnect,
    distributed_type,
    is_forked,
)
from . import collectives
from .collectives import split
from .configuration import GradientAccumulationPlugin
from .data import Cursor
from .running_loaders import add_running_loader, get_running_loader, list_running_loaders, remove_running_loader

if TYPE_CHECKING:
    from .accelerator import Accelerator
    from .data import Loader

# This process's Accelerators, the newest last: Accelerate's state objects describe the one in use.
_accelerators: list[weakref.ref[Accelerator]] = []


def register_accelerator(accelerator: Accelerator) -> None:
    """Make `GradientState()` and `AcceleratorState()` describe ``accelerator``, without keeping it alive."""
    _accelerators[:] = [reference for reference in _accelerators if reference() is not None]
    _accelerators.append(weakref.ref(accelerator))


def get_latest_accelerator() -> Accelerator | None:
    """Return the most recently registered Accelerator of this process that is still alive, or None."""
    return next((accelerator for reference in reversed(_accelerators) if (accelerator := reference())), None)


class Process:
    """Base class of `PartialState` and `Accelerator`, with rank, world size and collectives of this process.

    Args:
        world: All processes.
        data_world: The processes that hold different data, if several processes share each sample. Default: all
            processes.
    """

    def __init__(self, world: World, data_world: World | None = None) -> None:
        self.world = world
        self.data_world = world if data_world is None else data_world
        self.cursor = Cursor()
        self._trigger = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return this object itself, so that a copied model that refers to it stays in the same process group."""
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} can't be pickled, because it is bound to this process and its process group. "
            "Create one in each process, in the function that the process runs."
        )

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
    def distributed_type(self) -> DistributedType:
        """Kind of distributed training, under Accelerate's name."""
        return distributed_type(self.world, self._is_sharded())

    def _is_sharded(self) -> bool:
        return False

    @property
    def backend(self) -> str | None:
        """Backend of the process group, such as ``"gloo"`` or ``"nccl"``; None with a world size of one."""
        return backend_of(self.world)

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
        disconnect()

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


class PartialState(Process):
    """Rank, world size and collectives of this process, for inference and other scripts without an Accelerator.

    Instances share one process group. The constructor uses an existing process group, or connects the processes that a
    launcher started.

    Args:
        cpu: Compute on the CPU even if there is a GPU. Default: False.
        kwargs: Settings of the process group: ``backend`` (such as ``"gloo"`` or ``"nccl"``) and ``timeout`` (a
            ``timedelta``, a dict of its arguments, or ``"DD:HH:MM:SS"``).

    Raises:
        TypeError: If a keyword argument is unknown, or if ``timeout`` has the wrong type.
        ValueError: If a value or the launcher's environment is invalid.

    Examples:
        >>> import treadle
        >>> state = treadle.PartialState(cpu=True)
        >>> state.process_index, state.num_processes
        (0, 1)
        >>> with state.split_between_processes(["a", "b"]) as inputs:
        ...     outputs = state.gather_object([text.upper() for text in inputs])
        >>> outputs
        ['A', 'B']
    """

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in ("backend", "timeout") if name in kwargs}
        if kwargs:
            name = next(iter(kwargs))
            raise TypeError(
                f"{type(self).__name__}() has no argument {name!r}.{nearest(name, ('cpu', 'backend', 'timeout'))}"
            )
        if options.get("timeout") is not None:
            options["timeout"] = parse_duration("timeout", options["timeout"])
        if connected() and not cpu and not options:
            super().__init__(current_world())
        else:
            super().__init__(open_world("cpu" if cpu else "auto", spread=False, **options))
        if os.environ.get("ACCELERATE_DEBUG_MODE", "").lower() in ("1", "true", "yes", "y", "on", "t"):
            self.debug = True

    @property
    def default_device(self) -> torch.device:
        """Same as `device`."""
        return self.device

    @property
    def initialized(self) -> bool:
        """Always True."""
        return True

    @property
    def debug(self) -> bool:
        """True in Accelerate's debug mode (``ACCELERATE_DEBUG_MODE=1``), or with ``TREADLE_DEBUG=1``.

        In Accelerate's debug mode, `gather` checks that all ranks pass tensors of the same shapes. Setting this
        property enables or disables Accelerate's debug mode for the whole process.
        """
        return collectives.debug_mode.enabled or self.world.debug is not None

    @debug.setter
    def debug(self, value: bool) -> None:
        collectives.debug_mode.enabled = bool(value)

    @property
    def fork_launched(self) -> bool:
        """True if `notebook_launcher` or `debug_launcher` forked this process."""
        return is_forked()

    def set_device(self) -> None:
        """Make `device` torch's current device, if it is a GPU."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    @staticmethod
    def _reset_state() -> None:
        """Reset the state that all instances share."""
        collectives.debug_mode.enabled = False

    def __repr__(self) -> str:
        lines = {
            "Distributed environment": f"{self.distributed_type}"
            + (f"  Backend: {self.backend}" * self.use_distributed),
            "Num processes": self.num_processes,
            "Process index": self.process_index,
            "Local process index": self.local_process_index,
            "Device": self.device,
        }
        return "\n".join(f"{name}: {value}" for name, value in lines.items()) + "\n"


class _Forwarded:
    """Attribute of an `AcceleratorState` that is the Accelerator's; None without an Accelerator."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, state: AcceleratorState | None, _: type) -> Any:
        return self if state is None else getattr(state._accelerator, self._name, None)


class AcceleratorState(PartialState):
    """State of an Accelerator: a `PartialState` that also describes the Accelerator's precision, strategy and plugins.

    ``AcceleratorState()`` describes the latest Accelerator, if there is one.

    Args:
        mixed_precision: Precision to report, such as ``"bf16"``. Default: that of the latest Accelerator.
        cpu: Compute on the CPU even if there is a GPU. Default: False.
        kwargs: Further arguments of `PartialState`.

    Raises:
        TypeError, ValueError: As for `PartialState`.

    Examples:
        >>> from treadle.engine import Accelerator, AcceleratorState
        >>> accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        >>> AcceleratorState().mixed_precision
        'bf16'
    """

    deepspeed_plugin = None
    strategy = _Forwarded("strategy")
    fsdp_plugin = _Forwarded("fsdp_plugin")
    parallelism_config = _Forwarded("parallelism_config")
    device_mesh = _Forwarded("torch_device_mesh")
    dynamo_plugin = _Forwarded("dynamo_plugin")

    def __init__(self, mixed_precision: Any = None, cpu: bool = False, **kwargs: Any) -> None:
        super().__init__(cpu, **kwargs)
        self._accelerator = get_latest_accelerator()
        self._mixed_precision = None if mixed_precision is None else str(mixed_precision)

    @classmethod
    def from_accelerator(cls, accelerator: Accelerator) -> AcceleratorState:
        """Return an `AcceleratorState` that describes ``accelerator``.

        Args:
            accelerator: The Accelerator to describe.
        """
        state = cls.__new__(cls)
        Process.__init__(state, accelerator.world, accelerator.data_world)
        state.cursor, state._accelerator = accelerator.cursor, accelerator
        state._mixed_precision = accelerator.mixed_precision
        return state

    def _is_sharded(self) -> bool:
        return self.is_fsdp2

    def _get_batch_size(self) -> int | None:
        return None if self._accelerator is None else self._accelerator._get_batch_size()

    @property
    def mixed_precision(self) -> str:
        """Mixed precision, such as ``"no"`` or ``"bf16"``.

        If the constructor received no precision, this is the Accelerator's precision. Without an Accelerator, it is the
        value of the environment variable ``ACCELERATE_MIXED_PRECISION`` or, if the variable is not set, ``"no"``.
        """
        if self._mixed_precision is not None:
            return self._mixed_precision
        if self._accelerator is not None:
            return self._accelerator.mixed_precision
        return os.environ.get("ACCELERATE_MIXED_PRECISION", "no")

    @property
    def is_fsdp2(self) -> bool:
        """True if the strategy shards the model."""
        return self._accelerator is not None and self._accelerator.is_fsdp2

    @staticmethod
    def _reset_state(reset_partial_state: bool = False) -> None:
        _accelerators.clear()
        if reset_partial_state:
            PartialState._reset_state()

    def __repr__(self) -> str:
        return f"{super().__repr__()}\nMixed precision type: {self.mixed_precision}\n"


def is_initialized() -> bool:
    """Return whether an Accelerator exists in this process."""
    return get_latest_accelerator() is not None


class GradientState:
    """State of gradient accumulation: the current position in the accumulation group and in the dataloader.

    ``GradientState()`` describes the latest Accelerator.

    Args:
        gradient_accumulation_plugin: Settings that apply to all instances while no Accelerator exists.

    Examples:
        >>> from treadle.engine import Accelerator, GradientState
        >>> accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
        >>> GradientState().num_steps
        4
    """

    _plugin: GradientAccumulationPlugin | None = None
    _sync_without_accelerator = True

    def __init__(self, gradient_accumulation_plugin: GradientAccumulationPlugin | None = None) -> None:
        self._accelerator: Accelerator | None = None
        if gradient_accumulation_plugin is not None:
            GradientState._plugin = gradient_accumulation_plugin

    @classmethod
    def from_accelerator(cls, accelerator: Accelerator) -> GradientState:
        """Return a `GradientState` that describes ``accelerator``.

        Args:
            accelerator: The Accelerator to describe.
        """
        state = cls()
        state._accelerator = accelerator
        return state

    @staticmethod
    def _reset_state() -> None:
        GradientState._plugin, GradientState._sync_without_accelerator = None, True
        for loader in list_running_loaders():
            remove_running_loader(loader)

    def _resolve(self) -> Accelerator | None:
        return self._accelerator or get_latest_accelerator()

    @property
    def initialized(self) -> bool:
        """Always True."""
        return True

    @property
    def sync_gradients(self) -> bool:
        """True if the current micro-batch is the last of its accumulation group."""
        accelerator = self._resolve()
        return self._sync_without_accelerator if accelerator is None else accelerator.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        accelerator = self._resolve()
        if accelerator is None:
            GradientState._sync_without_accelerator = value
        else:
            accelerator.sync_gradients = value

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self.sync_gradients = sync_gradients

    @property
    def num_steps(self) -> int:
        """Number of micro-batches per optimizer step."""
        accelerator = self._resolve()
        if accelerator is not None:
            return accelerator.gradient_accumulation_steps
        return 1 if self._plugin is None else self._plugin.num_steps

    @property
    def adjust_scheduler(self) -> bool:
        """The ``adjust_scheduler`` setting, which has no effect."""
        return self.plugin_kwargs.get("adjust_scheduler", True)

    @property
    def sync_with_dataloader(self) -> bool:
        """True if the end of a dataloader also ends the accumulation group."""
        return self.plugin_kwargs.get("sync_with_dataloader", True)

    @property
    def plugin_kwargs(self) -> dict[str, Any]:
        """Fields of the plugin that differ from their defaults, and ``num_steps``."""
        accelerator = self._resolve()
        plugin = self._plugin if accelerator is None else accelerator.gradient_accumulation_plugin
        return {**({} if plugin is None else plugin.to_kwargs()), "num_steps": self.num_steps}

    @property
    def active_dataloader(self) -> Any:
        """Dataloader that yielded the current batch, or None."""
        accelerator = self._resolve()
        micro = None if accelerator is None else accelerator.cursor.micro
        if accelerator is None or micro is None:
            return get_running_loader()
        loaders: list[Loader] = accelerator.loaders
        return next((loader for loader in loaders if loader.is_at(micro)), None)

    @property
    def dataloader_references(self) -> list[Any]:
        """List of running dataloaders, whose first item is None, as in Accelerate.

        It contains the sharded dataloaders that run without an Accelerator, and `active_dataloader`.
        """
        running, active = list_running_loaders(), self.active_dataloader
        return [None, *running] if active is None or active in running else [None, *running, active]

    @property
    def in_dataloader(self) -> bool:
        """True while iterating over a prepared dataloader, or over a sharded dataloader without an Accelerator."""
        accelerator = self._resolve()
        return (accelerator is not None and accelerator.cursor.micro is not None) or get_running_loader() is not None

    @property
    def end_of_dataloader(self) -> bool:
        """True during the last batch of the dataloader. Always False for a prepared dataloader of unknown length."""
        loader = self.active_dataloader
        if loader is None or loader is get_running_loader():
            return loader is not None and loader.end_of_dataloader
        return loader.length is not None and loader.batches >= loader.length

    @property
    def remainder(self) -> int:
        """Number of samples in the global batch if it is the last one of a prepared dataloader; otherwise -1.

        For a sharded dataloader without an Accelerator, this is the ``remainder`` of that dataloader.
        """
        accelerator, running = self._resolve(), get_running_loader()
        micro = None if accelerator is None else accelerator.cursor.micro
        if micro is None:
            return -1 if running is None else running.remainder
        return micro.everyone if self.end_of_dataloader else -1

    def _add_dataloader(self, dataloader: Any) -> None:
        add_running_loader(dataloader)

    def _remove_dataloader(self, dataloader: Any) -> None:
        remove_running_loader(dataloader)

    @property
    def is_xla_gradients_synced(self) -> bool:
        """Always False, because XLA is not used."""
        return False

    def __repr__(self) -> str:
        names = ("sync_gradients", "num_steps", "end_of_dataloader", "remainder")
        return "\n".join(f"{name}: {getattr(self, name)}" for name in names) + "\n"
