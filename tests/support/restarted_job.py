"""The training that `restarts` kills: epochs of 16 samples, each with a validation; saves after every second step.

``job.json`` of the working directory says how; ``events`` tells what every rank does and when. The last attempt leaves
the digest of the weights in ``done-RANK``. Run as a script by every launcher.
"""

import json
import os
import time
from pathlib import Path

RANK, PID = os.environ.get("RANK", "0"), os.getpid()
MACHINE = os.environ.get("TREADLE_TEST_MACHINE", "0")  # as the test counts them
_events = os.open("events", os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def tell(moment, **words):
    """Append a line to ``events``; a single write, which a kill can't cut in two."""
    line = {"moment": moment, "rank": int(RANK), "pid": PID, "time": time.monotonic(), **words}
    os.write(_events, json.dumps(line).encode() + b"\n")


tell("begin", machine=int(MACHINE), launcher=int(os.environ.get("TREADLE_SUPERVISOR", "0")))

import torch  # noqa: E402
from struck_job import FLAGS, Task, write_end  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402
from treadle.callbacks import Callback, ModelCheckpoint  # noqa: E402

import treadle  # noqa: E402


class Told(Task):
    def __init__(self, pause):
        super().__init__()
        self.pause = pause

    def training_step(self, batch, batch_idx):
        tell("step", step=self.global_step, epoch=self.current_epoch, samples=batch[2].tolist())
        time.sleep(self.pause)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        tell("validation")
        time.sleep(self.pause)
        super().validation_step(batch, batch_idx)


class Moments(Callback):
    def setup(self, trainer, pl_module, stage):
        tell("setup", world=trainer.world_size)

    def on_train_start(self, trainer, pl_module):
        tell("resume", step=trainer.global_step, world=trainer.world_size)

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        tell("save", step=trainer.global_step)


def loader(samples, batch_size, shuffle):
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sum(1, keepdim=True), torch.arange(samples))
    return DataLoader(data, batch_size, shuffle=shuffle)


def main():
    job = json.loads(Path("job.json").read_text())
    treadle.seed_everything(7)
    every = job["every_n_train_steps"]
    saving = ModelCheckpoint("ckpt", save_top_k=-1, every_n_train_steps=every, async_save=job["async_save"])
    tell("connect")
    if RANK == "1":
        time.sleep(job["late"])
    trainer = treadle.Trainer(
        devices="auto",
        strategy=job["strategy"],
        max_epochs=job["epochs"],
        step_micro_batches=job["step_micro_batches"],
        callbacks=[saving, Moments()],
        **FLAGS,
    )
    task = Told(job["pause"])
    trainer.fit(task, loader(job["samples"], job["batch_size"], True), loader(8, 4, False), ckpt_path="auto")
    write_end(trainer, task, int(RANK))
    if MACHINE in job["wait_at_the_end"] and not Path("waited").exists():
        Path("waited").touch()
        tell("waits")
        time.sleep(60)
    tell("done")


if __name__ == "__main__":
    main()
