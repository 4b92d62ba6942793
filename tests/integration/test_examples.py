"""The examples do their job; the own loop has the losses of the Trainer's, bit for bit."""

import contextlib
import io
import itertools
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.processes import clean_environment, programs, run, script
from support.trainers import make_trainer
from torch.nn import functional as F
from torch.utils.data import DataLoader

import treadle
from treadle.data import pack

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
INDEX = (EXAMPLES / "README.md").read_text(encoding="utf-8")
PAGES = {page: page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md")}
SHOWN = {
    name: output
    for text in PAGES.values()
    for name, output in re.findall(r"^```text (\w+\.py)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
}
SLOW_RECIPES = (
    "contrastive.py",
    "custom_strategy.py",
    "early_stopping.py",
    "lora.py",
    "own_loop.py",
    "several_loaders.py",
)
ON_TWO_PROCESSES = {
    "contrastive.py": ["--devices", "2"],
    "custom_strategy.py": ["--devices", "2"],
    "fsdp.py": [],
    "tensor_parallel.py": [],
}
EPOCHS, BATCH, ACCUMULATE = 2, 64, 4
NANO_STEPS = 12


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
    flags = {"precision": precision, "accumulate_grad_batches": ACCUMULATE, "gradient_clip_val": 1.0}
    trainer = make_trainer(max_epochs=EPOCHS, callbacks=[losses], **flags)
    trainer.fit(task, *digits.build_loaders(BATCH // world)[:2])
    options = {"gradient_accumulation_steps": ACCUMULATE, "mixed_precision": mixed, "cpu": True}
    own, accuracy = own_loop.run(EPOCHS, BATCH // world, **options)
    return torch.stack(losses.seen), torch.stack(own), accuracy


@pytest.mark.long
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


def test_recipes_are_short_listed_and_linked():
    names = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".yaml") or path.name == "kubernetes"}
    assert {name.rstrip("/") for name in re.findall(r"\]\(([^)]+)\)", INDEX)} == names
    recipes, programs = INDEX.split("## Programs")
    links = "".join(re.findall(r"\]\(([^)]+)\)", "".join(PAGES.values())))
    for path in EXAMPLES.glob("*.py"):
        assert (f"[{path.name}]({path.name})" in recipes) is not (f"[{path.name}]({path.name})" in programs), path.name
        if f"[{path.name}]" in recipes:
            assert len(path.read_text(encoding="utf-8").splitlines()) <= 60, path.name
            assert f"/examples/{path.name}" in links, f"no page links to {path.name}"
    assert len(SHOWN) > 12


def compare_with_page(printed, name):
    """Compare with what a page shows: the same words, and numbers that another processor may have rounded."""
    shown, number = SHOWN[name], re.compile(r"\d[\d,]*(?:\.\d+)?")
    first, _, last = shown.partition("...\n")
    parts = [(first, printed[: len(first)]), (last, printed[-len(last) :])] if last else [(shown, printed)]
    for expected, actual in parts:
        assert number.sub("#", actual) == number.sub("#", expected)
        numbers = [[float(text.replace(",", "")) for text in number.findall(part)] for part in (actual, expected)]
        assert numbers[0] == pytest.approx(numbers[1], rel=0.3, abs=0.05)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch.export.load of torch 2.11
@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.exhaustive if name in SLOW_RECIPES else ())
        for name in sorted(SHOWN.keys() - {"fsdp.py", "tensor_parallel.py"})
    ],
)
def test_recipes_print_what_their_page_shows(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if name == "custom_strategy.py":  # its name would stay registered, and its process group open
        printed = script(EXAMPLES / name, env={"CUDA_VISIBLE_DEVICES": ""}).stdout
    else:
        monkeypatch.setattr(sys, "argv", [name])
        monkeypatch.syspath_prepend(str(EXAMPLES))
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        printed = capsys.readouterr().out
    compare_with_page(printed.replace(f"{tmp_path}/", ""), name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ON_TWO_PROCESSES)
def test_recipes_on_two_processes(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = script(EXAMPLES / name, *ON_TWO_PROCESSES[name], env={"CUDA_VISIBLE_DEVICES": ""}, timeout=240)
    assert done.returncode == 0, done.stderr
    compare_with_page(done.stdout, name)


@pytest.mark.exhaustive
def test_streaming_on_two_processes_and_export_to_onnx(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = [programs() / "treadle", "launch", "--nproc-per-node", "2", EXAMPLES / "stream.py"]
    launched = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=120)
    compare_with_page(launched.stdout, "stream.py")
    exported = script(EXAMPLES / "export.py", "--onnx")
    assert "digits.onnx gives the same logits" in exported.stdout, exported.stderr


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
    (command,) = re.findall(r"^Next: (.* -m treadle runs show digits/1)$", done.stdout, re.MULTILINE)
    shown = subprocess.run(command.split(), env=clean_environment(), capture_output=True, text=True, timeout=120)
    assert shown.stdout.startswith("digits/1  finished"), shown.stderr


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


@pytest.mark.long
@pytest.mark.parametrize("devices", ["1", pytest.param("2", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("example", ["packing.py", "token_budget.py"])
def test_recipes_for_sequences(example, devices, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = script(EXAMPLES / example, "--devices", devices, "--steps", "5", env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr
    assert float(re.search(r"([\d.]+) % filled", done.stdout)[1]) > 90
    assert float(re.search(r"([\d.]+) bits per byte, the mean of 5 steps", done.stdout)[1]) < 8.5


# -- recipes that fit on a screen ------------------------------------------------------------------------------------

RECIPES = {  # options, what they print, and after which step to save
    "several_optimizers": (("--max-epochs", "1"), r"Loss ([\d.]+) in the last", 30),
    "gan": (("--max-epochs", "1"), r"Distance ([\d.]+) between", 20),
    "large_vocabulary": (("--max-steps", "4"), r"loss ([\d.]+), peak memory", 2),
    "growing_batch": (("--max-epochs", "3"), r"Test accuracy ([\d.]+) after 97 steps", 85),
}


def run_recipe(name, folder, *options, resumes=False):
    """Run an example as a script, saving or resuming within; return what it prints, and the weights."""
    path, (small, pattern, step), weights = folder / name, RECIPES[name], {}

    class Save(treadle.Callback):
        def on_step_end(self, trainer, pl_module):
            if trainer.global_step == step and not resumes:
                trainer.save_checkpoint(path)

    class Trainer(treadle.Trainer):
        def __init__(self, callbacks=(), **flags):
            super().__init__(callbacks=[*callbacks, Save()], accelerator="cpu", enable_progress_bar=False, **flags)

        def fit(self, task, *loaders):
            super().fit(task, *loaders, ckpt_path=path if resumes else None)
            full = self.accelerator.get_state_dict(task)  # on rank zero
            weights.update({n: value.clone() for n, value in full.items() if value is not None})

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setattr(treadle, "Trainer", Trainer)
        patch.setattr(sys, "argv", [name, *small, *options])
        patch.syspath_prepend(EXAMPLES)
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    (number,) = re.findall(pattern, printed.getvalue()) or [None]  # ranks other than zero print nothing
    return number, weights


def run_recipes(folder, *options):
    results = {}
    for name in RECIPES:
        (number, whole), (again, resumed) = (run_recipe(name, folder, *options, resumes=r) for r in (False, True))
        assert all(torch.equal(resumed[key], value) for key, value in whole.items()), name
        results[name] = number, again
    return results


@pytest.mark.long
@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.exhaustive), "fsdp"])
def test_recipes_train_the_same_on_two_processes_and_resumed(strategy, tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    one = run_recipes(tmp_path / "one")
    two, _ = run(run_recipes, 2, tmp_path / "two", "--devices", "2", "--strategy", strategy)
    for results in (one, two):
        assert float(results["several_optimizers"][0]) < 4
        assert float(results["gan"][0]) < 3
        assert float(results["growing_batch"][0]) > 0.8
    for name in RECIPES.keys() - {"gan"}:  # whose noise each process draws for its own images
        assert float(two[name][0]) == pytest.approx(float(one[name][0]), abs=2e-3), name


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "option"), [("large_vocabulary", "--plain"), ("growing_batch", "--by-epoch")])
def test_the_other_way_of_a_recipe(name, option, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chosen, plain = (script(EXAMPLES / f"{name}.py", *RECIPES[name][0], *options) for options in ((option,), ()))
    assert chosen.returncode == plain.returncode == 0, chosen.stderr + plain.stderr


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
    names = list(torch.load(checkpoint)["state_dict"])
    assert names
    assert all("lora_" in name for name in names)
    adapter = tmp_path / "runs" / "finetune" / "adapter" / "adapter_model.safetensors"
    assert adapter.stat().st_size < (tmp_path / "runs" / "finetune" / "base" / "model.safetensors").stat().st_size / 10


def import_nano():
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    import nano

    return nano


def read_nano_rows():
    return pack(import_nano().read_documents(300, 12), 64, too_long="cut")


def train_nano(folder, strategy="auto", ranks=1, ckpt_path=None):
    """Train `nano.py` in small; return the losses of this process, and the weights on rank zero."""
    treadle.seed_everything(0)
    task, losses = import_nano().Nano(depth=2, vocabulary=300, lr=0.01), Losses()
    saver = treadle.callbacks.ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=5)
    flags = {"max_steps": NANO_STEPS, "max_epochs": -1, "gradient_clip_val": 1.0, "enable_checkpointing": True}
    trainer = make_trainer(devices=ranks, strategy=strategy, callbacks=[losses, saver], **flags)
    trainer.fit(task, DataLoader(read_nano_rows(), 8 // ranks), ckpt_path=ckpt_path)
    weights = trainer.accelerator.get_state_dict(task)
    return torch.stack(losses.seen), {name: value.clone() for name, value in weights.items() if value is not None}


def train_nano_by_hand(monkeypatch):
    """The same loop with torch alone: its optimizers, its loss, and learning rates from their definition."""
    nano = import_nano()
    monkeypatch.setattr(
        nano.tl, "chunked_cross_entropy", lambda x, head, y: F.cross_entropy(head(x).flatten(0, 1), y.flatten())
    )
    treadle.seed_everything(0)
    model = nano.Nano(depth=2, vocabulary=300, lr=0.01)
    muon = torch.optim.Muon(model.blocks.parameters(), 0.01, 0.0, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW([model.embedding.weight, model.head.weight], 0.01, (0.8, 0.95), weight_decay=0.0)
    losses = []
    for step, batch in enumerate(itertools.islice(DataLoader(read_nano_rows(), 8), NANO_STEPS)):
        loss, _ = model.compute_loss(batch)
        loss.backward()
        losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in (muon, adamw):
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * (1.0 if step < 7 else 1 - (step - 7) / 5)
            optimizer.step()
            optimizer.zero_grad()
    return torch.stack(losses), model.state_dict()


def train_nano_on_two(folder):
    results = {}
    for strategy in ("ddp", "fsdp"):
        _, weights = train_nano(f"{folder}/{strategy}", strategy, 2)
        _, resumed = train_nano(f"{folder}/{strategy}-2", strategy, 2, f"{folder}/{strategy}/step=5.ckpt")
        results[strategy] = weights, all(torch.equal(resumed[name], value) for name, value in weights.items())
    return results


@pytest.mark.long
def test_nano_is_the_loop_by_hand_on_one_and_two_processes(tmp_path, monkeypatch):
    """Muon rounds to bfloat16, where the last bit of a gradient in float32 decides; so the losses are compared."""
    losses, weights = train_nano(tmp_path / "one")
    by_hand, expected = train_nano_by_hand(monkeypatch)
    torch.testing.assert_close(losses, by_hand, rtol=5e-4, atol=0)
    model, batch = import_nano().Nano(depth=2, vocabulary=300, lr=0.01), next(iter(DataLoader(read_nano_rows(), 64)))

    def evaluate(weights):
        model.load_state_dict(weights)
        with torch.no_grad():
            return float(model.compute_loss(batch)[0])

    trained = evaluate(expected)
    assert trained < evaluate(import_nano().Nano(depth=2, vocabulary=300, lr=0.01).state_dict()) - 2
    results = {"one": (weights, True), **run(train_nano_on_two, 2, str(tmp_path))[0]}
    for strategy, (trained_weights, is_same) in results.items():
        assert is_same, strategy  # a run that resumed in the middle, bit for bit
        assert evaluate(trained_weights) == pytest.approx(trained, rel=1e-4), strategy


@pytest.mark.long
@pytest.mark.parametrize("options", [(), pytest.param(("--adamw",), marks=pytest.mark.exhaustive)])
def test_nano_learns(options, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = ("--depth", "2", "--vocabulary", "300", "--files", "12", "--length", "64", "--steps", "20")
    done = script(EXAMPLES / "nano.py", *small, *options, env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr
    (loss,) = [float(line.split()[-1]) for line in done.stdout.splitlines() if "Test loss" in line]
    assert loss < 4.5  # 5.7 is a uniform guess
    assert len((EXAMPLES / "nano.py").read_text(encoding="utf-8").splitlines()) <= 120
