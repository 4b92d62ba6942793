"""A strategy that was built for a device."""

import pytest
import torch
from support.trainers import NO_OUTPUT
from treadle.compat.plugins import TorchCheckpointIO
from treadle.strategies import DDP, FSDPStrategy, Precision, SingleDevice, resolve_devices

import treadle


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_a_strategy_built_for_a_device_runs_there(device):
    assert treadle.Trainer(strategy=SingleDevice(device), **NO_OUTPUT).strategy.root_device == torch.device("cpu")
    assert treadle.Accelerator(strategy=SingleDevice(device=device), devices=1).device == torch.device("cpu")
    assert resolve_devices(SingleDevice("cuda:1"), "auto", "auto") == ("cuda", [1])
    assert resolve_devices(SingleDevice(), "gpu", 2) == resolve_devices("ddp", "gpu", 2) == ("gpu", 2)


@pytest.mark.parametrize("kind", [SingleDevice, DDP, FSDPStrategy])
def test_flags_of_the_trainer_that_lightnings_strategies_take(kind):
    writer, precision = TorchCheckpointIO(), Precision.parse("64-true")
    strategy = kind(accelerator="cpu", checkpoint_io=writer, precision_plugin=precision)
    assert resolve_devices(strategy, "auto", 1) == ("cpu", 1)
    if kind is not FSDPStrategy:  # needs more than one process
        trainer = treadle.Trainer(strategy=strategy, devices=1, **NO_OUTPUT)
        assert (trainer.strategy.checkpoint_io, trainer.precision) == (writer, "64-true")
    with pytest.raises(ValueError, match=r"\(accelerator='cpu'\) contradicts accelerator='cuda'"):
        resolve_devices(strategy, "cuda", 1)
    with pytest.raises(ValueError, match="both set the precision"):
        treadle.Trainer(strategy=kind(precision_plugin=precision), precision=32)


@pytest.mark.parametrize(("flags", "words"), [
    ({"accelerator": "gpu"}, r"SingleDevice\('cpu'\) contradicts accelerator='gpu'"),
    ({"devices": 2}, r"SingleDevice\('cpu'\) contradicts devices=2, because the strategy uses only the device 'cpu'"),
])  # fmt: skip
def test_flags_that_contradict_the_strategys_device(flags, words):
    with pytest.raises(ValueError, match=words):
        treadle.Trainer(strategy=SingleDevice("cpu"), **flags)
