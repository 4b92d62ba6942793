"""Samplers of Lightning's that repeat nothing."""

import torch
from treadle.compat.overrides.distributed import UnrepeatedDistributedSampler


def test_samplers_that_repeat_nothing() -> None:
    shares = [list(UnrepeatedDistributedSampler(range(5), num_replicas=2, rank=r, shuffle=False)) for r in (0, 1)]
    assert shares == [[0, 2, 4], [1, 3]]
    shuffled = UnrepeatedDistributedSampler(range(5), num_replicas=2, rank=0)
    assert list(shuffled) == torch.randperm(5, generator=torch.Generator().manual_seed(0)).tolist()[::2]
