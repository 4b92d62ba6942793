"""What a strategy reports in Lightning's names before a run."""

import pytest
import torch
from treadle.strategies import DDP, SingleDevice

import treadle


@pytest.mark.parametrize("device", ["cpu", torch.device("cuda", 3), "meta"])
def test_before_a_run(device):
    for strategy, expected in ((SingleDevice(device), torch.device(device)), (SingleDevice(), torch.device("cpu"))):
        assert strategy.root_device == expected
    for strategy in (SingleDevice(device), DDP()):
        assert (strategy.world_size, strategy.global_rank, strategy.local_rank) == (1, 0, 0)
        assert strategy.is_global_zero


def test_in_a_run():
    strategy = SingleDevice()
    accelerator = treadle.Accelerator(strategy=strategy, cpu=True)
    assert strategy.world is accelerator.world
    assert SingleDevice("meta").root_device == torch.device("meta")
