"""Fabric's seed."""

import torch
from treadle.compat.fabric.utilities.seed import reset_seed

import treadle


def test_the_seed_is_in_the_environment(monkeypatch) -> None:
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    torch.manual_seed(1)
    before = torch.initial_seed()
    reset_seed()
    assert torch.initial_seed() == before
    treadle.seed_everything(3)
    first = torch.rand(2)
    reset_seed()
    assert torch.equal(torch.rand(2), first)
    assert treadle.seed_everything() == 3
