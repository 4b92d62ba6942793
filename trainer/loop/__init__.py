"""The Trainer's loops: setup and end of a stage, optimizer steps, and evaluation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from .automatic import Steps
    from .dataloaders import KIND_OF_STAGE, KINDS, LOADER_NAMES, Sources
    from .evaluation_loop import Evaluation, EvaluationLoop, check_step, predictions_in_order
    from .fit_loop import FitLoop
    from .fit_setup import Fit, configure, place_and_load, prepare_training, validate, wrap
    from .hook_table import Hooks, callback_overrides, count_positional, name_of, pass_by_keyword
    from .lr_schedulers import Schedules
    from .progress import Phase, Progress
    from .run_summary import announce_end, describe_results
    from .stage import Stage, Work

__getattr__, __dir__, __all__ = lazy_exports(__name__)
