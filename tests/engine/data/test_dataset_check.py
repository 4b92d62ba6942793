"""Digests of batches, whatever is in them, and fingerprints of datasets."""

import pickle
import random

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset
from treadle.engine.data.dataset_check import digest, fingerprint


class Labelled(torch.Tensor):
    """Refuses to be another shape, as tensors with names for their columns do."""

    def reshape(self, *shape):
        raise ValueError("the labels would not fit")


def test_datasets_are_told_apart_by_what_they_hold(tmp_path):
    class Files(torch.utils.data.Dataset):
        def __init__(self, root, names):
            self.root, self.files, self.rank = root, [f"{root}/{name}" for name in names], root

        def __len__(self):
            return len(self.files)

    names = [f"{i}.png" for i in range(9)]
    here = fingerprint(Files("/scratch/node0", names))
    assert here == fingerprint(Files("/scratch/node1", names))  # the same files on another machine
    assert here != fingerprint(Files("/scratch/node0", names[::-1]))  # a directory listed in another order
    for other in (None, "relative.png"):  # as of a sample without a mask
        mixed, rank = Files("/scratch", names), Files("/scratch", names)
        mixed.files[-1] = other
        assert fingerprint(mixed) != fingerprint(rank)
    rows = torch.arange(12.0).reshape(6, 2)
    assert fingerprint(TensorDataset(rows)) == fingerprint(TensorDataset(rows.clone()))
    assert fingerprint(TensorDataset(rows)) != fingerprint(TensorDataset(rows.flip(0)))
    one = sorted(random.Random(1).sample(range(1, 9999), 5000))
    other = sorted(random.Random(2).sample(range(1, 9999), 5000))
    first, second = ([0, *ids, 9999] for ids in (one, other))  # the same ends
    for kind in (list, torch.tensor, np.array):
        assert fingerprint(Subset(rows, kind(first))) != fingerprint(Subset(rows, kind(second)))
        assert fingerprint(Subset(rows, kind(first))) == fingerprint(Subset(rows, kind(first)))
    assert fingerprint(Subset(rows, [])) == fingerprint(Subset(rows, range(0))) != fingerprint(Subset(rows, range(2)))


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(4.0),
        torch.arange(4, dtype=torch.int8).reshape(2, 2),
        {"a": torch.ones(2), "b": ["text", 3, None]},
        (1, 2.5, b"bytes"),
        {"set", "of", "texts"},
        torch.tensor(3, dtype=torch.bfloat16),
        torch.eye(2).to_sparse(),
        torch.arange(6.0).reshape(2, 3).as_subclass(Labelled),
    ],
)
def test_digests(value):
    assert digest(value) == digest(pickle.loads(pickle.dumps(value)))
    assert digest(value) != digest([value, value])
    if isinstance(value, torch.Tensor):
        assert digest(value) != digest(value + 1 if value.layout is torch.strided else value * 2)
