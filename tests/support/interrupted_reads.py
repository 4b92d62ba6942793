"""Two epochs of a dataloader that is saved in the second, and the rest that a resumed process reads."""

import warnings
from pathlib import Path

import torch
from torch.utils.data import get_worker_info

import treadle

READ = torch.zeros(2, dtype=torch.int64).share_memory_()
"""What each worker of this rank has read; workers inherit the memory."""


def note(sample=None):
    """Count a sample that is read."""
    info = get_worker_info()
    READ[0 if info is None else info.id] += 1
    return sample


def take_read():
    """The reads since the last call, by worker."""
    counts = READ.tolist()
    READ.zero_()
    return counts


def read_epochs(make, to_ids, folder, save_at, resumed=None):
    """By epoch, `to_ids` of each batch, or [] of one that does not count on this rank; and the warnings as one text.

    The second epoch is saved after each number of batches in `save_at`; `resumed` is the one to go on from.
    """
    accelerator, epochs = treadle.Accelerator(cpu=True), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = accelerator.prepare_data_loader(make())
        if resumed is not None:
            accelerator.load_state(Path(folder, str(resumed)))
        for epoch in range(2 if resumed is None else 1):
            epochs.append([])
            for batch in loader:
                epochs[-1].append(to_ids(batch) if accelerator.cursor.micro.samples else [])
                if epoch and len(epochs[-1]) in save_at:
                    accelerator.save_state(Path(folder, str(len(epochs[-1]))))
        loader.close()
    return epochs, "\n".join(str(each.message) for each in caught)
