"""Treadle: a trainer framework for PyTorch. Exact, nearly free, unbreakable."""

from . import callbacks, loggers, strategies
from .callbacks import Callback
from .engine import Accelerator, LocalSGD, PartialState, find_executable_batch_size, seed_everything
from .engine.big_models import (
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    infer_auto_device_map,
    init_empty_weights,
    init_on_device,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)
from .engine.plugins import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DeepSpeedPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
)
from .engine.skip import skip_first_batches
from .strategies.launchers import debug_launcher, notebook_launcher
from .strategies.plugins import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
)
from .trainer import DataModule, TaskModule, Trainer

__version__ = "0.1.0"

__all__ = [
    "Accelerator",
    "AutocastKwargs",
    "Callback",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DataModule",
    "DeepSpeedPlugin",
    "DistributedDataParallelKwargs",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "InitProcessGroupKwargs",
    "LocalSGD",
    "ParallelismConfig",
    "PartialState",
    "ProfileKwargs",
    "TaskModule",
    "Trainer",
    "__version__",
    "callbacks",
    "cpu_offload",
    "cpu_offload_with_hook",
    "debug_launcher",
    "disk_offload",
    "dispatch_model",
    "find_executable_batch_size",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
    "loggers",
    "notebook_launcher",
    "seed_everything",
    "skip_first_batches",
    "strategies",
]
