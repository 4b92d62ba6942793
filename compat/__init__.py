"""Names of other libraries: ``import treadle.compat as pl`` replaces ``import lightning.pytorch as pl``.

``treadle.compat`` also has the names of Accelerate's root module that Treadle supports, so ``import treadle.compat as
accelerate`` works like ``import treadle as accelerate``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..common import rank_zero as _  # programs call functions of lightning_utilities, which need a rank
from ..common.lazy_exports import lazy_exports
from ..common.peer_finder import add_peer_modules

if TYPE_CHECKING:
    from .. import (
        Accelerator,
        AutocastKwargs,
        DataLoaderConfiguration,
        DDPCommunicationHookType,
        DeepSpeedPlugin,
        DistributedDataParallelKwargs,
        FullyShardedDataParallelPlugin,
        GradScalerKwargs,
        InitProcessGroupKwargs,
        ParallelismConfig,
        PartialState,
        ProfileKwargs,
        cpu_offload,
        cpu_offload_with_hook,
        debug_launcher,
        disk_offload,
        dispatch_model,
        find_executable_batch_size,
        infer_auto_device_map,
        init_empty_weights,
        init_on_device,
        load_checkpoint_and_dispatch,
        load_checkpoint_in_model,
        notebook_launcher,
        skip_first_batches,
    )
    from ..callbacks import Callback
    from ..cli import ArgsType, LightningArgumentParser, LightningCLI, SaveConfigCallback
    from ..common import __version__
    from ..engine import seed_everything
    from ..trainer import DataModule, TaskModule, Trainer
    from ..trainer import DataModule as LightningDataModule
    from ..trainer import TaskModule as LightningModule

__path__ = add_peer_modules(__name__, __path__)
__getattr__, __dir__, __all__ = lazy_exports(__name__)
