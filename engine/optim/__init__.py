"""Optimizer steps: accumulation, scaling and checks of gradients, and wrappers of optimizers and schedulers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from . import nonfinite, optimizer_state, replica_check, resume_options
    from .accumulation import Accumulation, PreparedOptimizer, can_skip_on_device
    from .agreement import Agreement
    from .batch_size import attempt, find_executable_batch_size, is_out_of_memory
    from .chunked_loss import chunked_cross_entropy
    from .forgotten_objects import LoopCheck
    from .join import join_uneven_inputs
    from .loss_scaling import LossScale
    from .lr_schedules import lr_schedule
    from .muon import muon_with_adamw
    from .nonfinite import GradientGuard
    from .optimizer_state import BuiltSchedule, list_parameters
    from .prepared_scheduler import PreparedScheduler, storable_state
    from .resume_options import SCHEDULES, LoadedOptimizer, SavedSchedule, check_schedule

__getattr__, __dir__, __all__ = lazy_exports(__name__)
