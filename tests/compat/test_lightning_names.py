"""What stands behind Lightning's names does what Lightning's does; expected values are those of lightning 2.6.6."""

from __future__ import annotations

import inspect

import pytest
import torch
from support.processes import run
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from treadle.callbacks import EarlyStopping, Timer
from treadle.callbacks.early_stopping import EarlyStoppingReason
from treadle.callbacks.prediction_writer import WriteInterval
from treadle.callbacks.timer import Interval
from treadle.compat.accelerators import Accelerator, CPUAccelerator, CUDAAccelerator, find_usable_cuda_devices
from treadle.compat.callbacks import Checkpoint
from treadle.compat.core import saving
from treadle.compat.core.hooks import DataHooks, ModelHooks
from treadle.compat.core.optimizer import LightningOptimizer
from treadle.compat.demos.boring_classes import (
    BoringDataModule,
    BoringDataModuleNoLen,
    BoringModel,
    DemoModel,
    IterableBoringDataModule,
    ManualOptimBoringModel,
    RandomDataset,
)
from treadle.compat.demos.transformer import Transformer, WikiText2
from treadle.compat.loggers.csv_logs import ExperimentWriter
from treadle.compat.loggers.logger import DummyExperiment, DummyLogger, merge_dicts
from treadle.compat.overrides.distributed import UnrepeatedDistributedSampler
from treadle.compat.plugins import AsyncCheckpointIO, DoublePrecision, HalfPrecision, MixedPrecision, TorchCheckpointIO
from treadle.compat.plugins.layer_sync import LayerSync, TorchSyncBatchNorm
from treadle.compat.strategies import ParallelStrategy
from treadle.compat.trainer.connectors.accelerator_connector import _AcceleratorConnector
from treadle.compat.utilities.compile import from_compiled, to_uncompiled
from treadle.compat.utilities.data import extract_batch_size, has_len_all_ranks
from treadle.compat.utilities.enums import GradClipAlgorithmType
from treadle.compat.utilities.model_helpers import is_overridden
from treadle.compat.utilities.signature_utils import is_param_in_hook_signature
from treadle.strategies import DDP, SingleDevice
from treadle.trainer.states import RunningStage, TrainerFn, TrainerState, TrainerStatus

import treadle
from treadle import LightningDataModule, LightningModule, Trainer
from treadle.utilities import memory, parsing
from treadle.utilities.model_summary import LayerSummary, get_human_readable_count
from treadle.utilities.model_summary import summarize as summarize_layers

QUIET = {
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "logger": False,
    "accelerator": "cpu",
}


def test_roots() -> None:
    assert (LightningModule, LightningDataModule) == (treadle.TaskModule, treadle.DataModule)
    assert isinstance(BoringModel(), ModelHooks)
    assert isinstance(BoringModel(), DataHooks)


# -- devices and strategies ------------------------------------------------------------------------------------------


def test_kinds_of_devices_as_objects() -> None:
    trainer = Trainer(**QUIET | {"accelerator": CPUAccelerator()}, devices=1)
    assert trainer.accelerator.device.type == "cpu"
    assert isinstance(trainer.accelerator, CPUAccelerator)
    assert isinstance(trainer.accelerator, Accelerator)
    assert not isinstance(trainer.accelerator, CUDAAccelerator)
    assert (CPUAccelerator.name(), CPUAccelerator.is_available(), CPUAccelerator.auto_device_count()) == (
        "cpu",
        True,
        1,
    )
    assert CPUAccelerator.parse_devices(2) == 2
    assert CPUAccelerator.get_parallel_devices(2) == [torch.device("cpu")] * 2
    assert CPUAccelerator.get_parallel_devices("3") == [torch.device("cpu")] * 3
    assert "cpu_percent" in CPUAccelerator().get_device_stats("cpu")
    with pytest.raises(ValueError, match="device='cuda:0' must be of type 'cpu' for CPUAccelerator"):
        CPUAccelerator().setup_device(torch.device("cuda", 0))
    assert find_usable_cuda_devices(0) == []
    with pytest.raises(ValueError, match="num_devices=99"):
        find_usable_cuda_devices(99)


def test_devices_are_parsed_without_a_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(**arguments: object) -> tuple[object, object, list[str]]:
        found = _AcceleratorConnector(**arguments)
        assert found.accelerator == found._accelerator_flag
        return found._accelerator_flag, found._devices_flag, [str(device) for device in found._parallel_devices]

    assert parse(accelerator="cpu", devices="auto") == ("cpu", 1, ["cpu"])
    assert parse(accelerator=CPUAccelerator(), devices=2) == ("cpu", 2, ["cpu", "cpu"])
    assert parse(accelerator="cpu", devices="3") == ("cpu", 3, ["cpu"] * 3)
    with pytest.raises(ValueError, match="accelerator='cup' is not one of"):
        parse(accelerator="cup")
    with pytest.raises(ValueError, match="devices=0 must be"):
        parse(accelerator="cpu", devices=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert parse(devices=-1) == ("cuda", [0, 1, 2, 3], ["cuda:0", "cuda:1", "cuda:2", "cuda:3"])
    assert parse(accelerator="gpu", devices=[1, 3]) == ("cuda", [1, 3], ["cuda:1", "cuda:3"])
    assert parse(accelerator="gpu", devices="2,") == ("cuda", [2], ["cuda:2"])
    # "auto" is what the Trainer would use: all devices only where further processes can be started
    for has_script, expected in ((True, [0, 1, 2, 3]), (False, [0])):
        monkeypatch.setattr("treadle.strategies.launch.supervisor.has_script", lambda found=has_script: found)
        assert parse()[1] == expected


def test_parallel_strategies() -> None:
    assert isinstance(DDP(), ParallelStrategy)
    assert not isinstance(SingleDevice(), ParallelStrategy)
    assert not isinstance(Trainer(**QUIET, devices=1).strategy, ParallelStrategy)


@pytest.mark.parametrize(
    ("plugin", "precision", "dtype"),
    [
        (MixedPrecision("bf16-mixed", "cpu"), "bf16-mixed", torch.float32),
        (HalfPrecision("bf16-true"), "bf16-true", torch.bfloat16),
        (DoublePrecision(), "64-true", torch.float64),
    ],
    ids=["mixed", "half", "double"],
)
@pytest.mark.parametrize("as_list", [True, False])
def test_precisions_as_plugins(plugin, precision, dtype, as_list) -> None:
    task = BoringModel()
    trainer = Trainer(**QUIET, plugins=[plugin] if as_list else plugin, fast_dev_run=1)
    trainer.fit(task)
    assert (trainer.precision, task.layer.weight.dtype, plugin.precision) == (precision, dtype, precision)


def test_plugins_that_are_refused() -> None:
    with pytest.raises(ValueError, match="precision='16-true' is not one of 16-mixed, bf16-mixed"):
        MixedPrecision("16-true", "cuda")
    with pytest.raises(ValueError, match="a run creates its own gradient scaler"):
        MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match="both set the precision"):
        Trainer(**QUIET, precision="64-true", plugins=DoublePrecision())
    with pytest.raises(
        TypeError, match=r"must be a treadle\.plugins\.Precision, TorchSyncBatchNorm\(\) or CheckpointIO"
    ):
        Trainer(**QUIET, plugins=object())
    assert isinstance(TorchSyncBatchNorm(), LayerSync)


@pytest.mark.parametrize("io", [TorchCheckpointIO(), AsyncCheckpointIO()], ids=["torch", "async"])
def test_checkpoint_files(io, tmp_path) -> None:
    path, weight = tmp_path / "deep" / "x.ckpt", torch.ones(2)
    io.save_checkpoint({"weight": weight, "epoch": 3}, path)
    weight.zero_()
    io.teardown()
    loaded = io.load_checkpoint(path)
    assert loaded["epoch"] == 3
    if isinstance(io, AsyncCheckpointIO):
        assert loaded["weight"].tolist() == [1.0, 1.0]
    io.remove_checkpoint(path)
    assert not path.exists()
    with pytest.raises(FileNotFoundError):
        io.load_checkpoint(path)


def test_a_failed_write_beside_the_training_raises(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    io = AsyncCheckpointIO()
    io.save_checkpoint({}, tmp_path / "file" / "x.ckpt")
    with pytest.raises(OSError, match="file"):
        io.teardown()


# -- what a Trainer is doing -----------------------------------------------------------------------------------------


class Watching(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[TrainerState] = []

    def training_step(self, batch, batch_idx):
        self.seen.append(self.trainer.state)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.seen.append(self.trainer.state)

    def test_step(self, batch, batch_idx):
        raise RuntimeError("no")


def test_states() -> None:
    task, trainer = Watching(), Trainer(**QUIET, max_epochs=1, limit_train_batches=1, limit_val_batches=1)
    assert trainer.state == TrainerState(TrainerStatus.INITIALIZING, None, None)
    trainer.fit(task)
    stages = [RunningStage.SANITY_CHECKING, RunningStage.TRAINING, RunningStage.VALIDATING]
    assert task.seen == [TrainerState(TrainerStatus.RUNNING, TrainerFn.FITTING, stage) for stage in stages]
    assert [state.stage.evaluating for state in task.seen] == [True, False, True]
    assert (trainer.state.fn, trainer.state.stage, trainer.state.finished) == ("fit", None, True)
    with pytest.raises(RuntimeError):
        trainer.test(task)
    assert trainer.state == TrainerState(TrainerStatus.INTERRUPTED, TrainerFn.TESTING, None)
    assert (trainer.state.stopped, trainer.state.finished) == (True, False)
    assert RunningStage.SANITY_CHECKING.dataloader_prefix == "val"
    assert {TrainerFn.FITTING: 1}["fit"] == 1


# -- callbacks -------------------------------------------------------------------------------------------------------


def test_why_a_run_was_stopped() -> None:
    class Task(BoringModel):
        def validation_step(self, batch, batch_idx):
            self.log("x", 1.0)

    for options, reason in (
        ({"patience": 1}, EarlyStoppingReason.PATIENCE_EXHAUSTED),
        ({"stopping_threshold": 2.0}, EarlyStoppingReason.STOPPING_THRESHOLD),
        ({"divergence_threshold": 0.5}, EarlyStoppingReason.DIVERGENCE_THRESHOLD),
        ({"patience": 9}, EarlyStoppingReason.NOT_STOPPED),
    ):
        stopping = EarlyStopping("x", **options)
        Trainer(
            **QUIET,
            max_epochs=2,
            limit_train_batches=1,
            limit_val_batches=1,
            num_sanity_val_steps=0,
            callbacks=stopping,
        ).fit(Task())
        assert stopping.stopping_reason is reason
        again = EarlyStopping("x")
        again.load_state_dict(stopping.state_dict())
        assert again.stopping_reason is reason


def test_words_of_intervals() -> None:
    assert (Interval.epoch, WriteInterval.BATCH_AND_EPOCH) == ("epoch", "batch_and_epoch")
    assert (WriteInterval("epoch").on_batch, WriteInterval("epoch").on_epoch) == (False, True)
    assert Timer(duration="00:00:01:00", interval=Interval.epoch).interval == "epoch"


def test_a_checkpoint_callback_takes_the_place_of_the_default_one() -> None:
    class Mine(Checkpoint):
        pass

    trainer = Trainer(callbacks=Mine(), logger=False, accelerator="cpu", enable_progress_bar=False)
    assert [type(c) for c in trainer.callbacks if isinstance(c, Checkpoint)] == [Mine]


# -- demos -----------------------------------------------------------------------------------------------------------


def test_the_boring_model_trains_as_in_lightning(tmp_path) -> None:
    treadle.seed_everything(1)
    model = BoringModel()
    trainer = Trainer(**QUIET, max_epochs=1, limit_train_batches=4, limit_val_batches=1, num_sanity_val_steps=0)
    trainer.fit(model, DataLoader(RandomDataset(32, 8)), DataLoader(RandomDataset(32, 8)))
    assert model.layer.weight.sum().item() == pytest.approx(0.7426187992095947, rel=1e-5)


@pytest.mark.parametrize("data", [BoringDataModule, BoringDataModuleNoLen, None])
@pytest.mark.parametrize("model", [BoringModel, ManualOptimBoringModel])
def test_boring_classes_run(model, data) -> None:
    trainer = Trainer(**QUIET, fast_dev_run=2)
    trainer.fit(model(), datamodule=None if data is None else data())
    assert trainer.global_step == 2


def test_the_other_demos() -> None:
    data = IterableBoringDataModule()
    data.setup("fit")
    assert [len(next(iter(loader))[0]) for loader in data.val_dataloader()] == [4, 4]
    assert DemoModel()(torch.ones(2, 32)).shape == (2, 10)


def test_the_transformer_of_the_demos_has_lightnings_numbers(tmp_path) -> None:
    torch.manual_seed(0)
    transformer = Transformer(10, ninp=8, nhead=2, nhid=8, dropout=0.0)
    words = torch.arange(8).view(2, 4)
    assert transformer(words, words).sum().item() == pytest.approx(-196.79595947265625, rel=1e-5)
    (tmp_path / "wikitext-2.txt").write_text("a b\nb c\n")
    text = WikiText2(tmp_path, block_size=2, download=False)
    # a b <eos> b c <eos>
    assert (text.vocab_size, len(text)) == (4, 2)
    assert [part.tolist() for part in text[1]] == [[2, 1], [1, 3]]


# -- optimizers, samplers --------------------------------------------------------------------------------------------


def test_the_optimizer_of_a_step_is_a_lightning_optimizer() -> None:
    class Task(ManualOptimBoringModel):
        def training_step(self, batch, batch_idx):
            assert isinstance(self.optimizers(), LightningOptimizer)
            assert type(self.optimizers().optimizer) is torch.optim.SGD
            return super().training_step(batch, batch_idx)

    Trainer(**QUIET, fast_dev_run=1).fit(Task())


def test_samplers_that_repeat_nothing() -> None:
    shares = [list(UnrepeatedDistributedSampler(range(5), num_replicas=2, rank=r, shuffle=False)) for r in (0, 1)]
    assert shares == [[0, 2, 4], [1, 3]]
    shuffled = UnrepeatedDistributedSampler(range(5), num_replicas=2, rank=0)
    assert list(shuffled) == torch.randperm(5, generator=torch.Generator().manual_seed(0)).tolist()[::2]


# -- loggers and files -----------------------------------------------------------------------------------------------


def test_merged_dicts() -> None:
    first = {"a": 1.7, "b": 2.0, "c": 1, "d": {"d1": 1, "d3": 3}}
    second = {"a": 1.1, "b": 2.2, "v": 1, "d": {"d1": 2, "d2": 3}}
    third = {"a": 1.1, "v": 2.3, "d": {"d3": 3, "d4": {"d5": 1}}}
    merged = merge_dicts([first, second, third], {"a": lambda v: sum(v) / 3, "v": max, "d": {"d1": sum}}, min)
    assert merged == {
        "a": pytest.approx(1.3), "b": 2.0, "c": 1, "d": {"d1": 3, "d2": 3, "d3": 3, "d4": {"d5": 1}}, "v": 2.3,
    }  # fmt: skip


def test_a_logger_that_keeps_nothing_takes_every_call() -> None:
    logger = DummyLogger()
    logger.log_metrics({"a": 1})
    logger.log_metrics("1", 2, three="three")
    logger.log_hyperparams("1", 2, three="three")
    assert isinstance(logger.experiment, DummyExperiment)
    logger.experiment.add_image("x", 1)
    logger.log_image("x", [1])
    assert logger[0] is logger
    trainer = Trainer(accelerator="cpu", fast_dev_run=1, enable_progress_bar=False)
    assert isinstance(trainer.logger, DummyLogger)


def test_files_of_hyperparameters(tmp_path) -> None:
    values = {"batch_size": 32, "rate": 0.1, "root": "./x", "deep": {"a": [1, 2]}}
    saving.save_hparams_to_yaml(tmp_path / "h.yaml", values)
    assert saving.load_hparams_from_yaml(tmp_path / "h.yaml") == values
    assert type(saving.load_hparams_from_yaml(tmp_path / "h.yaml", use_omegaconf=False)) is dict
    saving.save_hparams_to_tags_csv(tmp_path / "h.csv", values)
    assert saving.load_hparams_from_tags_csv(tmp_path / "h.csv") == values
    assert saving.convert("x y") == "x y"
    saving.update_hparams(values, {"deep": {"b": 3}, "new": 1})
    assert values["deep"] == {"a": [1, 2], "b": 3}
    with pytest.raises(RuntimeError, match="does not exist"):
        saving.save_hparams_to_yaml(tmp_path / "no" / "h.yaml", values)
    writer = ExperimentWriter(str(tmp_path / "run"))
    writer.log_hparams({"a": 1})
    writer.log_metrics({"loss": torch.tensor(0.5)})
    writer.log_metrics({"loss": 0.25}, step=7)
    assert [row["step"] for row in writer.metrics] == [0, 7]
    writer.save()
    assert (tmp_path / "run" / "metrics.csv").read_text() == "step,loss\n0,0.5\n7,0.25\n"
    assert (tmp_path / "run" / "hparams.yaml").read_text() == "a: 1\n"


# -- utilities -------------------------------------------------------------------------------------------------------


def test_sizes_of_batches() -> None:
    assert extract_batch_size({"a": [torch.ones(3, 2)]}) == 3
    assert extract_batch_size(torch.ones(())) == 1
    with pytest.warns(UserWarning, match="differ in length"):
        assert extract_batch_size([torch.ones(2), torch.ones(3)]) == 2
    with pytest.raises(ValueError, match="contains no tensors"):
        extract_batch_size("abc")


class Stream(IterableDataset):
    def __iter__(self):
        return iter([1])


def lengths() -> bool:
    strategy = Trainer(**QUIET, devices=2).strategy
    assert not has_len_all_ranks(DataLoader(Stream()), strategy)
    assert has_len_all_ranks([], strategy)  # which warns
    if strategy.world.rank:
        with pytest.raises(RuntimeError, match="no batches on rank 1"):
            has_len_all_ranks([], strategy)
        return False
    return has_len_all_ranks([1], strategy)


def test_lengths_of_all_ranks() -> None:
    assert run(lengths, 2) == [True, False]


def test_questions_to_classes() -> None:
    assert is_overridden("training_step", BoringModel())
    assert not is_overridden("on_fit_start", BoringModel())
    assert not is_overridden("setup", None)
    with pytest.raises(ValueError, match="is_overridden got an object"):
        is_overridden("setup", object())
    assert is_param_in_hook_signature(BoringModel().training_step, "batch")
    assert not is_param_in_hook_signature(BoringModel().training_step, "dataloader_idx")
    assert is_param_in_hook_signature(BoringModel().training_step, "other", min_args=2)
    assert GradClipAlgorithmType.supported_types() == ["value", "norm"]
    assert Trainer(**QUIET, gradient_clip_algorithm=GradClipAlgorithmType.NORM).gradient_clip_algorithm == "norm"


def test_arguments_of_init() -> None:
    class Base(LightningModule):
        def __init__(self, a, *args, b=2, **kwargs):
            super().__init__()
            self.own = parsing.get_init_args(inspect.currentframe())
            parsing.save_hyperparameters(self, ignore="b", frame=inspect.currentframe())

    class Child(Base):
        def __init__(self, c, **kwargs):
            super().__init__(1, x=3)

    child = Child(5, d=6)
    assert child.own == {"a": 1, "b": 2, "x": 3}
    assert dict(child.hparams) == {"a": 1, "x": 3, "c": 5, "d": 6}
    child.rate = 0.1
    assert (parsing.lightning_getattr(child, "rate"), parsing.lightning_getattr(child, "x")) == (0.1, 3)
    parsing.lightning_setattr(child, "x", 4)
    assert child.hparams.x == 4
    assert not parsing.lightning_hasattr(child, "nothing")
    with pytest.raises(AttributeError, match=r"neither the task .* has an attribute or a hyperparameter 'nothing'"):
        parsing.lightning_setattr(child, "nothing", 1)


def test_compiled_tasks() -> None:
    task = BoringModel()
    compiled = torch.compile(task, backend="eager")
    assert from_compiled(compiled) is task
    assert to_uncompiled(task) is task
    with pytest.raises(ValueError, match="not compiled"):
        to_uncompiled(task)
    with pytest.raises(ValueError, match="the result of torch\\.compile"):
        from_compiled(nn.Linear(1, 1))


def test_the_layers_of_a_summary_by_name() -> None:
    task = BoringModel()
    task.example_input_array = torch.ones(4, 32)
    (name, row), *others = summarize_layers(task)._layer_summary.items()
    assert not others
    assert (name, row.layer_type, row.num_parameters, row.training) == ("layer", "Linear", 66, True)
    assert (row.in_size, row.out_size) == ([4, 32], [4, 2])


def test_numbers_of_a_summary() -> None:
    layer = nn.Conv2d(3, 8, 3)
    summary = LayerSummary(layer)
    layer(torch.ones(1, 3, 5, 5))
    assert (summary.layer_type, summary.num_parameters) == ("Conv2d", 224)
    assert (summary.in_size, summary.out_size) == ([1, 3, 5, 5], [1, 8, 3, 3])
    assert not layer._forward_hooks
    counts = [get_human_readable_count(n) for n in (0, 123, 1234, 999999, 2e6, 99950000, 3e9, 4e14, 5e15)]
    assert counts == ["0  ", "123  ", "1.2 K", "999 K", "2.0 M", "99.9 M", "3.0 B", "400 T", "5,000 T"]


def test_errors_of_memory() -> None:
    assert memory.is_oom_error(RuntimeError("CUDA error: out of memory"))
    assert memory.is_cuda_out_of_memory(RuntimeError("CUDA error: out of memory"))
    assert memory.is_out_of_cpu_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    assert memory.is_cudnn_snafu(RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED."))
    assert not memory.is_oom_error(RuntimeError("no"))
    detached = memory.recursive_detach({"a": [torch.ones(1, requires_grad=True)], "b": 1}, to_cpu=True)
    assert (detached["a"][0].requires_grad, detached["b"]) == (False, 1)
