"""Groups of micro-batches: weights, what is left out, and iterators that are never begun anew."""

from fractions import Fraction

import pytest
from support import sources_samples as samples
from torch.utils.data import BatchSampler, DataLoader
from treadle.engine.data.epoch_position import EpochPosition
from treadle.engine.data.micro_batches import GroupPlanner, avoid_rewind
from treadle.engine.data.sharded_sampler import ShardedBatches
from treadle.engine.rng import RandomStream, random_state


@pytest.mark.guarantee
@pytest.mark.parametrize("sizes", [[(4, 4), (4, 4)], [(3, 5), (0, 2), (1, 1)], [(0, 0)], [(7, 11)]])
def test_weights_of_a_group(sizes):
    total = sum(every for _, every in sizes)
    planner = GroupPlanner(0, 3, lambda _: 1)
    micros = list(planner.plan(sizes))
    assert [m.last for m in micros] == [False] * (len(sizes) - 1) + [True]
    assert [m.samples for m in micros] == [own for own, _ in sizes]
    assert [m.group_samples for m in micros] == [total] * len(sizes)
    assert [m.everyone for m in micros] == [every for _, every in sizes]
    for micro, (own, _) in zip(micros, sizes, strict=True):
        assert micro.scale == (float(Fraction(3 * own, total)) if total else 0.0)


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
