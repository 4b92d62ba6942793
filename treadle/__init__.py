"""Treadle: a training framework for PyTorch.

Each object is imported when its name is first used, so that unused modules add no import time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .common import __version__
from .common.lazy_exports import lazy_exports
from .common.peer_finder import add_peer_modules

if TYPE_CHECKING:
    from . import (
        callbacks,
        cli,
        compat,
        data,
        engine,
        integrations,
        loggers,
        optim,
        plugins,
        profilers,
        runs,
        strategies,
        trainer,
        tuner,
        utilities,
        utils,
    )
    from .callbacks import Callback, read_predictions
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
    from .engine.configuration import (
        AutocastKwargs,
        DataLoaderConfiguration,
        DeepSpeedPlugin,
        GradScalerKwargs,
        InitProcessGroupKwargs,
        ProfileKwargs,
    )
    from .engine.data import skip_first_batches
    from .engine.optim import chunked_cross_entropy
    from .engine.weights import load_weights
    from .strategies import (
        DDPCommunicationHookType,
        DistributedDataParallelKwargs,
        FullyShardedDataParallelPlugin,
        ParallelismConfig,
    )
    from .strategies.launch import debug_launcher, notebook_launcher
    from .trainer import DataModule, TaskModule, Trainer, load_checkpoint

__path__ = add_peer_modules(__name__, __path__)
__getattr__, __dir__, _names = lazy_exports(__name__)
__all__ = ["__version__", *_names]
