"""Measure what a resume of `fit` reads before its first step: bytes hashed, manifests parsed, seconds.

The state is that of a model and its Adam, saved once by one process. Every kind of resume then runs in fresh processes,
one or two (DDP over gloo). "Cold" is timed after the checkpoint's pages were dropped from the system's cache; processor
time is that of all ranks, with the pages in the cache.

    python benchmarks/resume.py                  # 1 GB
    python benchmarks/resume.py --mb 100 --rounds 3
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WIDTH = 1024
KINDS = ("path", "last", "auto", "best", "validate")


def made(folder: Path, layers: int, steps: int) -> tuple[Any, Any, Any]:
    """Return a Trainer, its task and its data. The checkpoint callback saves in ``folder``."""
    from treadle.callbacks import ModelCheckpoint

    import treadle

    class Task(treadle.TaskModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            loss = self.layers(batch[0]).square().mean()
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", self.layers(batch[0]).square().mean())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=1e-5)

    world = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = treadle.Trainer(
        accelerator="cpu",
        strategy="ddp" if world > 1 else "auto",
        devices=world,
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=1,
        callbacks=[ModelCheckpoint(folder, "{step}", monitor="loss", every_n_train_steps=1, save_top_k=-1)],
    )
    return trainer, Task(), DataLoader(TensorDataset(torch.randn(8, WIDTH)), batch_size=2 // world)


class Counts:
    """Counters of what this process reads of checkpoints from now on."""

    def __init__(self) -> None:
        from treadle.engine.checkpoint import filesystem, parts

        self.hashed = self.parsed = 0
        digest, parse = filesystem.xxh3_128, parts._parse

        class Counting:
            def __init__(inner, data: bytes = b"") -> None:
                inner.digest = digest(data)
                self.hashed += len(data)

            def update(inner, data: Any) -> None:
                inner.digest.update(data)
                self.hashed += len(data)

            def hexdigest(inner) -> str:
                return inner.digest.hexdigest()

        def counting(document: Any) -> Any:
            self.parsed += 1
            return parse(document)

        filesystem.xxh3_128, parts._parse = Counting, counting


class Begun(Exception):
    """Exception that ends a run once everything is restored, before its next step."""


def resume(kind: str, folder: Path, layers: int) -> None:
    """Run the resume of a child process and print its results as JSON."""
    from treadle.callbacks import LambdaCallback

    trainer, task, data = made(folder, layers, steps=2)
    torch.optim.Adam([nn.Parameter(torch.zeros(1))])  # the first one imports for a second
    counts, found = Counts(), {}

    def begun(*_: Any) -> None:
        found.update(
            seconds=time.perf_counter() - clock,
            cpu=time.process_time() - used,
            hashed=counts.hashed,
            parsed=counts.parsed,
        )
        raise Begun

    trainer.callbacks.append(LambdaCallback(on_train_start=begun, on_validation_start=begun))
    path = str(folder / "step=1.ckpt") if kind in ("path", "validate") else kind
    clock, used = time.perf_counter(), time.process_time()
    try:
        if kind == "validate":
            trainer.validate(task, data, ckpt_path=path)
        else:
            trainer.fit(task, data, data, ckpt_path=path)
    except Begun:
        print(json.dumps({"rank": trainer.global_rank, **found}), flush=True)


def drop(folder: Path) -> None:
    """Drop a folder's pages from the system's cache."""
    os.sync()
    for file in folder.rglob("*.*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def processes(kind: str, folder: Path, layers: int, world: int) -> list[dict[str, Any]]:
    """Run one resume and return the results of each rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, "--one", kind, "--folder", str(folder), "--layers", str(layers)]
    ranks = []
    for rank in range(world):
        env = {**os.environ, "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // world))}
        if world > 1:
            env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
            env |= {"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    found = []
    for process in ranks:
        out, error = process.communicate()
        lines = [line for line in out.splitlines() if line.startswith('{"rank"')]
        if not lines:
            sys.exit(f"{kind}: {error}")
        found.append(json.loads(lines[-1]))
    return sorted(found, key=lambda one: one["rank"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=1024, help="size of the state (default: 1024)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--folder", default=None, help="where to write (default: the temporary folder)")
    parser.add_argument("--layers", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--one", default=None, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        resume(given.one, Path(given.folder), given.layers)
        return
    layers = max(1, round(given.mb * 2**20 / (3 * 4 * WIDTH * (WIDTH + 1))))
    folder = Path(tempfile.mkdtemp(dir=given.folder))
    try:
        trainer, task, data = made(folder, layers, steps=1)
        trainer.fit(task, data)
        size = sum(file.stat().st_size for file in folder.rglob("*.*") if file.is_file())
        print(f"{size / 2**20:,.0f} MiB on disk; medians of {given.rounds} rounds\n")
        head = "| resume | processes | hashed by rank, x size | manifests parsed by rank | cold, s | cached, s |"
        print(f"{head} processor, s, all ranks |")
        print("|---|---|---|---|---|---|---|")
        for kind in given.kinds:
            for world in (1, 2):
                times: dict[str, list[float]] = {"cold": [], "cached": [], "processor": []}
                for _ in range(given.rounds):
                    drop(folder)
                    for name in ("cold", "cached"):
                        ranks = processes(kind, folder, layers, world)
                        times[name].append(max(one["seconds"] for one in ranks))
                    times["processor"].append(sum(one["cpu"] for one in ranks))
                hashed = " + ".join(f"{one['hashed'] / size:.2f}" for one in ranks)
                parsed = " + ".join(str(one["parsed"]) for one in ranks)
                spent = " | ".join(f"{statistics.median(s):.2f} ({min(s):.2f} - {max(s):.2f})" for s in times.values())
                print(f"| {kind} | {world} | {hashed} | {parsed} | {spent} |", flush=True)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
