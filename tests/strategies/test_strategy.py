"""A strategy that was built for a device."""

import pytest
import torch
from support.trainers import NO_OUTPUT
from treadle.strategies import SingleDevice, resolve_devices

import treadle


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_a_strategy_built_for_a_device_runs_there(device):
    assert treadle.Trainer(strategy=SingleDevice(device), **NO_OUTPUT).strategy.root_device == torch.device("cpu")
    assert treadle.Accelerator(strategy=SingleDevice(device=device), devices=1).device == torch.device("cpu")
    assert resolve_devices(SingleDevice("cuda:1"), "auto", "auto") == ("cuda", [1])
    assert resolve_devices(SingleDevice(), "gpu", 2) == resolve_devices("ddp", "gpu", 2) == ("gpu", 2)


@pytest.mark.parametrize(("flags", "words"), [
    ({"accelerator": "gpu"}, r"SingleDevice\('cpu'\) contradicts accelerator='gpu'"),
    ({"devices": 2}, r"SingleDevice\('cpu'\) contradicts devices=2, because the strategy uses only the device 'cpu'"),
])  # fmt: skip
def test_flags_that_contradict_the_strategys_device(flags, words):
    with pytest.raises(ValueError, match=words):
        treadle.Trainer(strategy=SingleDevice("cpu"), **flags)
