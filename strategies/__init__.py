"""Strategies (a model on one device, or replicas or shards of it on several devices), launchers and precision."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .accelerate_plugins import (
        DDPCommunicationHookType,
        DistributedDataParallelKwargs,
        FullyShardedDataParallelPlugin,
        ParallelismConfig,
        ReplicaKwargs,
        choose_strategy,
    )
    from .ddp.batch_norm import TorchSyncBatchNorm
    from .ddp.ddp import DDP
    from .ddp.ddp import DDP as DDPStrategy
    from .distributed.fixed_tree import FixedTree, PartialSums
    from .distributed.launch_environment import LaunchEnvironment
    from .distributed.open_world import open_world
    from .distributed.tracebacks import report_uncaught
    from .distributed.waiting_call import DistributedOperationException
    from .distributed.world import World
    from .forward_router import BALLOT_SIZE, ballot_dtype
    from .fsdp.fsdp import FSDP
    from .fsdp.lightning_strategy import FSDPStrategy
    from .fsdp.lightning_strategy import FSDPStrategy as ModelParallelStrategy
    from .fsdp.recompute import Recompute
    from .launch.cluster_environment import ClusterEnvironment
    from .model_init import built_in_place
    from .nested_data import apply_nested, iter_tensors
    from .precision import Precision, cast_floating
    from .registry import (
        plan_function_launch,
        register_strategy,
        resolve_devices,
        resolve_strategy,
        strategy_names,
    )
    from .strategy import SingleDevice, Strategy, is_wrapped_by_user
    from .strategy import SingleDevice as SingleDeviceStrategy
    from .wrap_policy import describe_kind, repeated_blocks

__getattr__, __dir__, __all__ = lazy_exports(__name__)
