"""Streams that end earlier on some ranks: all train together until the last one has ended, and it is said which."""

import logging
import os

import pytest
import torch
from support.models import SGDTask, Stream
from support.processes import run
from support.trainers import make_trainer
from torch.utils.data import DataLoader


class Task(SGDTask):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(1, 1)
        self.steps = []

    def training_step(self, batch, batch_idx):
        return self.net(batch / 1000).mean()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.steps.append(self.trainer.global_step)


def fit(strategy, accumulate, epochs):
    words = []
    handler = logging.Handler()
    handler.emit = lambda record: words.append(record.getMessage())
    logging.getLogger("treadle").addHandler(handler)
    rank = int(os.environ["RANK"])
    loader = DataLoader(Stream(torch.arange(2.0 * (7, 3)[rank])[:, None] + 1000 * rank), 2)  # of this rank alone
    task = Task()
    own = make_trainer(devices=2, strategy=strategy, max_epochs=epochs, accumulate_grad_batches=accumulate)
    own.fit(task, loader)
    return task.steps, [text for text in words if "ran out of data" in text], own.progress.samples


CASES = {
    ("ddp", 1, 2): "rank 1 of 2 ran out of data after 3 batches",
    ("ddp", 2, 1): "rank 1 of 2 ran out of data after at most 4 batches",
    ("fsdp", 1, 1): "rank 1 of 2 ran out of data after 3 batches",
}


def fit_all():
    return {case: fit(*case) for case in CASES}


@pytest.mark.long
def test_all_ranks_train_until_the_last_has_read_its_stream():
    ranks = run(fit_all, 2)
    for (strategy, accumulate, epochs), said in CASES.items():
        (first, told, samples), (second, _, _) = (rank[strategy, accumulate, epochs] for rank in ranks)
        assert first == second, strategy
        assert len(first) == 7 * epochs
        assert samples == 2 * (7 + 3) * epochs
        rest = "Ranks without data contribute with weight 0 until all ranks are done, so no sample is lost."
        assert told == [f"{said}. {rest}"]
