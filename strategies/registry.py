"""Registry of strategies by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import torch

from ..common.messages import name_type
from ..common.validation import choose
from .ddp import DDP, make_ddp_factory
from .distributed import Devices, LaunchEnvironment, World, device_type, parse_devices, variables_set
from .strategy import SingleDevice, Strategy

if TYPE_CHECKING:
    from .launch import FunctionLaunch


def _make_fsdp(**options: Any) -> Strategy:
    from .fsdp import FSDP

    return FSDP(**options)


_FACTORIES: dict[str, Callable[[], Strategy]] = {
    "single": SingleDevice,
    "single_device": SingleDevice,
    "ddp": DDP,
    "ddp_find_unused_parameters_true": make_ddp_factory(True),
    "ddp_find_unused_parameters_false": make_ddp_factory(False),
    "fsdp": _make_fsdp,
    "fsdp_cpu_offload": partial(_make_fsdp, cpu_offload=True),
}
# Names of strategies whose processes run a function, and how multiprocessing starts them.
_START_METHODS = {"ddp_spawn": "spawn", "ddp_fork": "fork", "ddp_notebook": "fork"}
for _name in _START_METHODS:
    _FACTORIES |= {
        _name: DDP,
        f"{_name}_find_unused_parameters_true": make_ddp_factory(True),
        f"{_name}_find_unused_parameters_false": make_ddp_factory(False),
    }
_ENTRY_POINTS = "treadle.strategies"


def register_strategy(name: str, factory: Callable[[], Strategy]) -> None:
    """Register a strategy, so that ``strategy=name`` uses ``factory()``.

    A package can also register a strategy through an entry point in the group ``treadle.strategies``.

    Args:
        name: Value of ``strategy=`` that selects this strategy.
        factory: Function that returns a new strategy.

    Raises:
        ValueError: If the name is already registered.
    """
    if name in strategy_names():
        raise ValueError(f"a strategy named {name!r} is already registered. Choose another name.")
    _FACTORIES[name] = factory


def strategy_names() -> list[str]:
    """Return all names that ``strategy=`` accepts."""
    return ["auto", *_FACTORIES, *(entry.name for entry in entry_points(group=_ENTRY_POINTS))]


def resolve_devices(strategy: Any, accelerator: str, devices: Devices) -> tuple[str, Devices]:
    """Return the accelerator and devices of a run. A strategy that was created for a device determines both.

    Args:
        strategy: Name of a registered strategy, or a `Strategy`.
        accelerator: One of `ACCELERATORS`, such as ``"auto"`` or ``"cuda"``.
        devices: The devices in any form that the Trainer accepts.

    Raises:
        ValueError: If the strategy's device contradicts ``accelerator`` or ``devices``.
    """
    wanted = getattr(strategy, "requested_accelerator", None)
    if wanted is not None and accelerator not in ("auto", wanted):
        raise ValueError(
            f"strategy={type(strategy).__name__}(accelerator={wanted!r}) contradicts accelerator={accelerator!r}. "
            "Remove one of the two."
        )
    accelerator = wanted or accelerator
    device = getattr(strategy, "requested_device", None)
    if device is None:
        return accelerator, devices
    if accelerator not in ("auto", device.type) and (accelerator, device.type) != ("gpu", "cuda"):
        kind = "cuda" if accelerator == "gpu" else accelerator
        raise ValueError(
            f"strategy={type(strategy).__name__}({str(device)!r}) contradicts accelerator={accelerator!r}. Remove "
            f"accelerator, or create the strategy with a {kind} device."
        )
    chosen = [0 if device.index is None else device.index] if device.type == "cuda" else 1
    if devices not in ("auto", 1, "1", -1, "-1", chosen):
        raise ValueError(
            f"strategy={type(strategy).__name__}({str(device)!r}) contradicts devices={devices!r}, because the "
            f"strategy uses only the device {str(device)!r}. Remove devices."
        )
    return device.type, chosen


def plan_function_launch(
    strategy: Any, accelerator: str = "auto", devices: Devices = "auto", num_nodes: int = 1
) -> FunctionLaunch | None:
    """Return how processes that run a function are started; None if the run needs none.

    It needs none if the strategy does not ask for them, if there is only one device, or in a process that a
    launcher has started.

    Args:
        strategy: Name of a registered strategy, or a `Strategy`.
        accelerator: One of `ACCELERATORS`, such as ``"auto"`` or ``"cuda"``.
        devices: The devices in any form that the Trainer accepts.
        num_nodes: Number of machines.
    """
    if isinstance(strategy, str):
        name = strategy
        method = _START_METHODS.get(name.partition("_find_unused_parameters_")[0]) if name in _FACTORIES else None
    else:
        method = getattr(strategy, "start_method", None)
        name = f"ddp_{method}"
    if method is None or num_nodes != 1 or LaunchEnvironment.read() is not None:
        return None
    from .launch import FunctionLaunch

    with variables_set({"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}):  # without opening the driver, for a fork
        kind = device_type(accelerator)
        indices = parse_devices(kind, devices)
        count = len(indices) if indices is not None else torch.cuda.device_count() if kind == "cuda" else 1
    return FunctionLaunch(name, count, method) if count > 1 else None


def resolve_strategy(strategy: str | Strategy, world: World) -> Strategy:
    """Return the strategy with the given name. ``"auto"`` selects `SingleDevice` for one process, otherwise `DDP`.

    Args:
        strategy: A name, or a `Strategy`, which is returned unchanged.
        world: Processes of the run.

    Raises:
        ValueError: If the name is unknown.
        TypeError: If the value is neither a name nor a strategy.
    """
    if isinstance(strategy, Strategy):
        return strategy
    if not isinstance(strategy, str):
        raise TypeError(f"strategy={strategy!r} must be a name or a Strategy, not {name_type(strategy)}.")
    if strategy == "auto":
        return DDP() if world.size > 1 else SingleDevice()
    if strategy in _FACTORIES:
        return _FACTORIES[strategy]()
    choose("strategy", strategy, strategy_names())
    (entry,) = entry_points(group=_ENTRY_POINTS, name=strategy)
    return entry.load()()
