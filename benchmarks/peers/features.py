"""What each library offers: `python features.py ROW LIBRARY`. A "no" is shown by the absence of the public name."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import torch

from common import Found, Model, Samples, import_library, load, make_hf_trainer, make_task, make_trainer, print_found

Cells = dict[str, Found]


def has(module: str, name: str) -> bool:
    try:
        return hasattr(importlib.import_module(module), name)
    except ImportError:
        return False


def absent(module: str, name: str) -> Found:
    return ("yes", f"{module}.{name}") if has(module, name) else ("no", f"there is no {module}.{name}")


def hooks(library: str) -> Found:
    """A callback counts the steps of a training of 3 steps."""
    steps: list[int] = []
    if library == "accelerate":
        return absent("accelerate", "Trainer")
    if library == "transformers":
        from transformers import TrainerCallback

        class Count(TrainerCallback):
            def on_step_end(self, *_, **__) -> None:
                steps.append(1)

        make_hf_trainer(Model(), Samples(12), {"max_steps": 3}, callbacks=[Count()]).train()
    else:
        L = import_library(library)

        class Count(L.Callback):
            def on_train_batch_end(self, *_) -> None:
                steps.append(1)

        make_trainer(L, [Count()], max_steps=3).fit(make_task(L, Model()), load(Samples(12), 4))
    return "yes" if len(steps) == 3 else "no", f"a callback was called at {len(steps)} of 3 steps"


def own_loop(library: str) -> Found:
    """The same three steps as in a plain loop, in a loop of the user."""
    if library == "transformers":
        return absent("transformers", "Accelerator")

    def train(prepare, backward) -> torch.Tensor:
        model = Model()
        inner, optimizer, loader = prepare(model, torch.optim.SGD(model.parameters(), lr=0.05), load(Samples(12), 4))
        for batch in loader:
            backward(inner(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
        return model.weights()

    if library == "lightning":
        from lightning.fabric import Fabric

        fabric = Fabric(accelerator="cpu", devices=1)
        got, name = train(lambda m, o, d: (*fabric.setup(m, o), fabric.setup_dataloaders(d)), fabric.backward), "Fabric"
    else:
        accelerator = import_library(library).Accelerator(cpu=True)
        got, name = train(accelerator.prepare, accelerator.backward), "yes"
    plain = train(lambda *objects: objects, lambda loss: loss.backward())
    return name if torch.equal(got, plain) else "no", f"weights equal a plain loop's: {torch.equal(got, plain)}"


def files(library: str) -> Found:
    """The files of a checkpoint by their contents, and how often they were unpickled while it was loaded."""
    if library == "treadle":
        (cell, seen), (other, other_seen) = inspect_files(library, False), inspect_files(library, True)
        return f"`Trainer`: {cell}; `Accelerator`: {other}", f"{seen}; {other_seen}"
    return inspect_files(library, library == "accelerate")


def inspect_files(library: str, own_loop: bool) -> Found:
    loads: list[str] = []
    if own_loop:
        accelerator, model = import_library(library).Accelerator(cpu=True), Model()
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()), load(Samples(4), 2))
        folder = Path("state")
        accelerator.save_state("state")
        resume = lambda: accelerator.load_state("state")  # noqa: E731
    elif library == "transformers":
        flags = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}
        make_hf_trainer(Model(), Samples(16), flags).train()
        folder = Path("hf/checkpoint-2")
        again = make_hf_trainer(Model(), Samples(16), flags | {"max_steps": 3})
        resume = lambda: again.train(resume_from_checkpoint=str(folder))  # noqa: E731
    else:
        L = import_library(library)
        trainer = make_trainer(L, max_steps=2)
        trainer.fit(make_task(L, Model()), load(Samples(16), 2))
        folder = Path("saved")
        trainer.save_checkpoint(folder / "one.ckpt")
        again = make_trainer(L, max_steps=3)
        data = load(Samples(16), 2)
        resume = lambda: again.fit(make_task(L, Model()), data, ckpt_path="saved/one.ckpt")  # noqa: E731
    unpickle, torch.load = torch.load, lambda *args, **options: loads.append("") or unpickle(*args, **options)
    resume()
    torch.load = unpickle
    kinds = {"safetensors": False, "JSON": False, "pickle": False}
    for path in folder.rglob("*"):
        if path.is_file():
            head = path.read_bytes()[:4]
            kind = "safetensors" if path.suffix == ".safetensors" else "JSON" if path.suffix == ".json" else None
            kind = kind or ("pickle" if head[:2] in (b"PK", b"\x80\x02", b"\x80\x04") else None)
            kinds |= {kind: True} if kind else {}
    present = [kind for kind, there in kinds.items() if there]
    cell = " and ".join([", ".join(present[:-1]), present[-1]]) if len(present) > 1 else present[0]
    if library == "treadle" and present == ["pickle"] and not loads:
        cell = "one `torch.save` file, loaded without unpickling"
    names = ", ".join(sorted(path.name for path in folder.rglob("*") if path.is_file()))
    return cell, f"{names}; torch.load was called {len(loads)} times while loading"


def report_page(library: str) -> Found:
    """The pages that a training leaves with the defaults."""
    if library == "accelerate":
        return absent("accelerate", "Trainer")
    if library == "transformers":
        from transformers import PretrainedConfig

        trainer = make_hf_trainer(Model(), Samples(16), {"max_steps": 3})
        trainer.train()
        pages = [path.name for path in Path().rglob("*.html")]
        trainer.model.config = PretrainedConfig()  # the card reads it
        trainer.create_model_card()
        card = (Path("hf") / "README.md").exists()
        return ("yes" if pages else "model card, on request" if card else "no"), f"pages: {pages}; model card: {card}"
    L = import_library(library)
    trainer = make_trainer(L, max_steps=3, logger=True, enable_checkpointing=True)
    trainer.fit(make_task(L, Model()), load(Samples(16), 2))
    pages = [path.name for path in Path().rglob("*.html")]
    return "yes" if pages else "no", f"pages: {pages}"


def other_hardware(library: str) -> Found:
    """Names alone: nothing is run, there is no TPU here."""
    homes = {
        "treadle": [("treadle.strategies", "DeepSpeedStrategy"), ("treadle.accelerators", "XLAAccelerator")],
        "lightning": [
            ("lightning.pytorch.strategies", "DeepSpeedStrategy"),
            ("lightning.pytorch.accelerators", "XLAAccelerator"),
        ],
        "accelerate": [("accelerate", "DeepSpeedPlugin"), ("accelerate.utils", "is_torch_xla_available")],
        "transformers": [
            ("transformers.integrations", "is_deepspeed_available"),
            ("transformers.utils", "is_torch_xla_available"),
        ],
    }
    there = [has(*home) for home in homes[library]]
    return "yes" if all(
        there
    ) else "no", f"names: {', '.join('.'.join(home) for home in homes[library])}: {there}; not run"


def plans(library: str) -> Found:
    """An estimate before a run, by the library's command."""
    if library == "treadle":
        command = [sys.executable, "-m", "treadle", "plan", "--model", "gpt-162m", "--world-size", "2", "--gpu", "h100"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        lines = [line for line in done.stdout.splitlines() if line.startswith(("memory", "step "))]
        return "yes" if len(lines) == 2 else "no", "; ".join(lines) or done.stderr[-300:]
    if library == "accelerate":
        from accelerate.commands.estimate import estimate_training_usage

        estimates = {dtype: max(estimate_training_usage(1000, dtype).values()) for dtype in ("float32",)}
        return (
            "memory only, from the weights' size",
            f"`estimate-memory` computes with Adam, of weights of 1,000 bytes: {estimates}",
        )
    return absent({"lightning": "lightning.pytorch", "transformers": "transformers"}[library], "estimate_memory")


def configuration(library: str) -> Found:
    """A setting of a file reaches the training; what the library puts it in."""
    Path("config.yaml").write_text("trainer: {max_steps: 3}\n")
    if library == "treadle":
        done = subprocess.run([sys.executable, "-m", "treadle", "runs", "--help"], capture_output=True, text=True)
        fit = subprocess.run([sys.executable, "-m", "treadle", "fit", "--help"], capture_output=True, text=True)
        there = done.returncode == 0 == fit.returncode and "--config" in fit.stdout
        return "yes" if there else "no", "`treadle fit --config`, `treadle runs`"
    if library == "lightning":
        from lightning.pytorch.cli import LightningCLI

        class Task(type(make_task(import_library(library), Model()))):
            pass

        cli = LightningCLI(Task, run=False, args=["--config", "config.yaml"])
        return "LightningCLI" if cli.trainer.max_steps == 3 else "no", f"max_steps of the file: {cli.trainer.max_steps}"
    if library == "accelerate":
        from accelerate.commands.config.config_args import ClusterConfig

        fields = set(ClusterConfig.__dataclass_fields__)
        launcher = "num_processes" in fields and not fields & {"learning_rate", "max_steps", "batch_size"}
        return (
            "for the launcher only" if launcher else "yes",
            f"fields of its file: {', '.join(sorted(fields)[:6])} ...",
        )
    from transformers import HfArgumentParser, TrainingArguments

    Path("config.yaml").write_text("max_steps: 3\noutput_dir: hf\n")
    (arguments,) = HfArgumentParser(TrainingArguments).parse_yaml_file("config.yaml")
    return "HfArgumentParser" if arguments.max_steps == 3 else "no", f"max_steps of the file: {arguments.max_steps}"


def offloading(library: str) -> Found:
    """A model of which one layer is on disk gives the output of the model itself."""
    from safetensors.torch import save_file

    if library in ("lightning", "transformers"):
        found = absent({"lightning": "lightning.pytorch", "transformers": "transformers"}[library], "dispatch_model")
        if library == "lightning":
            return found
        import inspect

        from transformers import PreTrainedModel

        uses = "accelerate" in inspect.getsource(importlib.import_module("transformers.integrations.accelerate"))
        there = hasattr(PreTrainedModel, "from_pretrained") and uses
        return (
            "via Accelerate" if there else "no",
            "`from_pretrained(device_map=...)` calls transformers.integrations.accelerate",
        )
    A = import_library(library)
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    save_file(plain.state_dict(), "weights.safetensors")
    with A.init_empty_weights():
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    places = {"0": "cpu", "1": "disk"}
    model = A.load_checkpoint_and_dispatch(model, "weights.safetensors", device_map=places, offload_folder="offload")
    x, on_disk = torch.randn(3, 4), all(value.is_meta for value in model[1].parameters())
    with torch.no_grad():
        equal = torch.equal(model(x), plain(x))
    return "yes" if on_disk and equal else "no", f"a layer on disk: {on_disk}; output equal: {equal}"


ROWS = (hooks, own_loop, files, report_page, other_hardware, plans, configuration, offloading)

if __name__ == "__main__":
    print_found(*{row.__name__: row for row in ROWS}[sys.argv[1]](sys.argv[2]))
