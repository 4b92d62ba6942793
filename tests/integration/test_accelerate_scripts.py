"""Scripts for Accelerate run after their imports are changed, on one process and on two.

Each is kept as a user wrote it for ``accelerate``, and prints one line of JSON. A loop written out by hand, without any
library and in one process, says what is right.
"""

import contextlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.processes import clean_environment, run
from torch import nn
from torch.utils.data import DataLoader

HEAD = """
import json, os, sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from accelerate import Accelerator
from accelerate.utils import set_seed, ProjectConfiguration

def make_data(n):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(n, 4, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long())

def make_model():
    set_seed(42)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

folder = sys.argv[1]
"""

CLASSIFY = """
def training_function():
    accelerator = Accelerator()
    size = 8 // accelerator.num_processes
    train = DataLoader(make_data(40), shuffle=True, batch_size=size)
    evaluation = DataLoader(make_data(13), shuffle=False, batch_size=size)
    model = make_model().to(accelerator.device)
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=1000)
    model, optimizer, train, evaluation, scheduler = accelerator.prepare(model, optimizer, train, evaluation, scheduler)
    history = []
    for epoch in range(2):
        model.train()
        for inputs, targets in train:
            inputs.to(accelerator.device)
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        model.eval()
        predictions, references = [], []
        for inputs, targets in evaluation:
            with torch.no_grad():
                outputs = model(inputs)
            outputs, targets = accelerator.gather_for_metrics((outputs, targets))
            predictions.append(outputs)
            references.append(targets)
        predictions, references = torch.cat(predictions), torch.cat(references)
        history.append(nn.functional.cross_entropy(predictions, references).item())
        assert len(references) == 13
    accelerator.wait_for_everyone()
    accelerator.print(json.dumps({"losses": history, "rate": round(scheduler.get_last_lr()[0], 8)}))
    accelerator.end_training()

training_function()
"""

ACCUMULATE = """
accelerator = Accelerator(gradient_accumulation_steps=2)
model = make_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
loader = DataLoader(make_data(int(sys.argv[2])), batch_size=8 // accelerator.num_processes)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
norms = []
for inputs, targets in loader:
    with accelerator.accumulate(model):
        loss = nn.functional.cross_entropy(model(inputs), targets)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.3)))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
weights = torch.cat([p.detach().flatten() for p in accelerator.unwrap_model(model).parameters()])
accelerator.print(json.dumps({"norms": norms, "weights": weights.norm().item()}))
"""

CHECKPOINT = """
def run(stop, resume):
    config = ProjectConfiguration(project_dir=folder, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=config)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(make_data(40), batch_size=8 // accelerator.num_processes, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.register_for_checkpointing(counter := Counter())
    starting_epoch, skipped = 0, 0
    if resume:
        accelerator.load_state()
        starting_epoch, skipped = divmod(counter.steps, len(loader))
    losses = []
    for epoch in range(starting_epoch, 2):
        active = loader
        if epoch == starting_epoch and skipped:
            active = accelerator.skip_first_batches(loader, skipped)
        for inputs, targets in active:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            counter.steps += 1
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            if counter.steps == stop:
                accelerator.save_state()
                return losses
    return losses

class Counter:
    steps = 0
    def state_dict(self):
        return {"steps": self.steps}
    def load_state_dict(self, state):
        self.steps = state["steps"]

whole = run(None, False)
first = run(7, False)
second = run(None, True)
Accelerator().print(json.dumps({"whole": whole, "pieces": first + second}))
"""

SCRIPTS = {"classify": CLASSIFY, "accumulate": ACCUMULATE, "checkpoint": CHECKPOINT}


def treadles(source):
    """The only change that a user makes."""
    return source.replace("from accelerate", "from treadle")


def written(name, folder):
    path = folder / f"{name}.py"
    path.write_text(treadles(HEAD + SCRIPTS[name]))
    return path


def printed(path, world, *args):
    """What a rank does: the script, as the interpreter runs it, with what launched it in the environment or nothing."""
    if world == 1:
        for name in os.environ.keys() - clean_environment().keys():
            del os.environ[name]
    sys.argv = [str(path), *args]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(path), run_name="__main__")
    return out.getvalue()


def output(name, world, folder, *args):
    text, *_ = run(printed, world, written(name, folder), world, str(folder), *args)
    return json.loads(text.strip().splitlines()[-1])


def launched(name, world, folder):
    """Like `output`, in a fresh interpreter that a user's command starts."""
    path = written(name, folder)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)] if world > 1 else []
    environment = clean_environment({"CUDA_VISIBLE_DEVICES": ""})
    found = subprocess.run(
        [sys.executable, *launch, str(path), str(folder)], env=environment, capture_output=True, text=True, timeout=100
    )
    assert found.returncode == 0, found.stderr[-3000:]
    return json.loads(found.stdout.strip().splitlines()[-1])


def data(n):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(n, 4, generator=generator)
    return torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())


def model():
    torch.manual_seed(42)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def classified(world):
    """`CLASSIFY`, written out without any library; a batch of each process is a step of the schedule."""
    torch.manual_seed(42)
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=1000)
    train, evaluation = DataLoader(data(40), shuffle=True, batch_size=8), DataLoader(data(13), batch_size=8)
    losses = []
    for _ in range(2):
        for inputs, targets in train:
            nn.functional.cross_entropy(net(inputs), targets).backward()
            optimizer.step()
            for _ in range(world):
                scheduler.step()
            optimizer.zero_grad()
        with torch.no_grad():  # the loader draws a seed from the same generator as the shuffle, so it is read here too
            outputs, references = zip(*((net(x), y) for x, y in evaluation), strict=True)
        losses.append(nn.functional.cross_entropy(torch.cat(outputs), torch.cat(references)).item())
    return {"losses": losses, "rate": round(scheduler.get_last_lr()[0], 8)}


def accumulated(samples, world):
    """`ACCUMULATE`, each step on its whole group at once."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    norms = []
    for inputs, targets in DataLoader(data(samples), batch_size=16):
        nn.functional.cross_entropy(net(inputs), targets).backward()
        norms.append(nn.utils.clip_grad_norm_(net.parameters(), 0.3).item())
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] *= 0.9**world
    return {"norms": norms, "weights": torch.cat([p.flatten() for p in net.parameters()]).norm().item()}


def close(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


WORLDS = pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])


@pytest.mark.exhaustive
@WORLDS
def test_classification(world, tmp_path):
    close(launched("classify", world, tmp_path), classified(world))


@WORLDS
@pytest.mark.parametrize("samples", [48, 42])  # 42: the last group holds one short batch
def test_accumulation_clipping_and_a_schedule(world, samples, tmp_path):
    close(output("accumulate", world, tmp_path, str(samples)), accumulated(samples, world))


@WORLDS
def test_checkpoints_in_the_middle_of_an_epoch(world, tmp_path):
    found = output("checkpoint", world, tmp_path)
    assert len(found["whole"]) == 10
    assert found["pieces"] == found["whole"]


# -- beside Accelerate's own figures -----------------------------------------------------------------------------------


RECORDED = json.loads((Path(__file__).parent / "swap" / "accelerate" / "recorded.json").read_text(encoding="utf-8"))


def decayed(path, world, arguments):
    """What `tests/swap/accelerate/decay.py` prints, for each list of arguments."""
    return [printed(path, world, *each) for each in arguments]


@pytest.mark.parametrize("world", [1, 2])
def test_the_losses_are_accelerates(world, tmp_path):
    """With `use_seedable_sampler`; figures of accelerate 1.15.0, torch 2.13.0 (`benchmarks/swap_accelerate.py`)."""
    source = (Path(__file__).parent / "swap" / "accelerate" / "decay.py").read_text(encoding="utf-8")
    path = tmp_path / "decay.py"
    path.write_text(treadles(source))
    runs = [one for one in RECORDED["runs"] if one["processes"] == world]
    assert len({tuple(one["results"]["losses"]) for one in runs}) == 3  # each has an order of its own
    texts = run(decayed, world, path, world, [one["arguments"] for one in runs])[0]
    found = [json.loads(text.strip().splitlines()[-1]) for text in texts]
    for ours, theirs in zip(found, (one["results"] for one in runs), strict=True):
        assert ours.keys() == theirs.keys()
        for name, values in theirs.items():
            assert ours[name] == pytest.approx(values, rel=5e-7, abs=1e-7), name
        assert ours["rates"][-1] == theirs["rates"][-1] == 0.0


def test_the_guides_schedule_ends_at_zero(capsys):
    text = (Path(__file__).parents[2] / "docs" / "migrating" / "from_accelerate.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(block, {})
    assert capsys.readouterr().out == "[0.0]\n"
