"""The examples do their job; the own loop has the losses of the Trainer's, bit for bit."""

import contextlib
import io
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

import treadle

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
ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}
EPOCHS, BATCH, ACCUMULATE = 2, 64, 4


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run_command(*words):
    """What a command line prints that ends well, without a GPU."""
    done = subprocess.run(words, env=clean_environment(ON_CPU), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def run_example(name, *options):
    """What an example prints, run as a script."""
    done = script(EXAMPLES / name, *options, env=ON_CPU, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


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
    if name == "custom_strategy.py":  # its name would stay registered, and its process group open
        printed = run_example(name)
    else:
        monkeypatch.setattr(sys, "argv", [name])
        monkeypatch.syspath_prepend(str(EXAMPLES))
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        printed = capsys.readouterr().out
    compare_with_page(printed.replace(f"{tmp_path}/", ""), name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ON_TWO_PROCESSES)
def test_recipes_on_two_processes(name):
    compare_with_page(run_example(name, *ON_TWO_PROCESSES[name]), name)


@pytest.mark.exhaustive
def test_streaming_on_two_processes_and_export_to_onnx():
    command = [programs() / "treadle", "launch", "--nproc-per-node", "2", EXAMPLES / "stream.py"]
    compare_with_page(run_command(*command), "stream.py")
    assert "digits.onnx gives the same logits" in run_example("export.py", "--onnx")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options",
    [pytest.param((), marks=pytest.mark.slow), ("--devices", "2", "--batch-size", "32", "--accumulate", "2")],
)
def test_digits(options):
    printed = run_example("digits.py", *options)
    assert printed.count("Test accuracy") == 1
    (command,) = re.findall(r"^Next: (.* -m treadle runs show digits/1)$", printed, re.MULTILINE)
    assert run_command(*command.split()).startswith("digits/1  finished")


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--steps", "24", "--accumulate", "2"), id="one", marks=pytest.mark.exhaustive),
        pytest.param(("--steps", "4", "--devices", "2", "--strategy", "fsdp"), id="fsdp", marks=pytest.mark.slow),
    ],
)
def test_gpt(options):
    assert "bits per byte" in run_example("gpt.py", *options, "--max-bytes", "300000")


@pytest.mark.long
@pytest.mark.parametrize("devices", ["1", pytest.param("2", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("example", ["packing.py", "token_budget.py"])
def test_recipes_for_sequences(example, devices):
    printed = run_example(example, "--devices", devices, "--steps", "5")
    assert float(re.search(r"([\d.]+) % filled", printed)[1]) > 90
    assert float(re.search(r"([\d.]+) bits per byte, the mean of 5 steps", printed)[1]) < 8.5


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
def test_the_other_way_of_a_recipe(name, option):
    for options in ((option,), ()):
        run_example(f"{name}.py", *RECIPES[name][0], *options)


@pytest.mark.exhaustive
def test_sweep(tmp_path):
    shutil.copytree(EXAMPLES, tmp_path, ignore=shutil.ignore_patterns("runs"), dirs_exist_ok=True)
    quick = ["trials=2", "trainer.max_epochs=1", "trainer.limit_train_batches=4"]
    printed = run_command(programs() / "treadle", "sweep", "--config", "sweep.yaml", *quick)
    assert "sweep sweep: 2 complete" in printed
    assert sorted(path.parent.name for path in (tmp_path / "runs/sweep").glob("*/run.json")) == ["1", "2"]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), id="one", marks=pytest.mark.slow),
        pytest.param(("--devices", "2", "--streaming"), id="two", marks=pytest.mark.exhaustive),
    ],
)
def test_finetune(options, tmp_path):
    pytest.importorskip("peft")
    sizes = ("--base-steps", "3", "--steps", "4", "--batch-size", "4", "--max-bytes", "200000")
    printed = run_example("finetune.py", *options, *sizes)
    assert printed.count("Perplexity after") == 1
    assert printed.count('def close(self):\n    """') == 1
    (checkpoint,) = (tmp_path / "runs" / "finetune" / "checkpoints").glob("*.ckpt")
    names = list(torch.load(checkpoint)["state_dict"])
    assert names
    assert all("lora_" in name for name in names)
    adapter = tmp_path / "runs" / "finetune" / "adapter" / "adapter_model.safetensors"
    assert adapter.stat().st_size < (tmp_path / "runs" / "finetune" / "base" / "model.safetensors").stat().st_size / 10


@pytest.mark.long
@pytest.mark.parametrize("options", [(), pytest.param(("--adamw",), marks=pytest.mark.exhaustive)])
def test_nano_learns(options):
    small = ("--depth", "2", "--vocabulary", "300", "--files", "12", "--length", "64", "--steps", "20")
    printed = run_example("nano.py", *small, *options)
    (loss,) = [float(line.split()[-1]) for line in printed.splitlines() if "Test loss" in line]
    assert loss < 4.5  # 5.7 is a uniform guess
    assert len((EXAMPLES / "nano.py").read_text(encoding="utf-8").splitlines()) <= 120
