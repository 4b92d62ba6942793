"""Groups of micro-batches: what is left out of them."""

import pytest
from torch.utils.data import BatchSampler, DataLoader
from treadle.engine.data.epoch_position import EpochPosition
from treadle.engine.data.micro_batches import GroupPlanner
from treadle.engine.data.sharded_sampler import ShardedBatches
from treadle.engine.rng import RandomStream, random_state


class Blocks(BatchSampler):
    """Somebody's own batch sampler."""


@pytest.mark.parametrize(
    ("batch_sampler", "left_out"),
    [
        (BatchSampler(range(22), 4, drop_last=True), {"sample": 6}),
        (Blocks(range(22), 4, drop_last=True), {"batch": 1}),
        (Blocks(range(22), 4, drop_last=False), {}),
    ],
)
def test_what_is_left_out_is_counted_in_samples_or_batches(batch_sampler, left_out):
    loader = DataLoader(range(22), batch_sampler=batch_sampler)
    planner, stream = GroupPlanner(0, 2, lambda _: 1), RandomStream(random_state())
    plan = ShardedBatches(loader, planner, stream, EpochPosition(), merge_tail=False, positions=False)
    assert plan.left_out == left_out
