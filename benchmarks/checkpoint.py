"""Measure how long a run stops to save and to load its state, and the memory needed, for Treadle and other libraries.

The state is that of a model and its AdamW, written and read by one process. Each library has its own process. Every
round first writes the same number of bytes plainly (and fsyncs them), and then with a digest of them beside the write,
so each ratio is of two neighbouring times on the same disk. "treadle, file" is a checkpoint of the Trainer, "treadle"
one of the Accelerator, a directory. Peak memory is the memory beyond the state itself, as multiples of it: private
memory of the process (RssAnon), sampled; pages of mapped files, which the system takes back when it needs them, are
counted separately.

    python benchmarks/checkpoint.py                  # 1 GB
    python benchmarks/checkpoint.py --mb 100 --rounds 3
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from xxhash import xxh3_128

WIDTH = 1024
LIBRARIES = ("treadle, file", "treadle", "torch.save", "DCP", "Lightning")


class Stack(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    tensors = [*model.state_dict().values(), *(v for s in optimizer.state.values() for v in s.values())]
    return sum(t.nbytes for t in tensors)


class Peak:
    """Peak memory within the context, in bytes: private memory, and with mapped files."""

    def __enter__(self) -> Peak:
        gc.collect()
        self.start, self.own, self.all = self._now(), 0, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            own, mapped = self._now()
            self.own = max(self.own, own - self.start[0])
            self.all = max(self.all, own + mapped - sum(self.start))

    @staticmethod
    def _now() -> tuple[int, int]:
        lines = Path("/proc/self/status").read_text().splitlines()
        found = {key: 1024 * int(line.split()[1]) for line in lines if (key := line.split(":")[0]).startswith("Rss")}
        return found["RssAnon"] + found["RssShmem"], found["RssFile"]


def plainly(path: Path, data: memoryview, digest: bool = False) -> float:
    """Return the seconds to write a number of bytes to disk."""
    clock, hashed = time.perf_counter(), xxh3_128()
    with path.open("wb", buffering=0) as file:
        for start in range(0, len(data), 2**22):
            if digest:
                hashed.update(data[start : start + 2**22])
            file.write(data[start : start + 2**22])
        os.fsync(file.fileno())
    seconds = time.perf_counter() - clock
    path.unlink()
    return seconds


def synced(path: Path) -> None:
    """Flush to disk the files that a library leaves in the system's cache, as the other libraries do."""
    for file in [path] if path.is_file() else path.rglob("*"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


Operations = dict[str, Callable[[Path], Any]]


def with_treadle(model: nn.Module, optimizer: torch.optim.Optimizer) -> Operations:
    import treadle

    accelerator = treadle.Accelerator(cpu=True)
    accelerator.prepare(model, optimizer)
    return {
        "save": accelerator.save_state,
        "load": accelerator.load_state,
        "start": lambda path: accelerator.save_state(path, blocking=False),
        "finish": lambda _: accelerator.finish_saving(),
    }


def with_one_file(model: nn.Module, optimizer: torch.optim.Optimizer) -> Operations:
    from treadle.engine.checkpoint import FileSave, lay_out

    import treadle

    accelerator = treadle.Accelerator(cpu=True)
    accelerator.prepare(model, optimizer)

    def choose(files: Any, left_out: Any) -> Any:
        layout = lay_out(files, {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()]})
        return lambda target, writer: FileSave(target, writer, layout)

    def save(path: Path, **options: Any) -> None:
        accelerator.checkpointer.save_state(path, choose_save=choose, **options)

    return {
        "save": save,
        "load": accelerator.load_state,
        "start": lambda path: save(path, blocking=False),
        "finish": lambda _: accelerator.finish_saving(),
    }


def with_torch(model: nn.Module, optimizer: torch.optim.Optimizer) -> Operations:
    def save(path: Path) -> None:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        synced(path)

    def load(path: Path) -> None:
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    return {"save": save, "load": load}


def with_dcp(model: nn.Module, optimizer: torch.optim.Optimizer) -> Operations:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    pending: list[Any] = []

    def state() -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments}

    def load(path: Path) -> None:
        target = state()
        dcp.load(target, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=target["model"], optim_state_dict=target["optimizer"])

    return {
        "save": lambda path: dcp.save(state(), checkpoint_id=path),
        "load": load,
        "start": lambda path: pending.append(dcp.async_save(state(), checkpoint_id=path)),
        "finish": lambda _: pending.pop().result(),
    }


def with_lightning(model: nn.Module, optimizer: torch.optim.Optimizer) -> Operations:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    state = dict(zip(("model", "optimizer"), fabric.setup(model, optimizer), strict=True))

    def save(path: Path) -> None:
        fabric.save(path, state)
        synced(path)

    return {"save": save, "load": lambda path: fabric.load(path, state)}


WITH = dict(zip(LIBRARIES, (with_one_file, with_treadle, with_torch, with_dcp, with_lightning), strict=True))


def timed(operation: Callable[[Path], Any], path: Path) -> float:
    clock = time.perf_counter()
    operation(path)
    return time.perf_counter() - clock


def one(library: str, layers: int, rounds: int, folder: Path) -> None:
    """Run the measurements of a child process and print its numbers as JSON."""
    model = Stack(layers)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    size = state_bytes(model, optimizer)
    data = memoryview(torch.randint(256, (size,), dtype=torch.uint8).numpy())
    operations = WITH[library](model, optimizer)
    found: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        found.setdefault(name, []).append(value)

    for number in range(rounds + 1):
        raw = plainly(folder / "raw", data)
        digested = plainly(folder / "raw", data, digest=True)
        path = folder / f"save-{number}"
        save = timed(operations["save"], path)
        load = timed(operations["load"], path)
        if number:  # the first one warms up
            note("raw_s", raw)
            note("save_s", save)
            note("save", save / raw)
            note("save_digested", save / digested)
            note("load_s", load)
            note("load", load / raw)
        if "start" in operations:
            beside = folder / f"async-{number}"
            stall = timed(operations["start"], beside)
            rest = timed(operations["finish"], beside)
            if number:
                note("stall_s", stall)
                note("stall", stall / save)
                note("async_s", stall + rest)
            else:
                note("first_stall_s", stall)
            shutil.rmtree(beside) if beside.is_dir() else beside.unlink()
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    del data
    path = folder / "memory"
    for name in ("save", "load"):
        with Peak() as peak:
            operations[name](path)
        note(f"{name}_own", peak.own / size)
        note(f"{name}_all", peak.all / size)
    spread = {name: (min(values), max(values)) for name, values in found.items()}
    print(json.dumps({"size": size, "median": {n: statistics.median(v) for n, v in found.items()}, "spread": spread}))


def cell(result: dict[str, Any], name: str) -> str:
    if name not in result["median"]:
        return "-"
    low, high = result["spread"][name]
    return f"{result['median'][name]:.2f} ({low:.2f} - {high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=1024, help="size of the state (default: 1024)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=None, help="where to write (default: the temporary folder)")
    parser.add_argument("--one", default=None, help=argparse.SUPPRESS)
    given = parser.parse_args()
    layers = max(1, round(given.mb * 2**20 / (3 * 4 * WIDTH * (WIDTH + 1))))
    if given.one:
        one(given.one, layers, given.rounds, Path(given.folder))
        return
    rows = {}
    for library in LIBRARIES:
        if library == "Lightning" and importlib.util.find_spec("lightning") is None:
            continue
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            command = [sys.executable, __file__, "--one", library, "--mb", str(given.mb)]
            command += ["--rounds", str(given.rounds), "--folder", folder]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{library}: {done.stderr}")
        rows[library] = json.loads(done.stdout.splitlines()[-1])
    size = next(iter(rows.values()))["size"]
    print(f"{size / 2**20:.0f} MiB; x is the time of writing as many bytes plainly; {given.rounds} rounds\n")
    heads = "save, x | save, x with digest | load, x | save, s | load, s | async: stall, x save | stall, s | in all, s"
    print(f"| | {heads} | first stall, s |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for library, result in rows.items():
        names = ("save", "save_digested", "load", "save_s", "load_s", "stall", "stall_s", "async_s", "first_stall_s")
        print(f"| {library} | " + " | ".join(cell(result, name) for name in names) + " |")
    print("\n| peak memory beside the state, x its size | saving | with mapped files | loading | with mapped files |")
    print("|---|---|---|---|---|")
    for library, result in rows.items():
        names = ("save_own", "save_all", "load_own", "load_all")
        print(f"| {library} | " + " | ".join(f"{result['median'][name]:.2f}" for name in names) + " |")


if __name__ == "__main__":
    main()
