"""SIGTERM while a model trains, with the defaults: is a checkpoint left, and which exit status?"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import torch

from common import Found, Model, Samples, import_library, load, make_hf_trainer, make_task, make_trainer, report

STEPS, STOPPED = 400, 5


class Stopped(Model):
    """Sends SIGTERM to its own process in its fifth forward pass, as a cluster would."""

    def forward(self, index: torch.Tensor, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if len(self.seen[True]) == STOPPED - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().forward(index, x, labels)


def fit(L: ModuleType) -> None:
    make_trainer(L, enable_checkpointing=True, max_steps=STEPS).fit(make_task(L, Stopped()), load(Samples(800), 2))


def loop(A: ModuleType) -> None:
    accelerator, model = A.Accelerator(cpu=True), Stopped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer, loader = accelerator.prepare(model, optimizer, load(Samples(800), 2))
    for batch in loader:
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()


def train(**flags) -> None:
    saves = {"save_strategy": "epoch", "max_steps": STEPS, "per_device_train_batch_size": 2}
    make_hf_trainer(Stopped(), Samples(800), saves | flags).train()


def judge(api: str, folder: str = "default") -> tuple[str, str]:
    """Return how a process ended, as words, and what was seen."""
    Path(folder).mkdir()
    command = [sys.executable, __file__, sys.argv[1], api]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240)
    saved = sorted(
        str(path.relative_to(folder))
        for path in Path(folder).rglob("*")
        if "checkpoint" in path.name.lower() or path.suffix == ".ckpt"
    )
    seen = f"exit status {done.returncode}, files: {', '.join(saved) or 'none'}"
    if done.returncode < 0:
        return "terminates" + (" after saving" if saved else " without saving"), seen
    if done.returncode not in (0, 128 + signal.SIGTERM):
        raise RuntimeError(f"{api} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return f"saves and exits with {done.returncode}" if saved else f"exits with {done.returncode} without saving", seen


def hf() -> Found:
    (cell, seen), (jit, jit_seen) = judge("hf"), judge("hf-jit", "jit")
    if cell == jit:
        return cell, seen
    return f"{cell}; with `enable_jit_checkpoint=True`, {jit}", f"{seen}; with enable_jit_checkpoint: {jit_seen}"


if __name__ == "__main__":
    if len(sys.argv) == 2:
        report(lambda _: judge("trainer"), None if sys.argv[1] == "treadle" else lambda _: judge("loop"), hf)
    elif sys.argv[2].startswith("hf"):
        train(**{"enable_jit_checkpoint": True} if sys.argv[2] == "hf-jit" else {})
    else:
        (fit if sys.argv[2] == "trainer" else loop)(import_library(sys.argv[1]))
