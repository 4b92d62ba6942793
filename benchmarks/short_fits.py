"""Measure one short fit in a process that has loaded much, such as a test suite or a search.

    python benchmarks/short_fits.py                     the table
    python benchmarks/short_fits.py --fits 70 --steps 5 --json short_fits.json

Each library runs in its own processes, together with torch, scikit-learn, pandas and transformers, those that are
installed: a garbage collection scans what is loaded. A process makes one fit that is not counted, and then ``--fits``
of them, each with its own model, optimizer, dataloader and Trainer. The libraries take turns, and a ratio is the median
of the ratios to Lightning's time in the same round.

"Nothing on" is what a test of a training step asks for; "defaults" is a Trainer without arguments: logger, checkpoints,
progress bar, summary.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from overhead import OFF, environment, installed, make_loader, make_task, silence

LOADED = (
    "sklearn.ensemble",
    "pandas",
    "scipy.stats",
    "transformers.trainer_utils",
    "datasets",
    "torchmetrics",
    "mlflow",
)
LIBRARIES = {"Treadle": "treadle", "Lightning": "lightning.pytorch"}
ARMS = {"nothing on": {**OFF, "enable_model_summary": False}, "defaults": {}}


def fit(name: str, steps: int, folder: str, options: dict[str, bool]) -> None:
    library = importlib.import_module(name)
    trainer = library.Trainer(max_steps=steps, accelerator="cpu", devices=1, default_root_dir=folder, **options)
    trainer.fit(make_task(library, logs=True), make_loader(steps), make_loader(2))


def measure(name: str, arm: str, fits: int, steps: int) -> float:
    """Return the seconds per fit. Runs in its own process."""
    import torch

    torch.set_num_threads(1)
    for module in LOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    with silence(), tempfile.TemporaryDirectory() as folder:
        fit(name, steps, folder, ARMS[arm])
        start = time.perf_counter()
        for _ in range(fits):
            fit(name, steps, folder, ARMS[arm])
        return (time.perf_counter() - start) / fits


def in_a_process(name: str, arm: str, fits: int, steps: int) -> float:
    command = [sys.executable, __file__, "--measure", name, arm, "--fits", str(fits), "--steps", str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        sys.exit(f"{name}, {arm}: exit status {done.returncode}\n{done.stderr}")
    return float(done.stdout.splitlines()[-1])


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--fits", type=int, default=50, help="fits per process")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps per fit")
    parser.add_argument("--rounds", type=int, default=3, help="how often every library takes its turn")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every round's numbers here")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    if args.measure:
        print(measure(*args.measure, args.fits, args.steps))
        return
    libraries = {name: module for name, module in LIBRARIES.items() if installed(module.partition(".")[0])}
    loaded = [name for name in LOADED if installed(name.partition(".")[0])]
    print("\n".join(f"{key:<12}{value}" for key, value in environment().items()))
    print(f"{'loaded':<12}{', '.join(loaded)}\n\n{'':<28}{'ms/fit':>9}{'x Lightning':>13}   min - max")
    results: dict[str, list[float]] = {f"{name}, {arm}": [] for arm in ARMS for name in libraries}
    for _ in range(args.rounds):
        for arm in ARMS:
            for name, module in libraries.items():
                results[f"{name}, {arm}"].append(in_a_process(module, arm, args.fits, args.steps))
    for arm in ARMS:
        for name in libraries:
            times = results[f"{name}, {arm}"]
            peers = results.get(f"Lightning, {arm}", [])
            ratios = [mine / peer for mine, peer in zip(times, peers, strict=False)]
            ratio = f"{statistics.median(ratios):>13.2f}   {min(ratios):.2f} - {max(ratios):.2f}" if ratios else ""
            print(f"{name + ', ' + arm:<28}{1000 * statistics.median(times):>9.1f}{ratio}")
    print(f"\n{args.fits} fits of {args.steps} steps and a validation, {args.rounds} rounds; wall time, one thread.")
    if args.json:
        args.json.write_text(json.dumps({"environment": environment(), "seconds per fit": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
