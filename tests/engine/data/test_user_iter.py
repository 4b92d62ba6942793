"""Loaders with an iteration of their own."""

import itertools

import pytest
import torch
from support.loader_ranks import Negated, Ranks, seed
from torch.utils.data import DataLoader


class Joined(DataLoader):
    """Reads other loaders, like those of semi-supervised methods."""

    def __init__(self, first, second, **options):
        super().__init__(first, **options)
        self.first, self.second = DataLoader(first, **options), DataLoader(second, **options)

    def __len__(self):
        return len(self.first)

    def __iter__(self):
        return zip(self.first, itertools.cycle(self.second), strict=False)


class Chained(Joined):
    def __len__(self):
        return DataLoader.__len__(self) + len(self.second)

    def __iter__(self):
        yield from DataLoader.__iter__(self)
        yield from self.second


class Filtered(Joined):
    def __len__(self):
        return -(-DataLoader.__len__(self) // 2)

    def __iter__(self):
        return itertools.islice(DataLoader.__iter__(self), 0, None, 2)


def to_lists(batch):
    return [part.tolist() for part in batch] if isinstance(batch, tuple | list) else batch.tolist()


def make_loader(kind, workers):
    return kind(list(range(12)), list(range(100, 112)), batch_size=4, shuffle=True, num_workers=workers)


def iterate_joined(kind, workers, k, state=None):
    ranks = Ranks(
        lambda: make_loader(kind, workers), 1, k, state=state, run_seed=7 if state is None else 99, process=True
    )
    [loader], [cursor] = ranks.loaders, ranks.cursors
    batches, states, scales = [], [], []
    while loader.epoch < 2:
        for batch in loader:
            batches.append(to_lists(batch))
            scales.append(cursor.micro.scale)
            states.append(ranks.state() if cursor.micro.last else None)
        assert cursor.micro is None or cursor.micro.last
    return batches, states, scales


@pytest.mark.guarantee
@pytest.mark.filterwarnings("ignore:.*does not yield one batch")
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("kind", [Joined, Chained, Filtered, Negated])
def test_a_user_defined_iteration_in_one_process(kind, workers):
    if kind is Negated:
        make = lambda first, _, **options: Negated(torch.tensor(first), **options)  # noqa: E731
    else:
        make = kind
    seed(7)
    plain = make_loader(make, workers)
    wanted = [to_lists(batch) for _ in range(2) for batch in plain]
    for k in (1, 2):
        batches, states, scales = iterate_joined(make, workers, k)
        assert batches == wanted
        assert sum(scales) == pytest.approx(2 * -(-len(plain) // k))  # every group is a mean
        for number, state in enumerate(states):
            if state is not None:
                assert iterate_joined(make, workers, k, state)[0] == wanted[number + 1 :], (k, number)


def test_that_a_resume_reads_again_is_said_once():
    with pytest.warns(UserWarning, match=r"Joined\.__iter__ does not yield one .*reads the epoch") as caught:
        iterate_joined(Joined, 0, 1)
    assert len(caught) == 1
