"""Trainers that write and print nothing, for tests of something else."""

import re

import pytest
from torch.utils.data import IterableDataset

import treadle

NO_OUTPUT = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


def make_trainer(**flags):
    return treadle.Trainer(**{"accelerator": "cpu", "max_epochs": 1, **NO_OUTPUT, **flags})


class Dry(IterableDataset):
    """Yields nothing."""

    def __iter__(self):
        return iter(())


def says(error, *words):
    """A check that `error` comes, with each of `words` in its text."""
    return pytest.raises(error, match="".join(f"(?=.*{re.escape(word)})" for word in words).join(("(?s)", "")))
