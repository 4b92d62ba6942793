"""Base classes for users: the task, its data, their hooks and hyperparameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .cli_hparams import CLASS_PATH, INSTANTIATOR, giving_settings, instantiate_module
    from .configure_optimizers import SchedulerConfig, check_disjoint, check_ownership, endless, parse_optimizers
    from .datamodule import DataHooks, DataModule
    from .gradient_clipping import check_clip_algorithm, check_limits
    from .hooked_weights import HookDict, HookedWeights
    from .hooks import TaskHooks
    from .hparams import AttributeDict
    from .loading import (
        add_objects,
        load_checkpoint,
        read_datamodule_hparams,
        read_hook_entries,
        read_hyperparameters,
        read_weights,
        remember,
        replace_lost,
        warn_of_code,
    )
    from .signatures import REQUIRED, Argument, Signature, described, read_flags, signature
    from .task import TaskModule, has_own, log_to, overrides, task_modules

__getattr__, __dir__, __all__ = lazy_exports(__name__)
