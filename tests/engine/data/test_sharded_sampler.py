"""The arithmetic of shares and weights."""

import itertools

from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from treadle.engine.data.micro_batches import share
from treadle.engine.data.sharded_sampler import get_length


def test_shares_are_contiguous_and_even():
    for size, count in itertools.product(range(1, 6), range(20)):
        parts = [list(range(count))[share(count, rank, size)] for rank in range(size)]
        assert [i for part in parts for i in part] == list(range(count))
        lengths = [len(part) for part in parts]
        assert lengths == sorted(lengths, reverse=True)
        assert lengths[0] - lengths[-1] <= 1


<<<<<<< HEAD
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


=======
>>>>>>> main
def test_sized():
    class Endless(SequentialSampler):
        def __len__(self):
            raise TypeError("no length")

    assert get_length([1, 2]) == 2
    assert get_length(iter([1])) is None
    assert get_length(Endless(range(3))) is None
    assert get_length(RandomSampler(range(3))) == 3
    assert get_length(DataLoader(range(5), batch_size=2)) == 3
