"""Streams that draw random numbers in a process beside a model, and streams that know where they are, on two."""

import random

import numpy as np
import pytest
import torch
from support.loader_ranks import make_alone, seed
from support.processes import run
from support.resume_trials import Stateful
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from treadle.engine.rng import ProcessStream

import treadle

DRAW = {"python": random.random, "numpy": np.random.rand, "torch": lambda: torch.rand((), dtype=torch.float64).item()}


class Drawn(IterableDataset):
    def __init__(self, kind):
        self.draw = DRAW[kind]

    def __iter__(self):
        for _ in range(5):
            yield self.draw()


@pytest.mark.parametrize(("stream", "model"), [("numpy", "torch"), ("python", "numpy"), ("torch", "python")])
def test_a_generator_that_only_the_stream_draws_from_gives_the_plain_loops_numbers(stream, model):
    def read(loader):
        seed(7)
        return [(batch.item(), DRAW[model]()) for _ in range(3) for batch in loader]

    plain = DataLoader(Drawn(stream), batch_size=1)
    assert read(make_alone(plain, ProcessStream())) == read(plain)


@pytest.mark.parametrize("kind", DRAW)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_stream_and_a_model_never_draw_the_same_numbers(kind, accumulate):
    seed(7)
    loader = make_alone(DataLoader(Drawn(kind), batch_size=1), ProcessStream(), accumulate=accumulate)
    validation = make_alone(DataLoader(Drawn(kind), batch_size=1), ProcessStream())
    drawn = []
    for epoch in range(3):
        for number, batch in enumerate(loader):
            drawn += [batch.item(), DRAW[kind]()]
            if epoch and number == 2:
                drawn += [value.item() for value in validation]
    assert len(drawn) == len({*drawn}) == 40


def read(accelerator, loader):
    """The numbers of each batch of an epoch that counts."""
    return [batch.tolist() for batch in loader if accelerator.cursor.micro.samples]


def prepare(size):
    accelerator = treadle.Accelerator(cpu=True)
    return accelerator, accelerator.prepare_data_loader(DataLoader(Stateful(torch.arange(size)), batch_size=2))


def read_and_resume(path, size, at_the_last_batch):
    accelerator, loader = prepare(size)
    for number, _ in enumerate(loader, 1):
        if at_the_last_batch and number == -(-size // 4):
            accelerator.save_state(path)
    if not at_the_last_batch:
        accelerator.save_state(path)
    second_epoch = read(accelerator, loader)
    accelerator, loader = prepare(size)
    accelerator.load_state(path)
    if at_the_last_batch:
        assert read(accelerator, loader) == []
    return second_epoch, read(accelerator, loader)


@pytest.mark.long
@pytest.mark.guarantee
# As many batches for each rank, and one more for rank zero.
@pytest.mark.parametrize("size", [pytest.param(16, marks=pytest.mark.exhaustive), 18])
@pytest.mark.parametrize("at_the_last_batch", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_a_resume_at_the_end_of_an_epoch_loses_no_batch(tmp_path, size, at_the_last_batch):
    """The ranks compare what they read first, which a resumed stream yields in the epoch that comes."""
    ranks = run(read_and_resume, 2, tmp_path / "saved", size, at_the_last_batch)
    for second_epoch, resumed in ranks:
        assert resumed == second_epoch
    assert sorted(number for _, epoch in ranks for batch in epoch for number in batch) == list(range(size))


# -- batches that are split --------------------------------------------------------------------------------------------


class Numbers(IterableDataset):
    """The numbers below `size`, of which each worker reads those of its own; with `length`, it has a length."""

    def __init__(self, size, own=False):
        self.size, self.own = size, own

    def __iter__(self):
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        yield from range(first + 100 * self.own * treadle.PartialState().process_index, self.size, step)


class Sized(Numbers):
    def __len__(self):
        return self.size


SPLIT = {
    "even": (Sized(16), {}),
    "one sample in the last batch": (Sized(17), {}),
    "a short batch within the epoch": (Numbers(18), {"num_workers": 2}),
    "drop_last": (Sized(19), {"drop_last": True}),
}


def read_split(stream, settings, accumulation, path=None):
    """The batches that count, the loader's sizes, and the weights; saved in `path`, or resumed from it."""
    accelerator = treadle.Accelerator(cpu=True, split_batches=True, gradient_accumulation_steps=accumulation)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    loader = DataLoader(stream, batch_size=4, **settings)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3), loader)
    if saved := path is not None and path.exists():
        accelerator.load_state(path)
    batches, weights = [], []
    for number, batch in enumerate(loader, 1):
        with accelerator.accumulate(model):
            accelerator.backward(((model(batch[:, None].float()) - 1) ** 2).mean())
            optimizer.step()
            optimizer.zero_grad()
        batches.append(batch.tolist() if accelerator.cursor.micro.samples else [])
        weights.append(accelerator.unwrap_model(model).weight.item())
        if path is not None and not saved and number == 2:
            accelerator.save_state(path)
    return batches, loader.total_batch_size, getattr(loader, "length", None), weights


def read_all_splits():
    return {name: read_split(*each, 2) for name, each in SPLIT.items()}


@pytest.mark.long
def test_split_batches_of_a_stream_are_those_of_one_process():
    (alone,), (first, second) = run(read_all_splits, 1), run(read_all_splits, 2)
    for case, (batches, full, length, weights) in alone.items():
        assert [a + b for a, b in zip(first[case][0], second[case][0], strict=True)] == batches, case
        for batch, own in zip(batches, first[case][0], strict=True):
            assert own == batch[: -(-len(batch) // 2)], case
        assert (first[case][1:3], second[case][1:3]) == ((full, length),) * 2, case
        assert first[case][3] == second[case][3] == pytest.approx(weights, rel=1e-5), case
    assert alone["drop_last"][0][-1] == [12, 13, 14, 15]
    assert first["one sample in the last batch"][0][-1] == [16]


@pytest.mark.long
# The second is read again from its beginning.
@pytest.mark.parametrize(
    "stream", [Stateful(torch.arange(18)), pytest.param(Numbers(18), marks=pytest.mark.exhaustive)]
)
def test_a_split_stream_is_resumed(tmp_path, stream):
    whole, rest, (alone,) = (run(read_split, world, stream, {}, 1, tmp_path / "saved") for world in (2, 2, 1))
    for (batches, *_), (resumed, *_) in zip(whole, rest, strict=True):
        assert resumed == batches[2:]
    assert alone[0] == [a + b for a, b in zip(whole[0][0][2:], whole[1][0][2:], strict=True)]


def refuse_own_data():
    loader = treadle.Accelerator(cpu=True, split_batches=True).prepare(DataLoader(Numbers(300, own=True), batch_size=4))
    with pytest.raises(ValueError, match=r"each of them reads its own Numbers\. Remove split_batches"):
        next(iter(loader))


@pytest.mark.long
def test_batches_of_own_data_are_not_split():
    run(refuse_own_data, 2)
