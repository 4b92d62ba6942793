"""The Accelerator and its machinery: data, optimizer steps, collectives, metrics, checkpoints, weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from . import collectives, rng
    from .accelerator import Accelerator
    from .checkpoint.store import CheckpointStore
    from .configuration import (
        AORecipeKwargs,
        AutocastKwargs,
        DataLoaderConfiguration,
        DeepSpeedPlugin,
        FP8RecipeKwargs,
        GradientAccumulationPlugin,
        GradScalerKwargs,
        InitProcessGroupKwargs,
        KwargsHandler,
        MegatronLMPlugin,
        MSAMPRecipeKwargs,
        ProfileKwargs,
        ProjectConfiguration,
        TERecipeKwargs,
        TorchDynamoPlugin,
        TorchTensorParallelPlugin,
    )
    from .data.combined_loader import CombinedLoader, JointLoader
    from .data.device_transfer import move_data_to_device
    from .data.loader import Loader
    from .metrics.logged_values import Entry, Metrics
    from .metrics.metric_state import uneven_counts
    from .modules import describe_compilations, evaluation_mode, list_compiled_names, list_unused, plain_calls
    from .nested import honor_type
    from .optim.batch_size import find_executable_batch_size
    from .optim.local_sgd import LocalSGD
    from .preemption.signals import Preempted, Preemption
    from .process_state import AcceleratorState, GradientState, PartialState
    from .rank_consistency import check_values_match
    from .rng import RandomStream, isolated_random_state, random_state, seed_everything, set_random_state
    from .run_environment import environment
    from .trackers import GeneralTracker

__getattr__, __dir__, __all__ = lazy_exports(__name__)
