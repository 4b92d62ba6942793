"""`use_seedable_sampler`: the order of an epoch follows from a seed and the epoch's number."""

import itertools

import pytest
import torch
from support.processes import run
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from treadle.engine import CombinedLoader

import treadle
from treadle.utils import DataLoaderConfiguration

SAMPLES = 24


def permuted(seed, samples=SAMPLES):
    return torch.randperm(samples, generator=torch.Generator().manual_seed(seed)).tolist()


def prepared(loader, seed=3, **options):
    torch.manual_seed(seed)
    accelerator = treadle.Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, **options)
    )
    return accelerator, accelerator.prepare(loader)


def shuffled(batch_size=4, **options):
    return DataLoader(range(SAMPLES), batch_size=batch_size, shuffle=True, **options)


def epoch(loader, stop=None):
    return [index for batch in itertools.islice(loader, stop) for index in batch.tolist()]


def test_the_seed_is_added_to_the_epochs_number():
    source = shuffled()
    sampler = source.sampler
    _, loader = prepared(source)
    torch.rand(5), torch.manual_seed(77)  # what is drawn otherwise has no effect
    assert [epoch(loader), epoch(loader)] == [permuted(3), permuted(4)]
    loader.set_epoch(10)
    assert [epoch(loader), epoch(loader)] == [permuted(13), permuted(14)]
    assert source.sampler is source.batch_sampler.sampler is sampler
    assert sampler.generator is None
    _, loader = prepared(shuffled(), data_seed=50)
    assert [epoch(loader), epoch(loader)] == [permuted(50), permuted(51)]


def test_an_epoch_that_was_left_early():
    _, loader = prepared(shuffled())
    for number in (0, 1, 2):
        loader.set_epoch(number)
        assert epoch(loader, 2) == permuted(3 + number)[:8]
    assert epoch(loader) == permuted(6)
    loader.set_epoch(9)
    assert epoch(loader, 1) + epoch(loader) == permuted(12)[:4] + permuted(13)


class Descending(RandomSampler):
    def __iter__(self):
        return iter(range(SAMPLES - 1, -1, -1))


def test_any_loader_with_a_random_sampler():
    data = range(SAMPLES)
    pairs = BatchSampler(RandomSampler(data), 2, drop_last=False)
    generator = torch.Generator().manual_seed(1)
    for source in (
        DataLoader(data, batch_sampler=pairs),
        DataLoader(torch.arange(SAMPLES), sampler=pairs, batch_size=None),
        shuffled(generator=generator),
        shuffled(num_workers=1),
    ):
        _, loader = prepared(source)
        assert [epoch(loader), epoch(loader)] == [permuted(3), permuted(4)]
        loader.close()
    assert isinstance(pairs.sampler, RandomSampler) and pairs.sampler.generator is None  # noqa: PT018
    _, loader = prepared(DataLoader(data, sampler=RandomSampler(data, num_samples=30), batch_size=5))
    generator = torch.Generator().manual_seed(3)
    twice = [torch.randperm(SAMPLES, generator=generator).tolist() for _ in range(2)]
    assert epoch(loader) == (twice[0] + twice[1])[:30]
    _, loader = prepared(DataLoader(data, sampler=Descending(data), batch_size=5))
    assert epoch(loader) == sorted(data, reverse=True)
    _, loader = prepared(DataLoader(data, batch_size=5))
    assert epoch(loader) == list(data)
    accelerator, _ = prepared(DataLoader(data))
    assert epoch(accelerator.prepare_data_loader([torch.arange(3)])) == [0, 1, 2]


def test_combined_loaders():
    accelerator, _ = prepared(shuffled())
    source = CombinedLoader({"a": shuffled(), "b": shuffled(8)}, "min_size")
    loader = accelerator.prepare(source)
    seen = [(batch["a"].tolist(), batch["b"].tolist()) for batch in loader]
    order = permuted(3)
    assert seen == [(order[4 * i : 4 * i + 4], order[8 * i : 8 * i + 8]) for i in range(3)]
    assert type(source.flattened[0].sampler) is RandomSampler


def on_two():
    torch.manual_seed(treadle.Accelerator(cpu=True).process_index)
    accelerator = treadle.Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    first, second = accelerator.prepare(shuffled(2), shuffled(2))
    return [epoch(first), epoch(second), epoch(first)]


def test_two_processes_share_rank_zeros_order():
    shares = run(on_two, 2)
    for found, seed in zip(zip(*shares, strict=True), (0, 0, 1), strict=True):
        order = permuted(seed)
        assert list(found) == [
            [i for start in range(2 * rank, SAMPLES, 4) for i in order[start : start + 2]] for rank in range(2)
        ]


# -- resuming --------------------------------------------------------------------------------------------------------


def begun(folder, batch_size):
    accelerator, loader = prepared(shuffled(batch_size))
    epoch(loader)
    loader.set_epoch(1)
    batches = iter(loader)
    seen = [*next(batches).tolist(), *next(batches).tolist()]
    accelerator.save_state(folder)
    return seen


def ended(folder, batch_size):
    """Two epochs of two resumed runs; the second one also says which epoch it is in."""
    rest = []
    for named in (False, True):
        accelerator, loader = prepared(shuffled(batch_size), seed=99)
        accelerator.load_state(folder)
        if named:
            loader.set_epoch(1)
        rest.append((epoch(loader), epoch(loader)))
    return rest


@pytest.mark.long
@pytest.mark.guarantee
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 1), (1, 2)])
def test_a_resume_within_an_epoch(before, after, tmp_path):
    arguments = (str(tmp_path / "c"), 4 // before)
    seen = [begun(*arguments)] if before == 1 else run(begun, before, *arguments)
    assert sorted(i for share in seen for i in share) == sorted(permuted(4)[:8])
    arguments = (str(tmp_path / "c"), 4 // after)
    shares = [ended(*arguments)] if after == 1 else run(ended, after, *arguments)
    for rest in zip(*shares, strict=True):
        assert sorted(i for share, _ in rest for i in share) == sorted(permuted(4)[8:])
        assert sorted(i for _, share in rest for i in share) == list(range(SAMPLES))
        if after == 1:  # in the order, and with the seed, of the run that was never interrupted
            assert rest == ((permuted(4)[8:], permuted(5)),)


def test_a_state_saved_with_the_last_batch_and_the_next_epoch_by_its_number(tmp_path):
    accelerator, loader = prepared(shuffled())
    for _ in loader:
        if loader.end_of_dataloader:
            accelerator.save_state(tmp_path / "c")
    accelerator, loader = prepared(shuffled())
    accelerator.load_state(tmp_path / "c")
    loader.set_epoch(1)
    assert epoch(loader) == permuted(4)


def test_a_checkpoint_of_another_sampler_is_refused_before_anything_is_loaded(tmp_path):
    accelerator = treadle.Accelerator(cpu=True)
    accelerator.prepare(shuffled(), torch.nn.Linear(1, 1))
    accelerator.save_state(tmp_path / "c")
    accelerator, _ = prepared(shuffled())
    net = accelerator.prepare(torch.nn.Linear(1, 1))
    before = net.weight.item()
    with pytest.raises(ValueError, match="has 1 sampler with a state_dict, but the checkpoint has 0"):
        accelerator.load_state(tmp_path / "c")
    assert net.weight.item() == before
