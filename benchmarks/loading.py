"""Measure how many samples per second a prepared dataloader yields, beside the bare one.

    python benchmarks/loading.py
    python benchmarks/loading.py --samples 50000 --rounds 7

CPU time includes that of the workers. The two dataloaders take turns, epoch by epoch, and a ratio is the median of the
ratios within a round. The datasets return a row of a tensor, which takes a few microseconds, so that the work around it
is visible; the augmented one also draws a number from one of the global generators.
"""

from __future__ import annotations

import argparse
import random
import resource
import statistics
import time
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import treadle


class Rows(Dataset[Any]):
    """Rows of a tensor, with labels."""

    def __init__(self, samples: int) -> None:
        self.rows, self.labels = torch.randn(samples, 8), torch.zeros(samples)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index], self.labels[index]


class TorchNoise(Rows):
    """Rows with noise from torch's default generator."""

    def __getitem__(self, index: int) -> Any:
        return self.rows[index] + torch.randn(8), self.labels[index]


class PythonNoise(Rows):
    """Rows with noise from Python's `random`."""

    def __getitem__(self, index: int) -> Any:
        return self.rows[index] + random.random(), self.labels[index]


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its workers that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def read_epoch(loader: Any) -> tuple[float, float]:
    """Return the CPU and wall seconds of an epoch."""
    cpu, wall = cpu_seconds(), time.perf_counter()
    for _ in loader:
        pass
    return cpu_seconds() - cpu, time.perf_counter() - wall


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| dataset | workers | bare, samples/s | prepared, samples/s | CPU time, x bare | min - max |")
    print("|---|---|---|---|---|---|")
    for kind in (Rows, TorchNoise, PythonNoise):
        dataset = kind(options.samples)
        for workers in (0, 2):
            settings: dict[str, Any] = {"shuffle": True, "num_workers": workers}
            bare = DataLoader(dataset, options.batch_size, **settings)
            prepared = treadle.Accelerator(cpu=True).prepare(DataLoader(dataset, options.batch_size, **settings))
            rounds = [(read_epoch(bare), read_epoch(prepared)) for _ in range(options.rounds + 1)][1:]
            ratios = sorted(ours[0] / theirs[0] for theirs, ours in rounds)
            speeds = [options.samples / statistics.median(r[arm][1] for r in rounds) for arm in (0, 1)]
            print(
                f"| {kind.__name__} | {workers} | {speeds[0]:,.0f} | {speeds[1]:,.0f} | "
                f"{statistics.median(ratios):.2f} | {ratios[0]:.2f} - {ratios[-1]:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
