"""Import paths that documents promise, or promised before the modules moved into their rooms."""

import importlib

import pytest

PATHS = {
    "treadle.callbacks": "Callback EarlyStopping ModelCheckpoint Timer WeightAveraging averaged_weights summarize",
    "treadle.cli": "run",
    "treadle.compat": "Callback LightningDataModule LightningModule Trainer callbacks loggers seed_everything "
    "utilities",
    "treadle.engine": "Accelerator CombinedLoader CheckpointStore Loader Metrics PartialState isolated_random_state",
    "treadle.engine.big_models": "dispatch_model infer_auto_device_map load_checkpoint_and_dispatch",
    "treadle.engine.checkpoint": "CheckpointStore read_part",
    "treadle.engine.profilers": "AdvancedProfiler Profiler PyTorchProfiler SimpleProfiler",
    "treadle.loggers": "CSVLogger Logger MLFlowLogger TensorBoardLogger WandbLogger",
    "treadle.loggers.csv_logs": "CSVLogger",
    "treadle.plugins": "Precision TorchSyncBatchNorm",
    "treadle.profilers": "AdvancedProfiler PassThroughProfiler Profiler PyTorchProfiler SimpleProfiler",
    "treadle.runs": "RunFolder",
    "treadle.strategies": "DDP DDPStrategy FSDP FSDPStrategy ModelParallelStrategy SingleDevice Strategy World",
    "treadle.strategies.ddp": "DDP DDPStrategy",
    "treadle.strategies.fsdp": "FSDP FSDPStrategy",
    "treadle.testing.faults": "Fault FaultPlan disk_points forked",
    "treadle.trainer": "DataModule Progress TaskModule Trainer",
    "treadle.trainer.runs.folder": "RunFolder",
    "treadle.tuner": "Tuner",
    "treadle.utils": "DistributedType GradientState PartialState gather set_seed synchronize_rng_states tqdm",
    "treadle.utilities": "AttributeDict CombinedLoader grad_norm rank_zero_only",
}


@pytest.mark.parametrize("module", PATHS)
def test_the_path_still_works(module):
    names = PATHS[module].split()
    home = importlib.import_module(module)
    assert [name for name in names if getattr(home, name, None) is None] == []
