"""The documents say what happens: hook order is compared with a real run, and each difference from the peers is shown.

The tests from `test_weights_make_the_mean_over_tokens` on are those that `docs/differences` names.
"""

import ast
import re
from pathlib import Path

import pytest
import torch
from support.callback_runs import Rows
from support.house import read_differences
from support.processes import run
from support.trainers import make_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from treadle.callbacks import HOOKS, ModelCheckpoint

import treadle

ROOT = Path(__file__).parents[2]


def loader(samples=5, batch_size=1, **options):
    return DataLoader(TensorDataset(torch.arange(float(samples)).reshape(-1, 1)), batch_size, **options)


class Task(treadle.TaskModule):
    """One weight that begins at 0; the loss of a sample is the weight, so each full gradient is 1."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen += batch[0].flatten().tolist()
        return (self.weight * torch.ones_like(batch[0])).mean()

    def test_step(self, batch, batch_idx):
        self.log("weight", self.weight.sum())

    def predict_step(self, batch, batch_idx):
        return batch[0].flatten()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


class Validated(Task):
    """The same, with a validation."""

    def validation_step(self, batch, batch_idx):
        self.log("mean", batch[0].mean())


def fit(task, train=None, val=None, *, ckpt_path=None, **flags):
    trainer = make_trainer(**{"num_sanity_val_steps": 0, **flags})
    trainer.fit(task, loader() if train is None else train, val, ckpt_path=ckpt_path)
    return trainer


def weight(task):
    return task.weight.item()


# -- docs/hooks.md ---------------------------------------------------------------------------------------------------


# What a task is asked for that is not a hook.
METHODS = ["configure_callbacks", "prepare_data", "configure_model", "configure_optimizers", "lr_scheduler_step"]
METHODS += ["configure_gradient_clipping", "training_step", "validation_step", "test_step", "predict_step"]
METHODS += ["train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader"]


class Whole(Validated):
    """Has all data and a schedule."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    def train_dataloader(self):
        return loader(2)

    def test_dataloader(self):
        return loader(1)

    val_dataloader, predict_dataloader = train_dataloader, test_dataloader


def recorder(trace, owner):
    return {name: lambda self, *_, name=name: trace.append(f"{owner}.{name}") for name in HOOKS}


def noted(trace, name):
    """The method of `Whole`, which writes itself into `trace`."""

    def method(self, *args, **kwargs):
        trace.append(f"task.{name}")
        return getattr(Whole, name)(self, *args, **kwargs)

    return method


def recorded(folder):
    """The calls of a tiny run, a list for each of fit, test, predict, and a fit that goes on and fails."""
    trace = []
    task = type("Task", (Whole,), {**recorder(trace, "task"), **{name: noted(trace, name) for name in METHODS}})()
    callback = type("Callback", (treadle.Callback,), recorder(trace, "callback"))()
    flags = {"enable_checkpointing": True, "num_sanity_val_steps": 1, "accumulate_grad_batches": 2}
    trainer = make_trainer(**flags, callbacks=[callback, ModelCheckpoint(folder)])
    parts = {}
    for stage in ("fit", "test", "predict"):
        getattr(trainer, stage)(task)
        parts[stage], trace[:] = list(trace), []
    again = make_trainer(**flags, max_epochs=2, callbacks=[callback, ModelCheckpoint(folder)])
    task.on_train_start = lambda: trace.append("task.on_train_start")
    type(task).training_step = lambda self, batch, batch_idx: trace.append("task.training_step") or ()
    with pytest.raises(TypeError, match="training_step returned a tuple"):
        again.fit(task, ckpt_path=trainer.checkpoint_callback.best_model_path)
    return {**parts, "resume": trace}


def documented():
    """The traces in docs/hooks.md: each fenced block marked `text <stage>`; indentation and remarks are for people."""
    blocks = re.findall(r"```text (\w+)\n(.*?)```", (ROOT / "docs/hooks.md").read_text(), re.DOTALL)
    lines = {stage: [line.split("#")[0].strip() for line in text.splitlines()] for stage, text in blocks}
    return {stage: [line for line in text if line] for stage, text in lines.items()}


def test_hook_order_is_the_documented_one(tmp_path):
    real, words = recorded(tmp_path), documented()
    assert words.keys() == real.keys()
    for stage, calls in real.items():
        # The document names the callback's and the task's call in one line where one follows the other.
        wanted = []
        for line in words[stage]:
            owner, name = line.split(".")
            wanted += [f"{each}.{name}" for each in (("callback", "task") if owner == "both" else (owner,))]
        assert calls == wanted, stage


def test_the_documents_name_every_hook_and_none_that_does_not_exist():
    loop = ast.get_docstring(ast.parse((ROOT / "trainer/loop/fit_loop.py").read_text())) or ""
    for where, text in (("fit_loop.py", loop), ("docs/hooks.md", (ROOT / "docs/hooks.md").read_text())):
        assert [name for name in HOOKS if not re.search(rf"\b{name}\b", text)] == [], where
        assert set(re.findall(r"\bon_\w+\b(?!=)", text)) <= set(HOOKS), where


def test_the_quickstart_shows_the_configuration_of_the_example():
    page = (ROOT / "docs/start/command_line.md").read_text(encoding="utf-8")
    shown = re.search(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert shown is not None
    assert shown[1] == (ROOT / "examples/digits.yaml").read_text(encoding="utf-8").partition("\n")[2]


# -- docs/differences ---------------------------------------------------------------------------------------------


def test_each_difference_names_a_test_that_exists():
    rows = re.findall(r"^\|.*\|$", read_differences(), re.MULTILINE)
    rows = [row for row in rows if not re.fullmatch(r"[|\- ]+", row) and not row.endswith("| Test |")]
    assert rows
    for row in rows:
        named = re.findall(r"`(?:([\w/]+\.py)::)?(test_\w+)`", row)
        assert named, f"no test in {row}"
        for file, name in named:
            assert f"def {name}(" in (ROOT / (file or "tests/integration/test_docs.py")).read_text(), name


def test_weights_make_the_mean_over_tokens():
    """Two micro-batches: 4 tokens whose gradient is 4, and 1 token whose gradient is 1."""

    def training_step(batch, batch_idx):
        tokens = 4.0 - 3.0 * batch[0].item()
        return {"loss": (task.weight * tokens).sum(), "weight": tokens}

    task = Task()
    task.training_step = training_step
    fit(task, loader(2), accumulate_grad_batches=2)
    assert weight(task) == pytest.approx(-17 / 5)  # the mean of the two means is 2.5


def test_step_numbers_count_completed_optimizer_steps():
    rows = Rows()

    class Logging(Task):
        def training_step(self, batch, batch_idx):
            self.log("batch", float(batch_idx))
            return super().training_step(batch, batch_idx)

    trainer = fit(Logging(), loader(6), accumulate_grad_batches=2, logger=rows, log_every_n_steps=1)
    assert trainer.global_step == 3
    assert rows.of("batch") == [(1, 1.0), (2, 3.0), (3, 5.0)]


def test_validation_sees_the_learning_rate_its_epoch_was_trained_with():
    task, rates = Whole(), []
    task.on_validation_start = lambda: rates.append(task.trainer.optimizers[0].param_groups[0]["lr"])
    fit(task, val=loader(), max_epochs=2)
    assert rates == [1.0, pytest.approx(0.1)]


def test_gradients_are_dropped_after_the_step():
    task, seen = Task(), []
    task.on_before_zero_grad = lambda optimizer: seen.append((weight(task), task.weight.grad.item()))
    fit(task, loader(1))
    assert seen == [(-1.0, 1.0)]
    assert task.weight.grad is None


def test_validation_waits_for_the_end_of_the_optimizer_step():
    task = Validated()
    task.on_validation_start = lambda: task.seen.append("validation")
    fit(task, loader(6), loader(1), accumulate_grad_batches=2, val_check_interval=3)
    assert task.seen == [0, 1, 2, 3, "validation", 4, 5, "validation"]


def test_on_step_end_comes_after_validation_and_before_the_next_step():
    task, seen = Validated(), []
    task.on_validation_end = lambda: seen.append("validated")
    task.on_step_end = lambda: seen.append(task.global_step)
    fit(task, loader(4), loader(1), accumulate_grad_batches=2)
    assert seen == [1, "validated", 2]


def test_the_two_forms_of_a_checkpoint(tmp_path):
    task = Task()
    trainer = fit(task)
    trainer.save_checkpoint(tmp_path / "file.ckpt")
    trainer.save_checkpoint(tmp_path / "directory.ckpt", format="directory")
    trainer.accelerator.save_state(tmp_path / "state")
    for path in (tmp_path / "directory.ckpt", tmp_path / "state"):
        assert {file.suffix for file in path.iterdir()} == {".json", ".safetensors"}
    with pytest.raises(IsADirectoryError):
        torch.load(tmp_path / "directory.ckpt")
    contents = [treadle.load_checkpoint(tmp_path / name) for name in ("file.ckpt", "directory.ckpt")]
    for content in (torch.load(tmp_path / "file.ckpt", weights_only=True), *contents):
        assert content["state_dict"] == {"weight": task.weight}
        assert content["global_step"] == trainer.global_step


def train_without_a_loss():
    task = Task()
    task.training_step = lambda batch, batch_idx: None
    with pytest.raises(ValueError, match=r"training_step returned None.*several processes"):
        fit(task, loader(4), devices=2, strategy="ddp")
    return True


@pytest.mark.long
def test_none_as_the_loss_is_an_error_on_several_processes():
    assert run(train_without_a_loss, 2) == [True, True]


def test_no_model_means_the_last_one_at_its_best_checkpoint(tmp_path):
    task = Task()
    task.validation_step = lambda *_: task.log("distance", (task.weight + 1).abs().sum())  # best after the first epoch
    best = ModelCheckpoint(tmp_path, monitor="distance")
    trainer = fit(task, loader(1), loader(1), max_epochs=3, enable_checkpointing=True, callbacks=best)
    assert trainer.test(task, loader(1), verbose=False) == [{"weight": -3.0}]
    assert trainer.test(dataloaders=loader(1), verbose=False) == [{"weight": -1.0}]


# -- docs/differences, on two processes ---------------------------------------------------------------------------


def on_each_process(folder):
    """Everything that takes two processes, in one start of them; returns what this one saw."""
    rank = treadle.Accelerator(cpu=True).process_index
    trainer = make_trainer()
    found = {
        "validation": trainer.validate(Validated(), loader(5), verbose=False)[0]["mean"],
        "predictions": torch.cat(trainer.predict(Task(), loader(5, 2))).tolist(),
    }

    class Stopping(Task):
        def on_train_batch_start(self, batch, batch_idx):
            if rank == 1 and batch_idx == 2:
                self.trainer.should_stop = True

        def training_step(self, batch, batch_idx):
            self.log("rank", float(rank))
            return super().training_step(batch, batch_idx)

    task = Stopping()
    trainer = fit(task, loader(20), log_every_n_steps=1)
    found |= {"stopped": trainer.global_step, "logged": float(trainer.logged_metrics["rank"])}

    saving = ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1)
    task = Task()
    treadle.seed_everything(1)
    fit(task, loader(22, 3, shuffle=True), max_steps=2, enable_checkpointing=True, callbacks=saving)
    found["seen"] = task.seen

    accelerator = treadle.Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader(6))
    gathered = []
    for (x,) in batches:
        accelerator.backward(model(x).mean())
        optimizer.step()
        optimizer.zero_grad()
        gathered += accelerator.gather_for_metrics(x).flatten().tolist()
    return found | {"gathered": gathered} | losses_of(accelerator) | formats()


def losses_of(accelerator):
    """The mean loss of the samples 0 to 4, gathered in three ways; a sample's loss is its number."""
    batch_size, repeated, own, weighed = 2, [], [], []
    for (x,) in accelerator.prepare_data_loader(loader(5, batch_size), evaluation=True):
        loss = x.mean()
        repeated.append(accelerator.gather_for_metrics(loss.repeat(batch_size)))
        own.append(accelerator.gather_for_metrics(loss.repeat(len(x))))
        weighed.append(torch.stack(accelerator.gather_for_metrics((loss, torch.tensor(float(len(x)))))))
    means, counts = torch.cat(weighed, dim=1)
    return {
        "repeated": torch.cat(repeated).mean().item(),
        "own length": torch.cat(own).mean().item(),
        "weighed": (means @ counts / counts.sum()).item(),
    }


class Seeing(nn.Module):
    """Notes the formats of its weight, while that is whole, and of its product."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))
        self.seen = set()

    def forward(self, x):
        product = x @ self.weight
        self.seen.add((self.weight.dtype, tuple(self.weight.shape), product.dtype))
        return product


def formats():
    from torch.distributed.fsdp import MixedPrecisionPolicy

    seen = {}
    for name, policy in (("stored", None), ("half", MixedPrecisionPolicy(torch.bfloat16, torch.float32))):
        strategy = treadle.strategies.FSDP(auto_wrap_policy={Seeing}, mixed_precision=policy)
        accelerator = treadle.Accelerator(cpu=True, strategy=strategy, mixed_precision="bf16")
        net = nn.Sequential(Seeing())
        accelerator.prepare(net)(torch.ones(1, 2))
        seen[name] = net[0].seen
    return {"formats": seen}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    return folder, run(on_each_process, 2, str(folder))


def test_evaluation_counts_each_sample_once(two):
    assert [found["validation"] for found in two[1]] == [2.0, 2.0]
    assert [found["gathered"] for found in two[1]] == [[0, 1, 2, 3, 4, 5]] * 2


def test_a_mean_over_gathered_losses_is_that_of_the_samples(two):
    for found in two[1]:
        assert found["own length"] == found["weighed"] == found["repeated"] == pytest.approx(2.0)


def test_parameters_are_gathered_as_they_are_stored(two):
    for found in two[1]:
        assert found["formats"]["stored"] == {(torch.float32, (2, 2), torch.bfloat16)}
        assert found["formats"]["half"] == {(torch.bfloat16, (2, 2), torch.bfloat16)}


def test_predictions_are_those_of_all_processes_in_order(two):
    assert [found["predictions"] for found in two[1]] == [[0, 1, 2, 3, 4]] * 2


def test_a_stop_on_one_process_stops_all_after_the_same_step(two):
    assert [found["stopped"] for found in two[1]] == [3, 3]


def test_logged_values_are_of_all_processes(two):
    assert [found["logged"] for found in two[1]] == [0.5, 0.5]


def test_another_number_of_processes_goes_on_with_the_samples_left(two):
    folder, found = two
    before = [sample for each in found for sample in each["seen"]]
    assert len(before) == 12
    task = Task()
    fit(task, loader(22, 3, shuffle=True), ckpt_path=folder / "epoch=0-step=2.ckpt")
    assert sorted(before + task.seen) == list(range(22))
