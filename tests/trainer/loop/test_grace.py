"""`Trainer(grace=...)`: a run that does not end after a signal is ended, with all ranks and data workers."""

import os
import signal
import subprocess
import sys
import time

import pytest
from support.fault_cells import kill_all, living
from support.models import Line, loader
from support.processes import clean_environment, python, run
from support.trainers import make_trainer
from treadle.callbacks import LambdaCallback
from treadle.engine.checkpoint import CheckpointStore

import treadle

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc as on Linux")

HANGS = """
import os, time, treadle
from torch.utils.data import DataLoader
from treadle.compat.demos.boring_classes import BoringModel, RandomDataset

class Task(BoringModel):
    def {hook}(self, *args):
        if self.trainer.global_step == 2 and self.global_rank == self.trainer.world_size - 1:
            with open("part", "w") as file:
                file.write(str(os.getpid()))
            os.rename("part", "hangs")
            time.sleep(600)

saving = treadle.callbacks.ModelCheckpoint("ckpt", save_top_k=-1, every_n_train_steps=1, save_on_exception=True)
trainer = treadle.Trainer(
    accelerator="cpu", devices={devices}, callbacks=[saving], logger=False, enable_progress_bar=False,
    max_epochs=1, grace={{"seconds": 1}}, limit_val_batches=0,
)
trainer.fit(Task(), DataLoader(RandomDataset(32, 8), num_workers=1))
"""
STEP = "on_train_batch_start"


@pytest.mark.long
@pytest.mark.guarantee
@pytest.mark.parametrize(
    ("devices", "hook", "number", "to_rank"),
    [
        pytest.param(1, STEP, signal.SIGTERM, True, marks=pytest.mark.exhaustive),
        (2, STEP, signal.SIGTERM, True),  # the other rank waits for it, and has got no signal
        pytest.param(2, STEP, signal.SIGINT, False, marks=pytest.mark.exhaustive),
        pytest.param(2, "on_save_checkpoint", signal.SIGUSR1, False, marks=pytest.mark.exhaustive),
    ],
)
def test_a_run_that_hangs_after_a_signal_ends(devices, hook, number, to_rank, tmp_path):
    (tmp_path / "train.py").write_text(HANGS.format(hook=hook, devices=devices))
    with (tmp_path / "err").open("w") as err:
        process = subprocess.Popen(
            [python(), "train.py"], cwd=tmp_path, env=clean_environment(), stderr=err, start_new_session=True
        )
        try:
            end = time.monotonic() + 60
            while not (tmp_path / "hangs").exists():
                assert time.monotonic() < end
                time.sleep(0.01)
            time.sleep(0.1)
            began = time.monotonic()
            os.kill(int((tmp_path / "hangs").read_text()) if to_rank else process.pid, number)
            status = process.wait(20)
            seconds = time.monotonic() - began
            end = time.monotonic() + 2
            while living(tmp_path) and time.monotonic() < end:
                time.sleep(0.02)
            orphans = living(tmp_path)
        finally:
            kill_all(tmp_path, process)
    text = (tmp_path / "err").read_text()
    assert status == (130 if number is signal.SIGINT else 143), text
    assert 0.9 < seconds < 10
    assert orphans == {}
    assert "the grace period of 1 s after the signal is over" in text
    newest, broken = CheckpointStore(tmp_path / "ckpt").latest()
    assert newest is not None
    assert broken == []


def test_grace_is_a_duration():
    with pytest.raises(ValueError, match="grace"):
        treadle.Trainer(grace={"seconds": 0}, logger=False)
    with pytest.raises(TypeError, match="grace"):
        treadle.Trainer(grace=30, logger=False)


def wake_others():
    """Whoever else waits for signals still hears of them."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing)
    strikes = LambdaCallback(on_train_batch_end=lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    try:
        with pytest.raises(SystemExit) as caught:
            make_trainer(callbacks=strikes, grace={"seconds": 60}).fit(Line(), loader())
        assert caught.value.code == 143
        assert signal.set_wakeup_fd(writing) == writing
    finally:
        signal.set_wakeup_fd(before)
    assert os.read(reading, 1) == bytes([signal.SIGTERM])


def test_others_who_wait_for_signals_still_do():
    run(wake_others, 1)  # the signal is for a process of its own
