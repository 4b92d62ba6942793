"""How a model lies on the world: processes, devices, number formats."""

from ..common.messages import announce, logger, nearest, warn
from ..common.validation import choose
from .ddp import DDP
from .ddp_batchnorm import TorchSyncBatchNorm
from .debug import DistributedOperationException
from .environment import LaunchEnvironment
from .fsdp import FSDP
from .precision import Precision
from .registry import register_strategy, resolve_strategy, strategy_names
from .strategy import SingleDevice, Strategy
from .tracebacks import report_uncaught
from .world import World

DDPStrategy = DDP
FSDPStrategy = ModelParallelStrategy = FSDP
SingleDeviceStrategy = SingleDevice

__all__ = [
    "DDP",
    "DDPStrategy",
    "FSDP",
    "FSDPStrategy",
    "DistributedOperationException",
    "LaunchEnvironment",
    "ModelParallelStrategy",
    "Precision",
    "SingleDevice",
    "SingleDeviceStrategy",
    "Strategy",
    "TorchSyncBatchNorm",
    "World",
    "announce",
    "choose",
    "logger",
    "nearest",
    "register_strategy",
    "report_uncaught",
    "resolve_strategy",
    "strategy_names",
    "warn",
]
