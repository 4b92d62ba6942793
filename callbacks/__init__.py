"""Callbacks: objects whose hooks the Trainer calls during a stage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..common.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from ._averaging import averaged_weights
    from ._checkpointing import AgreedInterval, folders
    from ._summary import Summary, summarize
    from ._throughput import Throughput, get_available_flops, measure_flops
    from .batch_size_finder import BatchSizeFinder
    from .batch_size_scheduler import BatchSizeScheduler
    from .callback import HOOKS, Callback
    from .checkpoint import Checkpoint
    from .device_stats_monitor import DeviceStatsMonitor
    from .early_stopping import EarlyStopping
    from .finetuning import BackboneFinetuning, BaseFinetuning
    from .garbage_collection import GarbageCollection
    from .gradient_accumulation_scheduler import GradientAccumulationScheduler
    from .lambda_function import LambdaCallback
    from .lr_finder import LearningRateFinder, _LRFinder
    from .lr_monitor import LearningRateMonitor, read_learning_rates
    from .model_checkpoint import ModelCheckpoint
    from .model_summary import ModelSummary
    from .monitored_metric import (
        checks_at_epoch_end,
        explain_returned,
        is_better,
        make_never_logged_error,
        read_logged_metrics,
        read_monitored_metric,
        read_new_value,
        validates_at_epoch_ends,
    )
    from .nonfinite_detection import NonFiniteWatch
    from .on_exception_checkpoint import OnExceptionCheckpoint
    from .prediction_files import PredictionWriter, read_predictions
    from .prediction_writer import BasePredictionWriter
    from .progress.progress_bar import ProgressBar
    from .progress.rich_progress import RichProgressBar, RichProgressBarTheme
    from .progress.tqdm_progress import TQDMProgressBar
    from .pruning import ModelPruning
    from .reporting.report import RunReport
    from .rich_model_summary import RichModelSummary
    from .spike import SpikeWatch
    from .stochastic_weight_avg import StochasticWeightAveraging
    from .throughput_monitor import ThroughputMonitor
    from .timer import Timer
    from .weight_averaging import EMAWeightAveraging, WeightAveraging

__getattr__, __dir__, __all__ = lazy_exports(__name__)
