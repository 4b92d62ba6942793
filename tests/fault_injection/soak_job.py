"""The training that the soak watches: everything on, one long fit and then many short ones, sampled as it runs.

    soak_job.py OUT --long SECONDS --often SECONDS --count FITS [--leak memory|descriptors|threads|time]

Each rank writes a line of JSON per sample to OUT/PHASE.RANK.jsonl.
"""

import argparse
import ctypes
import gc
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from treadle.callbacks import EarlyStopping, EMAWeightAveraging, LearningRateMonitor, ModelCheckpoint
from treadle.loggers import CSVLogger, TensorBoardLogger

import treadle

EVERY = 1.0  # seconds between samples of the long fit, at least
LEAKED_BYTES = 1024  # per step
SLOWED_LOOPS = 400  # per step and step: a step that searches all earlier ones; 20 were 3 % in 75 s, within noise
_SIZES = ("RssAnon", "VmSwap", "RssShmem")
_leaked = []
# CPython keeps a table of interned strings, and pathlib interns each part of a path. The table has dead entries until
# it is full, and gets the size then that three times its living ones need: with some 87,000 of them, as torch and
# sklearn have, it doubled once in a run, at any time, from 3.8 to 7.7 MB. With as many again it stays as it is.
_interned = [sys.intern(f"string {number}") for number in range(150_000)]


class Digits(treadle.TaskModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)]


class _Mallinfo(ctypes.Structure):
    """What glibc's `mallinfo2` returns."""

    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names)


_libc = ctypes.CDLL(None)
_libc.mallinfo2.restype = _Mallinfo
_libc.malloc.restype = ctypes.c_void_p


def read_malloc():
    """Return the megabytes that were allocated and not freed; how they lie in the heap's pages does not matter."""
    info = _libc.mallinfo2()
    return (info.uordblks + info.hblkhd) / 2**20


def read_memory(pid):
    """Return the megabytes of anonymous and of shared memory of a process, swapped pages included.

    PSS and USS move when a sibling starts or ends, since they divide or omit the pages that a fork shares. These do
    not.
    """
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # a worker that has just ended
        return 0.0, 0.0
    sizes = {name: int(text.partition(f"\n{name}:")[2].split()[0]) / 1024 for name in _SIZES if f"\n{name}:" in text}
    return sizes.get("RssAnon", 0.0) + sizes.get("VmSwap", 0.0), sizes.get("RssShmem", 0.0)


def measure_machine():
    """Return the CPU milliseconds of a fixed piece of work: other processes' load slows it as it slows a step."""
    matrix = torch.ones(96, 96)
    times = []
    for _ in range(5):
        begin = time.thread_time()
        for _ in range(20):
            sum(range(2000))
            matrix @ matrix
        times.append(1000 * (time.thread_time() - begin))
    return statistics.median(times)


def count_blocks(history):
    """Return the blocks of a history's numbers: up to `MOST_POINTS` steps and values of each curve, by design."""
    if history is None:
        return 0
    return 2 * sum(map(len, (*history.curves.values(), *history.rates.values(), history.throughput)))


class Sampler:
    """Writes what this process holds, whenever it is called."""

    def __init__(self, out, phase):
        self.file = (out / f"{phase}.{os.environ.get('RANK', '0')}.jsonl").open("w")
        self.cpu, self.steps = time.process_time(), 0

    def sample(self, steps, checkpoints, history=None):
        cpu = time.process_time()
        per_step = 1000 * (cpu - self.cpu) / max(1, steps - self.steps)
        gc.collect()
        children = [child.pid for child in psutil.Process().children()]
        anonymous, shared = read_memory(os.getpid())
        pids = {str(pid) for pid in (os.getpid(), *children)}
        values = {
            "allocated MB": read_malloc(),
            "rank MB": anonymous,
            "shared MB": shared,
            "workers MB": sum(read_memory(pid)[0] for pid in children),
            "Python blocks": sys.getallocatedblocks() - count_blocks(history),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "children": len(children),
            "shared memory": sum(not pids.isdisjoint(name.split("_")) for name in os.listdir("/dev/shm")),
            "temp files": sum(len(names) + len(folders) for _, folders, names in os.walk(tempfile.gettempdir())),
            "checkpoints": len(list(checkpoints.glob("*.ckpt"))) if checkpoints.is_dir() else 0,
            "CPU ms per step": per_step,
            "CPU of a step by machine": per_step / measure_machine(),
        }
        self.file.write(json.dumps(values) + "\n")
        self.file.flush()
        self.cpu, self.steps = time.process_time(), steps  # the sample itself costs CPU time too


class Watch(treadle.Callback):
    """Samples a long fit after validations."""

    def __init__(self, sampler, checkpoints):
        self.sampler, self.checkpoints, self.last = sampler, checkpoints, 0.0

    def on_train_epoch_end(self, trainer, pl_module):
        if time.monotonic() - self.last >= EVERY:
            self.last = time.monotonic()
            self.sampler.sample(trainer.global_step, self.checkpoints, trainer.history)


class Leak(treadle.Callback):
    """Leaks on every step: a kilobyte of native memory, a descriptor, a thread, or time."""

    def __init__(self, kind):
        self.kind = kind

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self.kind == "memory":
            ctypes.memset(_libc.malloc(ctypes.c_size_t(LEAKED_BYTES)), 1, LEAKED_BYTES)
        elif self.kind == "descriptors" and batch_idx % 16 == 0:
            _leaked.append(os.open(os.devnull, os.O_RDONLY))
        elif self.kind == "threads" and batch_idx % 16 == 0:
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        elif self.kind == "time":
            sum(range(SLOWED_LOOPS * trainer.global_step))


def make_trainer(folder, callbacks, **flags):
    saved = folder / "checkpoints"
    return treadle.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        strategy="ddp" if "RANK" in os.environ else "auto",
        precision="bf16-mixed",
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        timeout={"seconds": 120},
        log_every_n_steps=5,
        profiler="simple",
        logger=[CSVLogger(folder, name="csv"), TensorBoardLogger(folder, name="tensorboard")],
        callbacks=[
            ModelCheckpoint(saved, "sync-{step}", monitor="val_loss", save_top_k=2, save_last=True),
            ModelCheckpoint(saved, "async-{step}", every_n_train_steps=7, async_save=True),
            EarlyStopping("val_loss", patience=10**6),
            LearningRateMonitor(),
            EMAWeightAveraging(),
            *callbacks,
        ],
        default_root_dir=folder,
        **flags,
    )


def make_loaders():
    digits = load_digits()
    images, labels = torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target)
    options = {"num_workers": 2, "persistent_workers": True}
    train = DataLoader(TensorDataset(images[:1024], labels[:1024]), 16, shuffle=True, **options)
    return train, DataLoader(TensorDataset(images[1024:1280], labels[1024:1280]), 32, **options)


def fit_long(out, seconds, leak):
    sampler = Sampler(out, "long")
    folder = out / "long"
    watch = Watch(sampler, folder / "checkpoints")
    callbacks = [watch, Leak(leak)] if leak else [watch]
    trainer = make_trainer(folder, callbacks, max_epochs=-1, max_time={"seconds": seconds}, num_sanity_val_steps=0)
    trainer.fit(Digits(), *make_loaders())


def fit_often(out, seconds, count):
    """Fit again and again: `count` times, or for `seconds`, which the ranks agree on by rank zero's clock."""
    sampler = Sampler(out, "fits")
    begin, steps, number = time.monotonic(), 0, 0
    while True:
        folder = out / f"fit-{number}"
        trainer = make_trainer(folder, [], max_epochs=2, num_sanity_val_steps=1, limit_train_batches=8)
        trainer.fit(Digits(), *make_loaders())
        steps, number = steps + trainer.global_step, number + 1
        last = trainer.strategy.broadcast(number == count or (count == 0 and time.monotonic() - begin > seconds))
        is_first = trainer.is_global_zero
        del trainer
        sampler.sample(steps, folder / "checkpoints")
        if is_first:
            shutil.rmtree(folder)
        if last:
            return


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--long", type=int, default=0)
    parser.add_argument("--often", type=int, default=0)
    parser.add_argument("--count", type=int, default=0)
    parser.add_argument("--leak", default="")
    options = parser.parse_args()
    if options.long:
        fit_long(options.out, options.long, options.leak)
    if options.often or options.count:
        fit_often(options.out, options.often, options.count)


if __name__ == "__main__":
    main()
