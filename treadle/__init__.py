"""Treadle: a trainer framework for PyTorch. Exact training and resume, little overhead, crash-safe checkpoints.

Each name is imported when it is first used, so that no script waits for a part that it does not need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from . import (
        callbacks,
        cli,
        compat,
        engine,
        loggers,
        plugins,
        profilers,
        strategies,
        trainer,
        tuner,
        utilities,
        utils,
    )
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
    from .engine.foreign import load_weights
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
    from .trainer import DataModule, TaskModule, Trainer, TrainerSettings

__version__ = "0.1.0"

_ROOMS = (
    "callbacks",
    "cli",
    "compat",
    "engine",
    "loggers",
    "plugins",
    "profilers",
    "strategies",
    "trainer",
    "tuner",
    "utilities",
    "utils",
)
_NAMES = {
    "callbacks": ("Callback",),
    "engine": ("Accelerator", "LocalSGD", "PartialState", "find_executable_batch_size", "seed_everything"),
    "engine.big_models": (
        "cpu_offload",
        "cpu_offload_with_hook",
        "disk_offload",
        "dispatch_model",
        "infer_auto_device_map",
        "init_empty_weights",
        "init_on_device",
        "load_checkpoint_and_dispatch",
        "load_checkpoint_in_model",
    ),
    "engine.foreign": ("load_weights",),
    "engine.plugins": (
        "AutocastKwargs",
        "DataLoaderConfiguration",
        "DeepSpeedPlugin",
        "GradScalerKwargs",
        "InitProcessGroupKwargs",
        "ProfileKwargs",
    ),
    "engine.skip": ("skip_first_batches",),
    "strategies.launchers": ("debug_launcher", "notebook_launcher"),
    "strategies.plugins": (
        "DDPCommunicationHookType",
        "DistributedDataParallelKwargs",
        "FullyShardedDataParallelPlugin",
        "ParallelismConfig",
    ),
    "trainer": ("DataModule", "TaskModule", "Trainer", "TrainerSettings"),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}

__all__ = ["__version__", *_ROOMS, *_HOMES]

__getattr__, __dir__ = lazy_exports(__name__, _HOMES, __all__, _ROOMS)
