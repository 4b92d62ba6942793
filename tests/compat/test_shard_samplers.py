"""Accelerate's samplers: the digests are those of accelerate 1.15's own classes over the same sweep."""

import hashlib
import itertools
import json

import pytest
from support.models import Numbers
from support.processes import run
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from treadle.data_loader import BatchSamplerShard, IterableDatasetShard, SeedableRandomSampler, SkipBatchSampler

import treadle


class DynamicBatches:
    """Batches of 1 to 3 indices, with no ``batch_size``."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __iter__(self):
        return iter([list(range(10 * i, 10 * i + 1 + i % 3)) for i in range(self.count)])


def digest(samplers):
    rows = [[len(sampler), [list(b) if isinstance(b, list) else b for b in sampler]] for sampler in samplers]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def sweep(split_batches, lengths=30):
    """World sizes, ranks, batch sizes and lengths."""
    for world, per_rank, length in itertools.product((1, 2, 3, 4), (1, 2, 3), range(lengths)):
        for rank in range(world):
            yield world, rank, per_rank * world if split_batches else per_rank, length


@pytest.mark.parametrize(
    ("split_batches", "drop_last", "even_batches", "expected"),
    [
        (False, False, False, "4e70b418b0f96075"),
        (False, False, True, "5302019980561895"),
        (False, True, False, "a7eb95099f7b5730"),
        (False, True, True, "a7eb95099f7b5730"),
        (True, False, False, "356cd62a7079cd8e"),
        (True, False, True, "5302019980561895"),
        (True, True, False, "a7eb95099f7b5730"),
        (True, True, True, "a7eb95099f7b5730"),
    ],
)
def test_batches_are_the_peers(split_batches, drop_last, even_batches, expected):
    samplers = (
        BatchSamplerShard(BatchSampler(range(length), size, drop_last), world, rank, split_batches, even_batches)
        for world, rank, size, length in sweep(split_batches)
    )
    assert digest(samplers) == expected


@pytest.mark.parametrize(("even_batches", "expected"), [(False, "584f3d958b058496"), (True, "6c77af35cffe9ec5")])
def test_batches_of_any_size_are_the_peers(even_batches, expected):
    samplers = (
        BatchSamplerShard(DynamicBatches(length), world, rank, False, even_batches)
        for world in (1, 2, 3, 4)
        for length in range(12)
        for rank in range(world)
    )
    assert digest(samplers) == expected


@pytest.mark.parametrize(
    ("split_batches", "drop_last", "expected"),
    [
        (False, False, "2c1a794732d4b277"),
        (False, True, "cc2c6fb4c42eb220"),
        (True, False, "0e0f728d53fd7453"),
        (True, True, "6a04da7230e04808"),
    ],
)
def test_streams_are_the_peers(split_batches, drop_last, expected):
    samplers = (
        IterableDatasetShard(Numbers(length), size, drop_last, world, rank, split_batches)
        for world, rank, size, length in sweep(split_batches)
    )
    assert digest(samplers) == expected


def test_the_sampler_s_lists_are_left_as_they_are():
    batches = [[0, 1], [2, 3], [4]]
    sampler = BatchSampler(SequentialSampler(range(5)), 2, False)
    sampler.__class__ = type("Fixed", (BatchSampler,), {"__iter__": lambda self: iter(batches)})
    assert list(BatchSamplerShard(sampler, 2, 0)) == [[0, 1], [4, 0]]
    assert batches == [[0, 1], [2, 3], [4]]


def test_an_uneven_split_is_refused():
    with pytest.raises(ValueError, match="batch_size=3 must be a multiple of num_processes=2"):
        BatchSamplerShard(BatchSampler(range(9), 3, False), 2, 0, split_batches=True)
    for size in (3, 1):  # each share of 1 would be empty
        with pytest.raises(ValueError, match=f"batch_size={size} must be a multiple of num_processes=2"):
            IterableDatasetShard(Numbers(9), size, num_processes=2, split_batches=True)


def test_an_epoch_s_order_follows_from_the_seed():
    sampler = SeedableRandomSampler(range(6), data_seed=3)
    first, second = list(sampler), list(sampler)
    assert (first, second) == ([4, 0, 3, 2, 1, 5], [4, 5, 1, 2, 3, 0])
    sampler.set_epoch(0)
    assert list(sampler) == first
    skipped = SkipBatchSampler(BatchSampler(range(7), 2, False), 2)
    assert (list(skipped), len(skipped), skipped.total_length) == ([[4, 5], [6]], 2, 4)


def draw_twice():
    treadle.seed_everything(3)
    accelerator = treadle.Accelerator(cpu=True)
    epochs = []
    for _ in range(2):  # from the first batch on, each rank draws random numbers of its own
        loader = accelerator.prepare(DataLoader(range(6), 1, sampler=SeedableRandomSampler(range(6))))
        epochs.append([accelerator.gather(batch).tolist() for batch in loader])
    return epochs


@pytest.mark.long
def test_a_sampler_made_in_the_middle_of_a_run_has_the_seed_of_all_ranks():
    order = [[[4, 0], [3, 2], [1, 5]]] * 2  # seed 3, as above
    assert run(draw_twice, 2) == [order, order]
