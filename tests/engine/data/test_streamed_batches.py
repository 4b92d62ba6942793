"""Streams that know where they are, on two processes."""

import pytest
import torch
from support.processes import run
from support.resume_trials import Stateful
from torch.utils.data import DataLoader

import treadle


def read(accelerator, loader, epochs):
    """The numbers of each batch that counts, by epoch."""
    return [[batch.tolist() for batch in loader if accelerator.cursor.micro.samples] for _ in range(epochs)]


def prepare(size):
    accelerator = treadle.Accelerator(cpu=True)
    return accelerator, accelerator.prepare_data_loader(DataLoader(Stateful(torch.arange(size)), batch_size=2))


def read_and_resume_between_epochs(path, size):
    accelerator, loader = prepare(size)
    read(accelerator, loader, 1)
    accelerator.save_state(path)
    (second_epoch,) = read(accelerator, loader, 1)
    accelerator, loader = prepare(size)
    accelerator.load_state(path)
    return second_epoch, *read(accelerator, loader, 1)


def read_and_resume_at_the_last_batch(path, size):
    accelerator, loader = prepare(size)
    for number, _ in enumerate(loader, 1):
        if number == -(-size // 4):
            accelerator.save_state(path)
    (second_epoch,) = read(accelerator, loader, 1)
    accelerator, loader = prepare(size)
    accelerator.load_state(path)
    rest, following = read(accelerator, loader, 2)
    assert rest == []
    return second_epoch, following


@pytest.mark.guarantee
# As many batches for each rank, and one more for rank zero.
@pytest.mark.parametrize("size", [pytest.param(16, marks=pytest.mark.exhaustive), 18])
@pytest.mark.parametrize(
    "resume",
    [pytest.param(read_and_resume_between_epochs, marks=pytest.mark.exhaustive), read_and_resume_at_the_last_batch],
)
def test_a_resume_at_the_end_of_an_epoch_loses_no_batch(tmp_path, size, resume):
    """The ranks compare what they read first, which a resumed stream yields in the epoch that comes."""
    ranks = run(resume, 2, tmp_path / "saved", size)
    for second_epoch, resumed in ranks:
        assert resumed == second_epoch
    assert sorted(number for _, epoch in ranks for batch in epoch for number in batch) == list(range(size))
