"""Every public callback is found at the module path that Lightning 2.6 gives it."""

import importlib

import pytest
import treadle.callbacks

# Below `lightning.pytorch.callbacks`. `checkpoint.Checkpoint` and `spike.SpikeWatch` have other names here, see
# docs/migrating.md and docs/differences.
PATHS = {
    "batch_size_finder": ["BatchSizeFinder"],
    "callback": ["Callback"],
    "device_stats_monitor": ["DeviceStatsMonitor"],
    "early_stopping": ["EarlyStopping"],
    "finetuning": ["BaseFinetuning", "BackboneFinetuning"],
    "gradient_accumulation_scheduler": ["GradientAccumulationScheduler"],
    "lambda_function": ["LambdaCallback"],
    "lr_finder": ["LearningRateFinder"],
    "lr_monitor": ["LearningRateMonitor"],
    "model_checkpoint": ["ModelCheckpoint"],
    "model_summary": ["ModelSummary"],
    "on_exception_checkpoint": ["OnExceptionCheckpoint"],
    "prediction_writer": ["BasePredictionWriter"],
    "progress": ["ProgressBar", "RichProgressBar", "TQDMProgressBar"],
    "progress.progress_bar": ["ProgressBar"],
    "progress.rich_progress": ["RichProgressBar", "RichProgressBarTheme"],
    "progress.tqdm_progress": ["TQDMProgressBar"],
    "pruning": ["ModelPruning"],
    "rich_model_summary": ["RichModelSummary"],
    "stochastic_weight_avg": ["StochasticWeightAveraging"],
    "throughput_monitor": ["ThroughputMonitor"],
    "timer": ["Timer"],
    "weight_averaging": ["WeightAveraging", "EMAWeightAveraging"],
}


@pytest.mark.parametrize("path", PATHS)
def test_path_of(path):
    module = importlib.import_module(f"treadle.callbacks.{path}")
    for name in PATHS[path]:
        callback = getattr(module, name)
        assert callback is getattr(treadle.callbacks, name)
        assert callback.__module__.startswith(f"treadle.callbacks.{path}"), "another file defines it"
