"""Evaluation of 5 samples on two processes, batch size 2: samples per rank, mean loss, predictions."""

from __future__ import annotations

import sys
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

LENGTH, BATCH = 5, 2


def judge(api: str) -> Found:
    """Run an API on two processes, and compare what it saw and gave with all samples, each once."""
    expect_success(on_two_processes(__file__, sys.argv[1], api))
    ranks = read_ranks()
    model = Model().eval()
    true = float(model(**next(iter(load(Samples(LENGTH), LENGTH))))["loss"])
    seen = sum((count(rank["seen"]) for rank in ranks), count([]))
    loss, predictions = ranks[0].get("loss"), ranks[0].get("predictions")
    facts = [f"{seen.total()} samples evaluated of {LENGTH}"]
    facts += [] if loss is None else [f"mean loss {loss:.4f}, exactly {true:.4f}"]
    facts += [] if predictions is None else [f"{predictions} predictions gathered"]
    exact_loss = loss is None or abs(loss - true) < 1e-5
    if sorted(seen.elements()) == list(range(LENGTH)) and exact_loss:
        cell = "each sample once"
    elif predictions is None:
        cell = "pads with copies"
    elif exact_loss:
        cell = "pads with copies, then drops them"
    else:
        cell = "metrics are exact, but `eval_loss` includes padding copies"
        cell = cell if predictions == LENGTH else "pads with copies"
    return cell, ", ".join(facts)


def validate(L: ModuleType) -> None:
    model = Model()
    trainer = make_trainer(L, devices=2, strategy="ddp")
    (result,) = trainer.validate(make_task(L, model), load(Samples(LENGTH), BATCH), verbose=False)
    write_rank(trainer.global_rank, {"seen": model.seen[False], "loss": result["val_loss"]})


def gather(A: ModuleType) -> None:
    accelerator, model = A.Accelerator(cpu=True), Model().eval()
    prepared, loader = accelerator.prepare(model, load(Samples(LENGTH), BATCH))
    with torch.no_grad():
        outputs = [accelerator.gather_for_metrics(prepared(**batch)["logits"]) for batch in loader]
    write_rank(accelerator.process_index, {"seen": model.seen[False], "predictions": len(torch.cat(outputs))})


def evaluate() -> None:
    model = Model()
    flags = {"per_device_eval_batch_size": BATCH, "label_names": ["labels"]}
    trainer = make_hf_trainer(model, None, flags)
    output = trainer.predict(Samples(LENGTH))
    found = {"loss": output.metrics["test_loss"], "predictions": len(output.predictions)}
    write_rank(trainer.args.process_index, found | {"seen": model.seen[False]})


if __name__ == "__main__":
    if len(sys.argv) == 2:
        report(lambda _: judge("trainer"), lambda _: judge("loop"), lambda: judge("hf"))
    elif sys.argv[2] == "hf":
        evaluate()
    else:
        (validate if sys.argv[2] == "trainer" else gather)(import_library(sys.argv[1]))
