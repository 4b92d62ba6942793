"""State objects of Accelerate's API, which describe a process and the Accelerator in use."""

from __future__ import annotations

import os
import weakref
from dataclasses import replace
from typing import Any, ClassVar

import torch

from .. import strategies
from ..common.durations import parse_duration
from ..common.messages import nearest
from ..strategies import distributed
from . import collectives, data
from .configuration import GradientAccumulationPlugin, check_tree_settings
from .process import Prepared, Process
from .running_loaders import add_running_loader, get_running_loader, list_running_loaders, remove_running_loader

# This process's Accelerators, the newest last: Accelerate's state objects describe the one in use.
_accelerators: list[weakref.ref[Prepared]] = []


def register_accelerator(accelerator: Prepared) -> None:
    """Make `GradientState()` and `AcceleratorState()` describe ``accelerator``, without keeping it alive."""
    _accelerators[:] = [reference for reference in _accelerators if reference() is not None]
    _accelerators.append(weakref.ref(accelerator))
    PartialState._shared_state["device"] = accelerator.device


def get_latest_accelerator() -> Prepared | None:
    """Return the most recently registered Accelerator of this process that is still alive, or None."""
    return next((accelerator for reference in reversed(_accelerators) if (accelerator := reference())), None)


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

    # Empty until this process has a state or an Accelerator: transformers' losses for object detection look at it
    # before they sum the number of boxes over the ranks.
    _shared_state: ClassVar[dict[str, Any]] = {}

    def __init__(self, cpu: bool = False, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in ("backend", "timeout") if name in kwargs}
        if kwargs:
            name = next(iter(kwargs))
            raise TypeError(
                f"{type(self).__name__}() has no argument {name!r}.{nearest(name, ('cpu', 'backend', 'timeout'))}"
            )
        if options.get("timeout") is not None:
            options["timeout"] = parse_duration("timeout", options["timeout"])
        if distributed.connected() and not cpu and not options:
            super().__init__(distributed.current_world())
        else:
            super().__init__(strategies.open_world("cpu" if cpu else "auto", spread=False, **options))
        self._shared_state["device"] = self.device
        if os.environ.get("ACCELERATE_DEBUG_MODE", "").lower() in ("1", "true", "yes", "y", "on", "t"):
            self.debug = True

    def __reduce__(self) -> Any:
        """Pickle as the state of the process that loads it. Training arguments hold one, and are saved with a model."""
        return type(self), ()

    initialized = True
    """Always True, as in Accelerate once there is a state."""

    @property
    def debug(self) -> bool:
        """True in Accelerate's debug mode (``ACCELERATE_DEBUG_MODE=1``), or with ``TREADLE_DEBUG=1``.

        In Accelerate's debug mode, `gather` checks that all ranks pass tensors of the same shapes. Setting this
        property enables or disables Accelerate's debug mode for the whole process.
        """
        return collectives.debug_mode.enabled or self.world.debug_interval is not None

    @debug.setter
    def debug(self, value: bool) -> None:
        collectives.debug_mode.enabled = bool(value)

    def set_device(self) -> None:
        """Make `device` torch's current device, if it is a GPU."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    @staticmethod
    def _reset_state() -> None:
        """Reset the state that all instances share."""
        collectives.debug_mode.enabled = False
        PartialState._shared_state.clear()

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
    def from_accelerator(cls, accelerator: Prepared) -> AcceleratorState:
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
        known = self._mixed_precision or getattr(self._accelerator, "mixed_precision", None)
        return known or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")

    @property
    def is_fsdp2(self) -> bool:
        """True if the strategy shards the model."""
        return self._accelerator is not None and self._accelerator.strategy.sharded

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


class _PluginSettings(dict[str, Any]):
    """Settings of gradient accumulation. Setting an entry also changes the Accelerator, as programs do."""

    def __init__(self, accelerator: Prepared, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self._accelerator = accelerator

    def __setitem__(self, name: str, value: Any) -> None:
        accelerator, accumulation = self._accelerator, self._accelerator.accumulation
        plugin = replace(accelerator.gradient_accumulation_plugin, **{name: value})
        if accelerator.step_micro_batches is not None:
            check_tree_settings(plugin, accelerator.step_micro_batches)
        if name == "num_steps":
            accumulation.micro_batches = value
        accumulation.groups_end_with_loader = plugin.sync_with_dataloader
        accumulation.delays_sync = accelerator.strategy.delays_sync and not plugin.sync_each_batch
        accelerator.gradient_accumulation_plugin = plugin
        super().__setitem__(name, value)

    def update(self, *settings: Any, **named: Any) -> None:
        for name, value in dict(*settings, **named).items():
            self[name] = value


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
        self._accelerator: Prepared | None = None
        if gradient_accumulation_plugin is not None:
            GradientState._plugin = gradient_accumulation_plugin

    @classmethod
    def from_accelerator(cls, accelerator: Prepared) -> GradientState:
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

    def _resolve(self) -> Prepared | None:
        return self._accelerator or get_latest_accelerator()

    initialized = True
    """Always True, as in Accelerate once there is a state."""

    @property
    def sync_gradients(self) -> bool:
        """True if the current micro-batch is the last of its accumulation group."""
        accelerator = self._resolve()
        return self._sync_without_accelerator if accelerator is None else accelerator.accumulation.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        accelerator = self._resolve()
        if accelerator is None:
            GradientState._sync_without_accelerator = value
        else:
            accelerator.accumulation.sync_gradients = value
            accelerator.accumulation.synced_by_loop = True

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        self.sync_gradients = sync_gradients

    @property
    def num_steps(self) -> int:
        """Number of micro-batches per optimizer step."""
        accelerator = self._resolve()
        if accelerator is not None:
            return accelerator.accumulation.micro_batches
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
        """Fields of the plugin that are not at their default, and ``num_steps``. Setting an entry changes the run."""
        accelerator = self._resolve()
        plugin = self._plugin if accelerator is None else accelerator.gradient_accumulation_plugin
        settings = {**({} if plugin is None else plugin.to_kwargs()), "num_steps": self.num_steps}
        return settings if accelerator is None else _PluginSettings(accelerator, settings)

    @property
    def active_dataloader(self) -> Any:
        """Dataloader that yielded the current batch, or None."""
        accelerator = self._resolve()
        micro = None if accelerator is None else accelerator.cursor.micro
        if accelerator is None or micro is None:
            return get_running_loader()
        loaders: list[data.Loader] = accelerator.loaders
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
