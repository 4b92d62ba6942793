"""Resume in the middle of an epoch: 2 epochs of 6 batches, saved at step 8, with dropout and shuffled data.

Once with fixed samples and once with random transforms; the resumed run is compared with the uninterrupted one.
Lightning is also tried with torchdata's dataloader, whose position it saves, and Accelerate with its sampler that is
seeded by epoch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from common import Found, Model, Samples, count, load, make_hf_trainer, make_task, make_trainer, report

SAVED, STEPS, BATCH = 8, 12, 4


def judge(whole: Model, resumed: Model) -> str:
    if torch.equal(whole.weights(), resumed.weights()):
        return "bit for bit"
    if count(whole.seen[True][SAVED:]) == count(resumed.seen[True]):
        return "each sample once, but not bit for bit"
    return "repeats or loses samples"


def both(run: Callable[[Samples, bool], tuple[Model, Model]], option: str | None) -> Found:
    """Judge a pair of runs with fixed samples, one with random transforms, and a pair with the option for resuming."""
    fixed, random = (judge(*run(Samples(22, random=random), False)) for random in (False, True))
    exact = fixed == "bit for bit" != random
    cell, seen = (
        "bit for bit, unless transforms are random" if exact else random,
        f"fixed samples: {fixed}; random transforms: {random}",
    )
    if option:
        found = judge(*run(Samples(22), True))
        cell, seen = (
            cell if found == cell else f"{cell}; with {option}, {found}",
            f"{seen}; {option}, fixed samples: {found}",
        )
    return cell, seen


def trainer(L: ModuleType) -> Found:
    from importlib import import_module

    ModelCheckpoint = import_module(f"{L.__name__}.callbacks").ModelCheckpoint

    def fit(data: Samples, option: bool, folder: str, ckpt_path: str | None) -> Model:
        L.seed_everything(0)
        model = Model(dropout=0.5)
        saves = ModelCheckpoint(
            folder, "step={step}", every_n_train_steps=SAVED, save_top_k=-1, auto_insert_metric_name=False
        )
        fitted = make_trainer(L, [saves], max_epochs=2, enable_checkpointing=True)
        fitted.fit(
            make_task(L, model),
            (StatefulDataLoader if option else DataLoader)(data, BATCH, shuffle=True),
            ckpt_path=ckpt_path,
        )
        return model

    def run(data: Samples, option: bool) -> tuple[Model, Model]:
        folder = f"saved-{data.random}-{option}"
        whole = fit(data, option, folder, None)
        return whole, fit(data, option, folder + "-resumed", next(map(str, Path(folder).glob("step=8*"))))

    return both(run, None if L.__name__ == "treadle" else "torchdata's `StatefulDataLoader`")


def loop(A: ModuleType) -> Found:
    def train(data: Samples, option: bool, resume: bool) -> Model:
        A.utils.set_seed(0)
        loading = A.utils.DataLoaderConfiguration(use_seedable_sampler=option)
        accelerator, model = A.Accelerator(cpu=True, dataloader_config=loading), Model(dropout=0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        model, optimizer, loader = accelerator.prepare(model, optimizer, load(data, BATCH, shuffle=True))
        step, folder = 0, f"state-{data.random}-{option}"
        if resume:
            accelerator.load_state(folder)
            step = SAVED
        for epoch in range(step // 6, 2):
            loader.set_epoch(epoch)
            skip = resume and epoch == SAVED // 6
            for batch in A.skip_first_batches(loader, step % 6) if skip else loader:
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                if step == SAVED and not resume:
                    accelerator.save_state(folder)
        return accelerator.unwrap_model(model)

    def run(data: Samples, option: bool) -> tuple[Model, Model]:
        return train(data, option, False), train(data, option, True)

    return both(run, None if A.__name__ == "treadle" else "`use_seedable_sampler=True`")


def hf() -> Found:
    def run(data: Samples, option: bool) -> tuple[Model, Model]:
        models = []
        for resume in (None, f"hf-{data.random}/checkpoint-{SAVED}"):
            model = Model(dropout=0.5)
            flags = {"output_dir": f"hf-{data.random}", "num_train_epochs": 2, "per_device_train_batch_size": BATCH}
            saves = {"save_strategy": "steps", "save_steps": SAVED}
            make_hf_trainer(model, data, flags | saves).train(resume_from_checkpoint=resume)
            models.append(model)
        return models[0], models[1]

    return both(run, None)


if __name__ == "__main__":
    report(trainer, loop, hf)
