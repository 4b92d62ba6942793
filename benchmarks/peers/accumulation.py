"""A partial accumulation group at the end of an epoch: 5 batches in groups of 4, beside plain loops."""

from __future__ import annotations

from types import ModuleType

import torch

from common import Found, Model, Samples, load, make_hf_trainer, make_task, make_trainer, report

BATCH, GROUP = 2, 4


def train_plainly(divide_by_group: bool) -> torch.Tensor:
    model, batches = Model(), list(load(Samples(10), BATCH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for group in (batches[:GROUP], batches[GROUP:]):
        for batch in group:
            (model(**batch)["loss"] / (GROUP if divide_by_group else len(group))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.weights()


def judge(model: Model) -> Found:
    apart = {
        "averaged over its micro-batches": train_plainly(False),
        "divided by the full group size": train_plainly(True),
    }
    for cell, weights in apart.items():
        if torch.allclose(model.weights(), weights, rtol=0, atol=1e-6):
            return cell, "the weights are those of a hand-written loop that does so"
    return (
        "neither",
        f"weights differ from both loops: {[float((model.weights() - w).abs().max()) for w in apart.values()]}",
    )


def trainer(L: ModuleType) -> Found:
    model = Model()
    fitted = make_trainer(L, max_epochs=1, accumulate_grad_batches=GROUP)
    fitted.fit(make_task(L, model), load(Samples(10), BATCH))
    return judge(model)


def loop(A: ModuleType) -> Found:
    accelerator, model = A.Accelerator(cpu=True, gradient_accumulation_steps=GROUP), Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer, loader = accelerator.prepare(model, optimizer, load(Samples(10), BATCH))
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
    return judge(accelerator.unwrap_model(model))


def hf() -> Found:
    model = Model()
    flags = {"num_train_epochs": 1, "per_device_train_batch_size": BATCH, "gradient_accumulation_steps": GROUP}
    make_hf_trainer(model, Samples(10), flags | {"train_sampling_strategy": "sequential"}).train()
    return judge(model)


if __name__ == "__main__":
    report(trainer, loop, hf)
