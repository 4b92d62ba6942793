"""The training that `fault_cells` disturbs: two processes, three epochs of four steps, each validated and saved.

What is to happen, and where, is in ``strike.json`` of the working directory; what has happened is told in files beside
it. This file is run as a script by every launcher, and once more to resume.
"""

import ctypes
import hashlib
import json
import os
import signal
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from treadle.callbacks import ModelCheckpoint

import treadle
from treadle.testing.faults import Fault, FaultPlan

STEPS, STEPS_PER_EPOCH = 12, 4
FLAGS = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
FLAGS |= {"num_sanity_val_steps": 0, "log_every_n_steps": 1}
# Point and optimizer step. A save on rank zero is struck with half of a file written; the others write nothing.
POINTS = {
    "setup": ("callback:setup:before", 0),
    "first step": ("backward:before", 1),
    "mid-epoch": ("backward:before", 6),
    "validation": ("callback:on_validation_batch_start:before", 8),
    "last validation": ("callback:on_validation_batch_start:before", 12),
    "save": ("callback:on_save_checkpoint:before", 8),
    "teardown": ("callback:teardown:before", 12),
}
POINTS |= dict.fromkeys(("busy peer", "peer in C"), POINTS["mid-epoch"])  # what the other rank does meanwhile, alone
HALF_WRITTEN = {"ddp": ("disk:write_stream:half", 8), "fsdp": ("disk:write_tensors:half", 8)}


class Task(treadle.TaskModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def get_role():
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "supervisor"))


def note_pid(*_):
    Path("pids").mkdir(exist_ok=True)
    Path("pids", str(os.getpid())).write_text(get_role())


def loader(samples, shuffle):
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    return DataLoader(data, 4, shuffle=shuffle, num_workers=1, worker_init_fn=note_pid)


class Strike:
    """What happens to this process, or what it lets the test do to it.

    Args:
        plan: point, rank and action as in ``strike.json``.
    """

    def __init__(self, plan):
        self.plan = plan
        self.rank = int(role) if (role := get_role()) != "supervisor" else -1

    def arm(self):
        """The context of the fit, in which the fault strikes."""
        point = self.plan.get("point")
        if point not in POINTS or self.rank < 0:
            return nullcontext()
        place, step = (
            HALF_WRITTEN[self.plan["strategy"]] if point == "save" and self.plan["rank"] == 0 else POINTS[point]
        )
        faults = [Fault(place, self.happen, rank=self.plan["rank"], step=step)]
        if point in BUSY:
            faults.append(Fault(place, self.be_busy, rank=1 - self.plan["rank"], step=step))
        return FaultPlan(faults)

    def be_busy(self, firing):
        """Be the other rank, which the fault finds at work."""
        Path("busy").touch()
        BUSY[self.plan["point"]]()

    def happen(self, firing=None):
        """Tell that it is about to happen, exactly once, and do it."""
        while self.plan["point"] in BUSY and not os.path.exists("busy"):
            time.sleep(0.005)
        done = 0 if firing is None else firing.step - (self.plan["point"] in ("mid-epoch", *BUSY))
        words = {"time": time.monotonic(), "pid": os.getpid(), "steps": done}
        with open("fired.part", "x") as file:  # a second firing is an error
            json.dump(words, file)
        os.link("fired.part", "fired")
        ACTIONS[self.plan["action"]]()


def wait_for_signals():
    """The test sends them; what Python's handlers raise passes."""
    end = time.monotonic() + 20
    while not os.path.exists("sent") and time.monotonic() < end:
        time.sleep(0.005)
    time.sleep(0.05)


def fail():
    raise RuntimeError("the planned fault")


def sleep():
    while True:
        time.sleep(3600)


def lock_twice():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def lock_in_c():
    """Hang in C code without the GIL, in a call that no signal interrupts."""
    mutex = ctypes.create_string_buffer(64)
    ctypes.CDLL(None).pthread_mutex_lock(mutex)
    ctypes.CDLL(None).pthread_mutex_lock(mutex)


BUSY = {"busy peer": sleep, "peer in C": lock_in_c}
ACTIONS = {
    "raise": fail,
    "exit 0": lambda: os._exit(0),
    "exit 3": lambda: os._exit(3),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSEGV": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "sleep": sleep,
    "lock": lock_twice,
    "in C": lambda: ctypes.PyDLL(None).sleep(3600),  # with the GIL: no thread of this process runs Python
    "wait": wait_for_signals,
}


def write_end(trainer, task, rank):
    """Leave the last step and the digest of the weights in ``done-RANK``."""
    weights = hashlib.sha256()
    for parameter in task.parameters():
        local = getattr(parameter, "to_local", lambda p=parameter: p)()
        weights.update(local.detach().numpy().tobytes())
    words = {"step": trainer.global_step, "weights": weights.hexdigest()}
    Path(f"done-{rank}").write_text(json.dumps(words))


def main():
    note_pid()
    os.makedirs("ckpt", exist_ok=True)
    job = json.loads(Path("strike.json").read_text())
    strike = Strike(job)
    treadle.seed_everything(7)
    saving = ModelCheckpoint(
        "ckpt", save_top_k=-1, every_n_train_steps=STEPS_PER_EPOCH, save_on_exception=bool(job.get("save_on_exception"))
    )
    trainer = treadle.Trainer(
        devices=2,
        strategy=job["strategy"],
        max_epochs=STEPS // STEPS_PER_EPOCH,
        callbacks=[saving],
        **FLAGS,
        timeout={"seconds": job["timeout"]},
    )
    task = Task()
    with strike.arm():
        trainer.fit(task, loader(32, True), loader(16, False), ckpt_path="auto")
    if job.get("point") == "after fit" and job["rank"] == strike.rank:
        strike.happen()
    write_end(trainer, task, strike.rank)


if __name__ == "__main__":
    main()
