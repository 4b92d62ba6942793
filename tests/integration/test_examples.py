"""The examples do their job; the own loop has the losses of the Trainer's, bit for bit."""

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from support.processes import clean_environment, programs, run, script

import treadle

EXAMPLES = Path(__file__).parents[2] / "examples"
EPOCHS, BATCH, ACCUMULATE = 2, 64, 4


class Losses(treadle.Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append(outputs["loss"])


def both_doors(world, folder, precision, mixed):
    """This process's losses, of the Trainer and of the own loop, and the own loop's test accuracy."""
    os.chdir(folder)
    sys.path.insert(0, str(EXAMPLES))
    import digits
    import own_loop

    treadle.seed_everything(0)
    task, losses = digits.DigitsTask(), Losses()
    trainer = treadle.Trainer(
        accelerator="cpu",
        max_epochs=EPOCHS,
        precision=precision,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=1.0,
        callbacks=[losses],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(task, *digits.build_loaders(BATCH // world)[:2])
    arguments = argparse.Namespace(
        max_epochs=EPOCHS, batch_size=BATCH // world, accumulate=ACCUMULATE, mixed_precision=mixed, cpu=True, seed=0
    )
    own, accuracy = own_loop.train(arguments)
    return torch.stack(losses.seen), torch.stack(own), accuracy


@pytest.mark.parametrize(
    ("world", "precision", "mixed"),
    [
        pytest.param(1, "32-true", "no", marks=pytest.mark.exhaustive),
        (2, "32-true", "no"),
        pytest.param(2, "bf16-mixed", "bf16", marks=pytest.mark.slow),
    ],
)
def test_own_loop_is_the_trainers_loop(world, precision, mixed, tmp_path):
    accuracies = set()
    for trainer, own, accuracy in run(both_doors, world, world, str(tmp_path), precision, mixed):
        assert len(own) == EPOCHS * -(-1197 // BATCH)
        assert torch.equal(trainer, own)
        accuracies.add(accuracy)
    assert len(accuracies) == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options",
    [pytest.param((), marks=pytest.mark.slow), ("--devices", "2", "--batch-size", "32", "--accumulate", "2")],
)
def test_digits(options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = script(EXAMPLES / "digits.py", *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Test accuracy") == 1


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--steps", "24", "--accumulate", "2"), id="one", marks=pytest.mark.exhaustive),
        pytest.param(("--steps", "4", "--devices", "2", "--strategy", "fsdp"), id="fsdp", marks=pytest.mark.slow),
    ],
)
def test_gpt(options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = script(EXAMPLES / "gpt.py", *options, "--max-bytes", "300000", env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr
    assert "bits per byte" in done.stdout


@pytest.mark.parametrize("devices", ["1", pytest.param("2", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("example", ["packing.py", "token_budget.py"])
def test_recipes_for_sequences(example, devices, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = script(EXAMPLES / example, "--devices", devices, "--steps", "5", env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr
    assert float(re.search(r"([\d.]+) % filled", done.stdout)[1]) > 90
    assert float(re.search(r"([\d.]+) bits per byte, the mean of 5 steps", done.stdout)[1]) < 8.5


@pytest.mark.exhaustive
def test_sweep(tmp_path):
    shutil.copytree(EXAMPLES, tmp_path, ignore=shutil.ignore_patterns("runs"), dirs_exist_ok=True)
    quick = ["trials=2", "trainer.max_epochs=1", "trainer.limit_train_batches=4"]
    done = subprocess.run(
        [programs() / "treadle", "sweep", "--config", "sweep.yaml", *quick],
        env=clean_environment({"CUDA_VISIBLE_DEVICES": ""}),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert "sweep sweep: 2 complete" in done.stdout
    assert sorted(path.parent.name for path in (tmp_path / "runs/sweep").glob("*/run.json")) == ["1", "2"]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), id="one", marks=pytest.mark.slow),
        pytest.param(("--devices", "2", "--streaming"), id="two", marks=pytest.mark.exhaustive),
    ],
)
def test_finetune(options, tmp_path, monkeypatch):
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    sizes = ("--base-steps", "3", "--steps", "4", "--batch-size", "4", "--max-bytes", "200000")
    done = script(EXAMPLES / "finetune.py", *options, *sizes, env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Perplexity after") == 1
    assert done.stdout.count('def close(self):\n    """') == 1
    (checkpoint,) = (tmp_path / "runs" / "finetune" / "checkpoints").glob("*.ckpt")
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        names = list(file.keys())
    assert names
    assert all("lora_" in name for name in names)
    adapter = tmp_path / "runs" / "finetune" / "adapter" / "adapter_model.safetensors"
    assert adapter.stat().st_size < (tmp_path / "runs" / "finetune" / "base" / "model.safetensors").stat().st_size / 10
