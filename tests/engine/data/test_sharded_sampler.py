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


def test_sized():
    class Endless(SequentialSampler):
        def __len__(self):
            raise TypeError("no length")

    assert get_length([1, 2]) == 2
    assert get_length(iter([1])) is None
    assert get_length(Endless(range(3))) is None
    assert get_length(RandomSampler(range(3))) == 3
    assert get_length(DataLoader(range(5), batch_size=2)) == 3
