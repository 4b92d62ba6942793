"""Groups of micro-batches: weights, what is left out, and iterators that are never begun anew."""

import pytest
from support import sources_samples as samples
from torch.utils.data import BatchSampler, DataLoader
from treadle.engine.data.epoch_position import EpochPosition
from treadle.engine.data.micro_batches import GroupPlanner, avoid_rewind
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


def test_running_iterators_are_never_begun_anew():
    source = iter(samples.Rewinds(range(12)))
    assert len(list(iter(source))) == 3
    kept = avoid_rewind(iter(samples.Rewinds(range(12))))
    assert next(kept).tolist() == [0, 1, 2, 3]
    assert next(iter(kept)).tolist() == [4, 5, 6, 7]
