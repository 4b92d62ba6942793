"""Random numbers of datasets, samplers and workers."""

import numpy as np
import pytest
import torch
from support.loader_ranks import Ranks, flat, make_alone, plain_list, seed
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset
from treadle.engine.rng import RandomStream, random_state


class Drawing(Dataset):
    def __init__(self, *generators):
        self.generators = dict(enumerate(generators))

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return index


@pytest.mark.parametrize(
    ("generators", "warning"),
    [
        ([np.random.default_rng(1)], "the generators of Drawing differ in type from those in the checkpoint"),
        ([], "Drawing has 0 generators, but the checkpoint has 1"),
    ],
)
def test_a_datasets_other_generators_are_not_restored(generators, warning):
    state = Ranks(lambda: DataLoader(Drawing(torch.Generator())), 1).loaders[0].reading_state()
    loader = Ranks(lambda: DataLoader(Drawing(*generators)), 1).loaders[0]
    with pytest.warns(UserWarning, match=warning):
        loader.load_reading_state(state)


def test_one_generator_for_training_and_validation():
    """As in PyTorch's notes on reproducibility."""

    def run(stop=None, state=None):
        seed(7)
        stream = RandomStream(random_state())
        generator = torch.Generator().manual_seed(1)
        train, val = (
            make_alone(DataLoader(range(10), batch_size=2, shuffle=True, generator=generator), stream) for _ in range(2)
        )
        if state:
            train.load_state_dict(state[0])
            val.load_state_dict(state[1])
            stream.state = state[2]
        found = []
        while train.epoch < 3:
            for batch in train:
                found.append(batch.tolist())
                if train.batches == 1:
                    found += plain_list(val)
                if len(found) == stop:
                    return found, (train.state_dict(), val.state_dict(), stream.state)
        return found

    whole = run()
    for stop in (6, 9, 10, 17):  # a training batch, five of validation, four of training; and again
        begun, state = run(stop)
        assert begun + run(state=state) == whole


class KnowsEpoch:
    epoch = -1

    def set_epoch(self, epoch):
        self.epoch = epoch


class Epochs(KnowsEpoch, Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.epoch


class EpochStream(KnowsEpoch, IterableDataset):
    def __iter__(self):
        yield from [self.epoch] * 4


NESTED = {
    "plain": lambda data: data,
    "subset": lambda data: Subset(data, range(4)),
    "concat": lambda data: torch.utils.data.ConcatDataset([Subset(data, [0, 1]), data]),
}


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}], ids=str)
def test_the_epoch_reaches_the_dataset_in_every_worker(options):
    # A worker costs a quarter of a second: with workers, `concat` stands for the containers, as it holds a subset too.
    wraps = [NESTED["concat"]] if options else NESTED.values()
    for make in (EpochStream, *(lambda wrap=wrap: wrap(Epochs()) for wrap in wraps)):
        ranks = Ranks(lambda make=make: DataLoader(make(), batch_size=2, **options), 1)
        assert [set(flat(ranks.ids())) for _ in range(2)] == [{0}, {1}]
        ranks.loaders[0].set_epoch(7)
        assert set(flat(ranks.ids())) == {7}
        resumed = Ranks(lambda make=make: DataLoader(make(), batch_size=2, **options), 1, state=ranks.state())
        assert set(flat(resumed.ids())) == {8}
        for loader in (*ranks.loaders, *resumed.loaders):
            loader.close()


class EpochBatches(KnowsEpoch):
    """A batch sampler whose length depends on the epoch."""

    def __len__(self):
        return self.epoch + 1

    def __iter__(self):
        yield from ([self.epoch, index] for index in range(len(self)))


class EpochSource(KnowsEpoch):
    """An iterable of batches that is no DataLoader."""

    def __iter__(self):
        yield torch.tensor([self.epoch])


def test_set_epoch_reaches_custom_batch_samplers_and_sources_at_once():
    batches = EpochBatches()
    ranks = Ranks(lambda: DataLoader(range(9), batch_sampler=batches), 1)
    ranks.loaders[0].set_epoch(3)
    assert batches.epoch == 3
    assert len(ranks.loaders[0]) == 4
    assert ranks.ids() == [[3, 0], [3, 1], [3, 2], [3, 3]]
    own = Ranks(EpochSource, 1)
    assert [own.ids() for _ in range(2)] == [[[0]], [[1]]]
