"""Trainers that write and print nothing, for tests of something else."""

from torch.utils.data import IterableDataset

import treadle

QUIET = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


def trainer(**flags):
    return treadle.Trainer(**{"accelerator": "cpu", "max_epochs": 1, **QUIET, **flags})


class Dry(IterableDataset):
    """Yields nothing."""

    def __iter__(self):
        return iter(())
