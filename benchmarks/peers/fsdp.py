"""FSDP on two CPU processes, asked for as each library asks for it: does it train, and are the parameters sharded?"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
from torch import nn

from common import (
    Found,
    Model,
    Samples,
    import_library,
    load,
    make_hf_trainer,
    make_task,
    make_trainer,
    on_two_processes,
    read_ranks,
    report,
    write_rank,
)

ALL = sum(value.numel() for value in Model().parameters())


def count_local(model: nn.Module) -> int:
    """Count the numbers of parameters that this process holds."""
    return sum(getattr(value, "_local_tensor", value).numel() for value in model.parameters())


def fit(L: ModuleType) -> None:
    model = Model()
    held: list[int] = []

    class Count(L.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            held.append(count_local(trainer.model))

    trainer = make_trainer(L, [Count()], devices=2, strategy="fsdp", max_steps=2)
    trainer.fit(make_task(L, model), load(Samples(8), 2))
    write_rank(trainer.global_rank, held[-1])


def loop(A: ModuleType) -> None:
    accelerator = A.Accelerator(cpu=True, fsdp_plugin=A.FullyShardedDataParallelPlugin(fsdp_version=2))
    model = Model()
    model = accelerator.prepare(model)
    optimizer, loader = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.05), load(Samples(8), 2))
    for batch in loader:
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
    write_rank(accelerator.process_index, count_local(model))


def train() -> None:
    trainer = make_hf_trainer(
        Model(), Samples(8), {"fsdp": "full_shard", "max_steps": 2, "per_device_train_batch_size": 2}
    )
    trainer.train()
    write_rank(trainer.args.process_index, count_local(trainer.model_wrapped))


def judge(api: str) -> Found:
    done = on_two_processes(__file__, sys.argv[1], api)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if "Error: " in line or "Exception: " in line]
        return "raises an error", (said[0].split("]: ")[-1].strip()[:160] if said else done.stderr[-1500:])
    held = read_ranks()
    cell = "yes" if sum(held) < 2 * ALL else "trains without FSDP"
    return cell, f"trained; the ranks hold {' and '.join(map(str, held))} of {ALL} parameters"


if __name__ == "__main__":
    if len(sys.argv) == 2:
        report(lambda _: judge("trainer"), lambda _: judge("loop"), lambda: judge("hf"))
    elif sys.argv[2] == "hf":
        train()
    else:
        (fit if sys.argv[2] == "trainer" else loop)(import_library(sys.argv[1]))
