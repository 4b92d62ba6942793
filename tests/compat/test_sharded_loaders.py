"""Accelerate's loaders without an Accelerator; expected batches are what accelerate 1.15 gives for the same calls."""

import pickle

import pytest
import torch
from support.models import Numbers
from support.processes import run
from torch.utils.data import BatchSampler, DataLoader
from treadle.data_loader import DataLoaderDispatcher, DataLoaderShard, get_sampler, prepare_data_loader
from treadle.engine import process_state
from treadle.state import GradientState

import treadle


def batches(loader):
    return [batch.tolist() for batch in loader]


def shard(loader, rank, **settings):
    return prepare_data_loader(loader, num_processes=2, process_index=rank, **settings)


def test_each_process_gets_its_batches():
    first, second = (shard(DataLoader(range(7), 2), rank) for rank in (0, 1))
    assert (batches(first), batches(second)) == ([[0, 1], [4, 5]], [[2, 3], [6, 0]])
    assert (len(first), first.total_batch_size, first.total_dataset_length) == (2, 4, 7)
    copied = pickle.loads(pickle.dumps(second))
    assert (type(first), type(copied), batches(copied)) == (DataLoaderShard, DataLoaderShard, [[2, 3], [6, 0]])
    uneven = [batches(shard(DataLoader(range(7), 2), rank, even_batches=False)) for rank in (0, 1)]
    assert uneven == [[[0, 1], [4, 5]], [[2, 3], [6]]]
    split = [batches(shard(DataLoader(range(7), 4), rank, split_batches=True)) for rank in (0, 1)]
    assert split == [[[0, 1], [4, 5]], [[2, 3], [6, 0]]]
    stream = [batches(shard(DataLoader(Numbers(7), 2), rank)) for rank in (0, 1)]
    assert stream == [[[0, 1], [4, 5]], [[2, 3], [6, 0]]]
    placed = prepare_data_loader(DataLoader(Numbers(3), 2), "cpu", 1, 0, put_on_device=True)
    assert batches(placed) == [[0, 1], [2]]


def test_the_state_of_the_iteration(monkeypatch):
    monkeypatch.setattr(process_state, "_accelerators", [])  # of earlier tests, not collected yet
    loader, state = shard(DataLoader(range(7), 2), 0), GradientState()
    seen = [
        (state.end_of_dataloader, state.remainder, state.in_dataloader, state.active_dataloader is loader)
        for _ in loader
    ]
    assert seen == [(False, 3, True, True), (True, 3, True, True)]
    assert (state.in_dataloader, state.active_dataloader, state.remainder) == (False, None, -1)
    for _ in loader:
        break
    del loader  # a loop that is left in the middle leaves no trace
    assert not state.in_dataloader


def test_an_order_that_follows_from_the_seed():
    loader = shard(DataLoader(range(9), 2, shuffle=True), 0, use_seedable_sampler=True, data_seed=3)
    first, second = batches(loader), batches(loader)
    other = shard(DataLoader(range(9), 2, shuffle=True), 1, use_seedable_sampler=True, data_seed=3)
    assert first != second
    assert {i for batch in first + batches(other) for i in batch} == {*range(9)}
    loader.set_epoch(0)
    assert batches(loader) == first
    assert get_sampler(loader).initial_seed == 3


def test_first_batches_are_skipped():
    loader = shard(DataLoader(range(12), 2), 1)
    rest = treadle.skip_first_batches(loader, 1)
    assert (batches(rest), len(rest)) == ([[6, 7], [10, 11]], 2)
    assert batches(treadle.skip_first_batches(rest, 1)) == [[10, 11]]
    assert batches(loader) == [[2, 3], [6, 7], [10, 11]]
    assert batches(treadle.skip_first_batches(shard(DataLoader(Numbers(12), 2), 1), 2)) == [[10, 11]]
    in_sampler = DataLoader(torch.arange(7), sampler=BatchSampler(range(7), 2, False), batch_size=None)
    assert batches(shard(in_sampler, 0)) == [[0, 1], [4, 5]]
    assert batches(treadle.skip_first_batches(shard(in_sampler, 1), 1)) == [[6, 0]]


def test_what_is_refused():
    for loader, dispatches in (DataLoader(range(4)), True), (DataLoader(Numbers(4)), None):
        with pytest.raises(ValueError, match="pass dispatch_batches=False to prepare_data_loader"):
            shard(loader, 0, put_on_device=True, dispatch_batches=dispatches)
    with pytest.raises(ValueError, match=r"Prepare the DataLoader with treadle\.Accelerator"):
        DataLoaderDispatcher(range(4))
    with pytest.raises(ValueError, match="the DataLoader has no batch_size"):
        shard(DataLoader(Numbers(4), None), 0, split_batches=True)
    with pytest.raises(ValueError, match=r"Prepare the DataLoader with treadle\.Accelerator instead"):
        shard(DataLoader(range(4)), 0, use_stateful_dataloader=True)
    with pytest.raises(TypeError, match="Pass the original DataLoader"):
        treadle.Accelerator(cpu=True).prepare(shard(DataLoader(range(9), 3), 0))


def read_on_two():
    accelerator = treadle.Accelerator(cpu=True, gradient_accumulation_steps=2)
    rows, ends = [], []
    for batch in prepare_data_loader(DataLoader(range(11), 2)):
        rows += accelerator.gather_for_metrics(batch).tolist()
        with accelerator.accumulate():
            ends.append(accelerator.sync_gradients)
    torch.manual_seed(accelerator.process_index)
    shuffled = prepare_data_loader(DataLoader(range(8), 2, shuffle=True), rng_types=["torch", "generator"])
    drawn = accelerator.gather(torch.cat(list(shuffled)))
    return rows, ends, sorted(drawn.tolist())


def test_two_processes():
    first, second = run(read_on_two, 2)
    assert first == second
    # The repeated sample is gathered once, and the loader's end ends a group of micro-batches.
    assert first == ([*range(11)], [False, True, True], [*range(8)])


def test_the_accelerators_step_without_a_loader_of_its_own():
    accelerator = treadle.Accelerator(cpu=True)
    for _ in prepare_data_loader(DataLoader(range(4), 2), num_processes=1, process_index=0):
        assert accelerator.step == 0
