"""What the programs of this folder share: one model, one dataset, and how Treadle and its peers are asked to train it.

Treadle and Lightning run the same lines, and so do Treadle and Accelerate: only the import differs. Each program is run
as ``python PROGRAM LIBRARY`` in a new folder; its last line of output is the cell of README's table and what was seen.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate

LIBRARIES = ("treadle", "lightning", "accelerate", "transformers")
Found = tuple[str, str]  # the cell, and what was seen


class Samples(Dataset):
    """Samples that know their index, with random transforms on request."""

    def __init__(self, length: int, random: bool = False) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x, self.y = torch.randn(length, 4, generator=generator), torch.randn(length, 1, generator=generator)
        self.random = random

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        x = self.x[index]
        return {"index": index, "x": x + torch.rand(4) if self.random else x, "labels": self.y[index]}


class Model(nn.Module):
    """A regression that notes which samples it saw in training and in evaluation."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Dropout(dropout), nn.Linear(16, 1))
        self.seen: dict[bool, list[list[int]]] = {True: [], False: []}

    def forward(self, index: torch.Tensor, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen[self.training].append(index.tolist())
        logits = self.net(x)
        return {"loss": nn.functional.mse_loss(logits, labels), "logits": logits}

    def weights(self) -> torch.Tensor:
        return torch.cat([value.detach().flatten() for value in self.net.parameters()])


def make_task(L: ModuleType, model: Model) -> Any:
    class Task(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.model(**batch)["loss"]

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", self.model(**batch)["loss"], sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    return Task()


def make_trainer(L: ModuleType, callbacks: Any = None, **flags: Any) -> Any:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    plain = {"accelerator": "cpu", "devices": 1, "enable_checkpointing": False}
    return L.Trainer(callbacks=callbacks, **plain | quiet | flags)


def make_hf_trainer(model: nn.Module, train: Dataset | None = None, flags: Any = (), **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    plain = {"output_dir": "hf", "use_cpu": True, "report_to": "none", "remove_unused_columns": False}
    quiet = {"disable_tqdm": True, "lr_scheduler_type": "constant", "learning_rate": 0.05, "save_strategy": "no"}
    arguments = TrainingArguments(**plain | quiet | {"optim": "sgd", "max_grad_norm": 0.0} | dict(flags))
    return Trainer(model, arguments, data_collator=default_collate, train_dataset=train, **options)


def load(data: Dataset, batch_size: int, shuffle: bool = False) -> DataLoader:
    return DataLoader(data, batch_size, shuffle=shuffle)


def count(batches: list[list[int]]) -> Counter[int]:
    return Counter(index for batch in batches for index in batch)


def on_two_processes(file: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run([*torchrun, file, *arguments], capture_output=True, text=True, timeout=240)


def expect_success(done: subprocess.CompletedProcess[str]) -> None:
    if done.returncode:
        raise RuntimeError(f"{done.args} ended with {done.returncode}:\n{done.stderr[-3000:]}")


def read_ranks() -> list[Any]:
    """Return what the ranks wrote by `write_rank`, in their order."""
    return [json.loads(path.read_text()) for path in sorted(Path().glob("rank-*.json"))]


def write_rank(rank: int, value: Any) -> None:
    Path(f"rank-{rank}.json").write_text(json.dumps(value))


def import_library(library: str) -> ModuleType:
    return importlib.import_module("lightning.pytorch" if library == "lightning" else library)


def print_found(cell: str, seen: str) -> None:
    print(json.dumps({"cell": cell, "seen": seen}))


def merge(texts: tuple[str, ...]) -> str:
    """Return the text of both APIs, or each with its name where they differ."""
    named = zip(("`Trainer`", "`Accelerator`"), texts, strict=False)
    return texts[0] if len(set(texts)) == 1 else "; ".join(f"{name}: {text}" for name, text in named)


def report(trainer: Callable[[ModuleType], Found] | None, loop: Callable[[ModuleType], Found] | None, hf: Any) -> None:
    """Run what the library of the command line has, and print its cell; of Treadle, both APIs."""
    library = sys.argv[1]
    if library == "transformers":
        cell, seen = hf()
    else:
        apis = {"treadle": (trainer, loop), "lightning": (trainer,), "accelerate": (loop,)}[library]
        found = [api(import_library(library)) for api in apis if api is not None]
        cell, seen = (merge(texts) for texts in zip(*found, strict=True))
    print_found(cell, seen)
