"""The arithmetic of shares and weights."""

from torch.utils.data import DataLoader, RandomSampler, SequentialSampler
from treadle.engine.data.sharded_sampler import get_length


def test_sized():
    class Endless(SequentialSampler):
        def __len__(self):
            raise TypeError("no length")

    assert get_length([1, 2]) == 2
    assert get_length(iter([1])) is None
    assert get_length(Endless(range(3))) is None
    assert get_length(RandomSampler(range(3))) == 3
    assert get_length(DataLoader(range(5), batch_size=2)) == 3
