"""Sizes of batches and lengths of dataloaders."""

import pytest
import torch
from support.models import Stream
from torch.utils.data import DataLoader
from treadle.compat.utilities.data import extract_batch_size, has_len


def test_sizes_of_batches() -> None:
    assert extract_batch_size({"a": [torch.ones(3, 2)]}) == 3
    assert extract_batch_size(torch.ones(())) == 1
    with pytest.warns(UserWarning, match="differ in length"):
        assert extract_batch_size([torch.ones(2), torch.ones(3)]) == 2
    with pytest.raises(ValueError, match="contains no tensors"):
        extract_batch_size("abc")


def test_lengths_of_dataloaders() -> None:
    assert not has_len(DataLoader(Stream([1])))
    assert has_len(DataLoader([1]))
    with pytest.warns(UserWarning, match="the list has length 0, so it yields no batches"):
        assert has_len([])
