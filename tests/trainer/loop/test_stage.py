"""A stage ends on all ranks together."""

import pytest
import torch
from processes import run
from quiet import QUIET
from torch.utils.data import DataLoader
from treadle.strategies.distributed.tracebacks import PeerFailed

import treadle


class Task(treadle.TaskModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def teardown(self, stage):
        if self.trainer.global_rank == 1:
            raise OSError("no such disk")


def fail_in_teardown():
    trainer = treadle.Trainer(accelerator="cpu", devices=2, max_steps=1, **QUIET)
    error = OSError if trainer.global_rank == 1 else PeerFailed
    with pytest.raises(error, match="no such disk") as caught:
        trainer.fit(Task(), DataLoader(torch.ones(4, 1)))
    return str(caught.value)


def test_a_teardown_that_fails_on_one_rank_fails_on_all():
    assert run(fail_in_teardown, 2) == ["rank 1 failed: OSError: no such disk", "no such disk"]
