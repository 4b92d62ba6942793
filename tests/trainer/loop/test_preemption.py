"""A signal to any process saves the run after the step in progress, and a resumed run is the undisturbed one."""

import os
import signal
import sys

import pytest
import torch
from strikes import SignalCell, strike, weights
from torch import nn
from torch.utils.data import DataLoader
from treadle.callbacks import Callback, ModelCheckpoint

import treadle

pytestmark = [pytest.mark.guarantee, pytest.mark.skipif(sys.platform != "linux", reason="/proc as on Linux")]


@pytest.mark.parametrize(
    "cell",
    [
        SignalCell("TERM", "supervisor", 2, "training"),
        SignalCell("USR1", "rank 1", 1, "validation", "fsdp"),
        SignalCell("HUP", "all", 2, "save", launcher="treadle launch"),
    ],
    ids=lambda cell: f"{cell.name}-{cell.target}",
)
def test_a_signal_saves_the_run_on_all_ranks(cell, tmp_path):
    outcome = strike(tmp_path / "struck", cell.plan, cell.launcher, cell)
    resumed = strike(tmp_path / "struck", {"strategy": cell.strategy}, cell.launcher)
    assert strike(tmp_path / "undisturbed", {"strategy": cell.strategy}, "local").status == 0
    same = weights(tmp_path / "struck") == weights(tmp_path / "undisturbed")
    assert cell.faults_of(outcome, resumed, same) == [], outcome.err


class Task(treadle.TaskModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.net(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Signalled(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == 2 and batch_idx == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            assert trainer.received_sigterm


def fit(folder, **flags):
    saving = ModelCheckpoint(folder, every_n_epochs=1)
    trainer = treadle.Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        callbacks=[saving, Signalled()],
        **flags,
    )
    trainer.fit(Task(), DataLoader(torch.ones(8, 1)))


def test_one_process_exits_with_143_and_min_steps_do_not_keep_it(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as caught:
            fit(tmp_path, min_steps=16)
        assert caught.value.code == 143
        assert [path.name for path in tmp_path.iterdir()] == ["epoch=0-step=3.ckpt"]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_handler_of_the_users_own_stays(tmp_path):
    received = []
    before = signal.signal(signal.SIGTERM, lambda *_: received.append(1))
    try:
        with pytest.raises(AssertionError):  # of received_sigterm, above
            fit(tmp_path)
        assert received == [1]
    finally:
        signal.signal(signal.SIGTERM, before)
