"""What happens around the loop. Each callback is imported when it is first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..common.lazy_exports import lazy_exports
from .callback import HOOKS, Callback

if TYPE_CHECKING:
    from .accumulation import GradientAccumulationScheduler
    from .averages import averaged_weights
    from .batch_size_finder import BatchSizeFinder
    from .device_stats import DeviceStatsMonitor
    from .early_stopping import EarlyStopping
    from .finetuning import BackboneFinetuning, BaseFinetuning
    from .garbage import GarbageCollection
    from .lambda_callback import LambdaCallback
    from .lr_finder import LearningRateFinder
    from .lr_monitor import LearningRateMonitor
    from .model_checkpoint import ModelCheckpoint
    from .model_summary import ModelSummary, RichModelSummary
    from .model_table import summarize
    from .nonfinite import NonFiniteWatch
    from .on_exception import OnExceptionCheckpoint
    from .peak_flops import get_available_flops
    from .prediction_writer import BasePredictionWriter
    from .progress_bar import ProgressBar
    from .pruning import ModelPruning
    from .rich_bar import RichProgressBar, RichProgressBarTheme
    from .run_report import RunReport
    from .spikes import SpikeWatch
    from .swa import StochasticWeightAveraging
    from .throughput import Throughput, measure_flops
    from .throughput_monitor import ThroughputMonitor
    from .timer import Timer
    from .tqdm_bar import TQDMProgressBar
    from .weight_averaging import EMAWeightAveraging, WeightAveraging

_HOMES = {
    "BackboneFinetuning": "finetuning",
    "BaseFinetuning": "finetuning",
    "BasePredictionWriter": "prediction_writer",
    "BatchSizeFinder": "batch_size_finder",
    "DeviceStatsMonitor": "device_stats",
    "EMAWeightAveraging": "weight_averaging",
    "EarlyStopping": "early_stopping",
    "GarbageCollection": "garbage",
    "GradientAccumulationScheduler": "accumulation",
    "LambdaCallback": "lambda_callback",
    "LearningRateFinder": "lr_finder",
    "LearningRateMonitor": "lr_monitor",
    "ModelCheckpoint": "model_checkpoint",
    "ModelPruning": "pruning",
    "ModelSummary": "model_summary",
    "NonFiniteWatch": "nonfinite",
    "OnExceptionCheckpoint": "on_exception",
    "ProgressBar": "progress_bar",
    "RichModelSummary": "model_summary",
    "RichProgressBar": "rich_bar",
    "RichProgressBarTheme": "rich_bar",
    "RunReport": "run_report",
    "SpikeWatch": "spikes",
    "StochasticWeightAveraging": "swa",
    "TQDMProgressBar": "tqdm_bar",
    "Throughput": "throughput",
    "ThroughputMonitor": "throughput_monitor",
    "Timer": "timer",
    "WeightAveraging": "weight_averaging",
    "averaged_weights": "averages",
    "get_available_flops": "peak_flops",
    "measure_flops": "throughput",
    "summarize": "model_table",
}

__all__ = [
    "BackboneFinetuning",
    "BaseFinetuning",
    "BasePredictionWriter",
    "BatchSizeFinder",
    "Callback",
    "DeviceStatsMonitor",
    "EMAWeightAveraging",
    "EarlyStopping",
    "GarbageCollection",
    "GradientAccumulationScheduler",
    "HOOKS",
    "LambdaCallback",
    "LearningRateFinder",
    "LearningRateMonitor",
    "ModelCheckpoint",
    "ModelPruning",
    "ModelSummary",
    "NonFiniteWatch",
    "OnExceptionCheckpoint",
    "ProgressBar",
    "RichModelSummary",
    "RichProgressBar",
    "RichProgressBarTheme",
    "RunReport",
    "SpikeWatch",
    "StochasticWeightAveraging",
    "TQDMProgressBar",
    "Throughput",
    "ThroughputMonitor",
    "Timer",
    "WeightAveraging",
    "averaged_weights",
    "get_available_flops",
    "measure_flops",
    "summarize",
]

__getattr__, __dir__ = lazy_exports(__name__, _HOMES, __all__)
