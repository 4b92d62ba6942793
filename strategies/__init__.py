"""How a model lies on the world: processes, devices, number formats."""

from .ddp import DDP
from .environment import LaunchEnvironment
from .messages import announce, choose, logger, nearest, warn
from .precision import Precision
from .registry import register_strategy, resolve_strategy, strategy_names
from .strategy import SingleDevice, Strategy
from .world import World

DDPStrategy = DDP
SingleDeviceStrategy = SingleDevice

__all__ = [
    "DDP",
    "DDPStrategy",
    "LaunchEnvironment",
    "Precision",
    "SingleDevice",
    "SingleDeviceStrategy",
    "Strategy",
    "World",
    "announce",
    "choose",
    "logger",
    "nearest",
    "register_strategy",
    "resolve_strategy",
    "strategy_names",
    "warn",
]
