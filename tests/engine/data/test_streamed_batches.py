"""Streams that know where they are, on two processes."""

import pytest
import torch
from support.processes import run
from support.resume_trials import Stateful
from torch.utils.data import DataLoader

import treadle


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
