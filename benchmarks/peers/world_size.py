"""Resume with a different number of processes: 24 samples, saved by two processes at step 3, and resumed by one.

Both jobs have batches of 2 per process. What the two processes saw before the save and what the one saw after it are
counted: each sample of the epoch should occur once. A loop with Accelerate skips the samples that were used, and is
also tried with the sampler that is seeded by epoch; Treadle's loader continues behind them.
"""

from __future__ import annotations

import sys
from collections import Counter
from importlib import import_module
from types import ModuleType

import torch

from common import (
    Found,
    Model,
    Samples,
    count,
    expect_success,
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

LENGTH, BATCH, SAVED = 24, 2, 3


def judge(seen: Counter[int]) -> Found:
    repeated, lost = sum(times - 1 for times in seen.values()), LENGTH - len(seen)
    cell = {
        (False, False): "each sample once",
        (True, False): "repeats samples",
        (False, True): "loses samples",
        (True, True): "repeats and loses samples",
    }[repeated > 0, lost > 0]
    return cell, f"{repeated} of {LENGTH} samples repeated, {lost} lost"


def start(api: str) -> None:
    expect_success(on_two_processes(__file__, sys.argv[1], api))


def fit(L: ModuleType, devices: int, ckpt_path: str | None = None) -> None:
    L.seed_everything(0)
    model, strategy = Model(), "ddp" if devices == 2 else "auto"
    saves = import_module(f"{L.__name__}.callbacks").ModelCheckpoint(
        ".", "{step}", every_n_train_steps=SAVED, save_top_k=-1
    )
    flags = {"enable_checkpointing": True, "callbacks": [saves]} if devices == 2 else {}
    trainer = make_trainer(L, devices=devices, strategy=strategy, max_epochs=1, **flags)
    trainer.fit(make_task(L, model), load(Samples(LENGTH), BATCH, shuffle=True), ckpt_path=ckpt_path)
    seen = model.seen[True]
    write_rank(trainer.global_rank if devices == 2 else 2, seen[:SAVED] if devices == 2 else seen)


def loop(A: ModuleType, resume: bool, seedable: bool = False) -> None:
    A.utils.set_seed(0)
    loading = A.utils.DataLoaderConfiguration(use_seedable_sampler=seedable)
    accelerator, model = A.Accelerator(cpu=True, dataloader_config=loading), Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, load(Samples(LENGTH), BATCH, shuffle=True))
    loader.set_epoch(0)
    if resume:
        accelerator.load_state("state")
        loader = loader if A.__name__ == "treadle" else A.skip_first_batches(loader, 2 * SAVED)
    for step, batch in enumerate(loader, 1):
        accelerator.backward(prepared(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
        if step == SAVED and not resume:
            accelerator.save_state("state")
            break
    write_rank(2 if resume else accelerator.process_index, model.seen[True])


def train(resume: bool) -> None:
    model = Model()
    flags = {"num_train_epochs": 1, "per_device_train_batch_size": BATCH, "save_strategy": "steps", "save_steps": SAVED}
    trainer = make_hf_trainer(model, Samples(LENGTH), flags)
    trainer.train(resume_from_checkpoint=f"hf/checkpoint-{SAVED}" if resume else None)
    write_rank(2 if resume else trainer.args.process_index, model.seen[True] if resume else model.seen[True][:SAVED])


def resume(api: str) -> Found:
    start(api)
    if api == "hf":
        train(True)
    elif api == "trainer":
        fit(import_library(sys.argv[1]), 1, f"step={SAVED}.ckpt")
    else:
        loop(import_library(sys.argv[1]), True, api == "seedable")
    return judge(sum((count(rank) for rank in read_ranks()), Counter()))


def resume_loop() -> Found:
    cell, seen = resume("loop")
    if sys.argv[1] == "treadle":
        return cell, seen
    better, better_seen = resume("seedable")
    option = "with `use_seedable_sampler=True`"
    return (cell if better == cell else f"{cell}; {option}, {better}"), f"{seen}; {option}: {better_seen}"


if __name__ == "__main__":
    if len(sys.argv) == 2:
        report(lambda _: resume("trainer"), lambda _: resume_loop(), lambda: resume("hf"))
    elif sys.argv[2] == "hf":
        train(False)
    elif sys.argv[2] == "trainer":
        fit(import_library(sys.argv[1]), 2)
    else:
        loop(import_library(sys.argv[1]), False, sys.argv[2] == "seedable")
