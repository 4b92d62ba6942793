"""Streams that end earlier on some ranks: all train together until the last one has ended, and it is said which."""

import logging
import os

import pytest
import torch
from support.models import Line, Stream
from support.processes import run
from support.trainers import make_trainer
from torch.utils.data import DataLoader
from treadle.callbacks import LambdaCallback


def fit(strategy, accumulate, epochs):
    words = []
    handler = logging.Handler()
    handler.emit = lambda record: words.append(record.getMessage())
    logging.getLogger("treadle").addHandler(handler)
    rank = int(os.environ["RANK"])
    values = torch.arange(2.0 * (7, 3)[rank])[:, None].repeat(1, 2) + 1000 * rank  # of this rank alone
    task, steps = Line(), []
    task.lr = 0.0
    counts = LambdaCallback(on_train_batch_end=lambda trainer, *_: steps.append(trainer.global_step))
    flags = {"devices": 2, "strategy": strategy, "max_epochs": epochs, "accumulate_grad_batches": accumulate}
    own = make_trainer(**flags, callbacks=counts)
    own.fit(task, DataLoader(Stream([*zip(values)]), 2))
    return steps, [text for text in words if "ran out of data" in text], own.progress.samples


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
