"""Sizes of batches, and lengths on all ranks."""

import pytest
import torch
from support.models import Stream
from support.processes import run
from support.trainers import make_trainer
from torch.utils.data import DataLoader
from treadle.compat.utilities.data import extract_batch_size, has_len_all_ranks


def test_sizes_of_batches() -> None:
    assert extract_batch_size({"a": [torch.ones(3, 2)]}) == 3
    assert extract_batch_size(torch.ones(())) == 1
    with pytest.warns(UserWarning, match="differ in length"):
        assert extract_batch_size([torch.ones(2), torch.ones(3)]) == 2
    with pytest.raises(ValueError, match="contains no tensors"):
        extract_batch_size("abc")


def lengths() -> bool:
    strategy = make_trainer(devices=2).strategy
    assert not has_len_all_ranks(DataLoader(Stream([1])), strategy)
    assert has_len_all_ranks([], strategy)  # which warns
    if strategy.world.rank:
        with pytest.raises(RuntimeError, match="no batches on rank 1"):
            has_len_all_ranks([], strategy)
        return False
    return has_len_all_ranks([1], strategy)


def test_lengths_of_all_ranks() -> None:
    assert run(lengths, 2) == [True, False]
