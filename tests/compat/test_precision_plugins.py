"""Precisions as Lightning's plugins."""

import pytest
import torch
from support.trainers import NO_OUTPUT, make_trainer, says
from torch import nn
from treadle.compat.demos.boring_classes import BoringModel
from treadle.compat.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from treadle.compat.plugins.layer_sync import LayerSync, TorchSyncBatchNorm

import treadle


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
    trainer = make_trainer(plugins=[plugin] if as_list else plugin, fast_dev_run=1)
    trainer.fit(task)
    assert (trainer.precision, task.layer.weight.dtype, plugin.precision) == (precision, dtype, precision)


def test_plugins_that_are_refused() -> None:
    with pytest.raises(ValueError, match="precision='16-true' is not one of 16-mixed, bf16-mixed"):
        MixedPrecision("16-true", "cuda")
    with pytest.raises(ValueError, match="a run creates its own gradient scaler"):
        MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match="both set the precision"):
        make_trainer(precision="64-true", plugins=DoublePrecision())
    with says(TypeError, "must be a treadle.plugins.Precision, TorchSyncBatchNorm() or CheckpointIO"):
        make_trainer(plugins=object())
    assert isinstance(TorchSyncBatchNorm(), LayerSync)


def test_precisions_have_the_attributes_of_plugins() -> None:
    assert Precision() == Precision(name="32-true")
    plugin = MixedPrecision("bf16-mixed", "cpu")
    assert plugin.scaler is None
    with plugin.autocast_context_manager():
        assert nn.Linear(1, 1)(torch.ones(1, 1)).dtype == torch.bfloat16
    trainer = treadle.Trainer(precision="16-mixed", accelerator="cpu", **NO_OUTPUT)
    assert trainer.precision_plugin.device == "cpu"
    assert trainer.precision_plugin.scaler is trainer.scaler is not None
    assert trainer.precision_plugin == Precision.parse("16-mixed")
    with_plugin = treadle.Trainer(plugins=plugin, accelerator="cpu", **NO_OUTPUT)
    assert isinstance(with_plugin.precision_plugin, MixedPrecision)
