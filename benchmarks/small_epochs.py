"""Measure a run of many small epochs, in which the checkpoints at the ends of the epochs are the largest cost.

    python benchmarks/small_epochs.py
    python benchmarks/small_epochs.py --epochs 200 --rounds 5

Each run trains a small regression for 200 epochs of 10 steps, with a validation after each epoch. "Defaults" keeps
each library's default checkpoints (one per epoch) and logger; the progress bar and the summary are disabled. Each run
has a process of its own. "Fit" is the time in ``fit``, which for Treadle includes torch's import of its compiler by the
first optimizer; Lightning's import has done that already, so "process" is measured too. The libraries take turns; a
ratio is the median of the ratios to Lightning's time in the same round.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from overhead import silence

LIBRARIES = {"Treadle": "treadle", "Lightning": "lightning.pytorch"}
ARMS = {"defaults": True, "without checkpoints": False}


def measure(name: str, checkpoints: bool, epochs: int) -> dict[str, float]:
    """Return the CPU and wall seconds of a fit, and the CPU seconds of the process. Runs in its own process."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    library = importlib.import_module(name)
    torch.set_num_threads(1)

    class Regression(library.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 1))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    with silence(), tempfile.TemporaryDirectory() as folder:
        library.seed_everything(0)
        features = torch.randn(442, 10)
        data = TensorDataset(features, features.sum(1, keepdim=True))
        trainer = library.Trainer(
            max_epochs=epochs,
            accelerator="cpu",
            devices=1,
            default_root_dir=folder,
            enable_checkpointing=checkpoints,
            enable_progress_bar=False,
            enable_model_summary=False,
            log_every_n_steps=5,
        )
        wall, cpu = time.perf_counter(), time.process_time()
        trainer.fit(Regression(), DataLoader(data, 45, shuffle=True), DataLoader(data, 442))
        end = time.process_time()
        return {"cpu": end - cpu, "process": end, "wall": time.perf_counter() - wall}


def in_a_process(python: str, name: str, arm: str, epochs: int) -> dict[str, float]:
    """Return the result of `measure` in a new process."""
    command = [python, __file__, "--measure", name, arm, "--epochs", str(epochs)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        sys.exit(f"{name}, {arm}: exit status {done.returncode}\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter that has Lightning")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        name, arm = options.measure
        print(json.dumps(measure(name, ARMS[arm], options.epochs)))
        return
    pythons = {"treadle": sys.executable, "lightning.pytorch": options.peer_python}
    print("| | fit, CPU s | x Lightning | process, CPU s | x Lightning | fit, wall s |\n|---|---|---|---|---|---|")
    for arm in ARMS:
        rounds = [
            {name: in_a_process(pythons[name], name, arm, options.epochs) for name in LIBRARIES.values()}
            for _ in range(options.rounds)
        ]
        for title, name in LIBRARIES.items():
            cells = []
            for clock in ("cpu", "process"):
                ratio = statistics.median(r[name][clock] / r["lightning.pytorch"][clock] for r in rounds)
                cells += [f"{statistics.median(r[name][clock] for r in rounds):.1f}", f"{ratio:.2f}"]
            wall = statistics.median(r[name]["wall"] for r in rounds)
            print(f"| {title}, {arm} | {' | '.join(cells)} | {wall:.1f} |", flush=True)


if __name__ == "__main__":
    main()
