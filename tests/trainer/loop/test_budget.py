"""What a step may cost, counted rather than timed; and what an import may do."""

import json
import os
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from support.models import Line, loader
from support.processes import script
from torch import nn
from treadle.callbacks import LambdaCallback

import treadle
from treadle.testing.faults import disk_points

MOST_FRAMES, MOST_CALLS, MOST_CALLS_OWN_LOOP, MOST_CALLS_SECOND_OPTIMIZER = 6, 32, 25, 5
MOST_CALLS_CHECKPOINT = {"file": 1835, "directory": 1225}
FOLDERS = tuple(
    str(Path(folder).resolve()) + os.sep
    for room in (treadle, treadle.trainer, treadle.engine, treadle.callbacks, treadle.loggers, treadle.strategies)
    for folder in room.__path__
)


def is_ours(filename):
    return filename.startswith(FOLDERS) and f"{os.sep}tests{os.sep}" not in filename


class Task(Line):
    features, frames = 4, None

    def training_step(self, batch, batch_idx):
        if self.frames is None:
            self.frames = []
            frame = sys._getframe()
            while frame.f_back is not None:
                frame = frame.f_back
                if frame.f_code is fit.__code__:
                    break
                if is_ours(frame.f_code.co_filename):
                    self.frames.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}")
        loss = self.net(batch[0]).mean()
        self.log("loss", loss, prog_bar=True)
        return loss


def fit(folder, task, steps):
    trainer = treadle.Trainer(accelerator="cpu", max_epochs=1, default_root_dir=folder)
    assert {type(callback).__name__ for callback in trainer.callbacks} >= {"ModelCheckpoint", "TQDMProgressBar"}
    trainer.fit(task, loader(steps, 1, features=4))
    assert trainer.global_step == steps


def own_loop(steps):
    accelerator = treadle.Accelerator(cpu=True)
    net = nn.Linear(4, 1)
    optimizer, batches = torch.optim.SGD(net.parameters(), lr=0.1), loader(steps, 1, features=4)
    net, optimizer, batches = accelerator.prepare(net, optimizer, batches)
    for (x,) in batches:
        with accelerator.accumulate(net):
            accelerator.backward(net(x).mean())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert accelerator.steps == steps


def calls(run, *args):
    """Return how many functions of ours a call of ``run`` calls, by name."""
    counted = {}

    def profile(frame, event, argument):
        if event == "call" and is_ours(frame.f_code.co_filename):
            name = f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_qualname}"
            counted[name] = counted.get(name, 0) + 1

    sys.setprofile(profile)
    try:
        run(*args)
    finally:
        sys.setprofile(None)
    return counted


def calls_per_step(few, many):
    """Return what each of 40 more steps has called, the most first."""
    per_step = {name: (many[name] - few.get(name, 0)) / 40 for name in many}
    return {name: n for name, n in sorted(per_step.items(), key=lambda pair: -pair[1]) if n}


class TwoOptimizers(Task):
    def configure_optimizers(self):
        return [torch.optim.SGD([p], lr=0.1) for p in self.parameters()]


def without_frames(kind=Task):
    task = kind()
    task.frames = ()
    return task


def test_frames_between_fit_and_training_step(tmp_path):
    task = Task()
    fit(tmp_path, task, 1)
    assert 2 <= len(task.frames) <= MOST_FRAMES, task.frames


def test_calls_per_step(tmp_path):
    per_step = {}
    for kind in (Task, TwoOptimizers):
        calls(fit, tmp_path / f"{kind.__name__}-warm", without_frames(kind), 2)
        # Both runs hold the same number of writes to the loggers: none but the one at step 50.
        runs = (calls(fit, tmp_path / f"{kind.__name__}-{n}", without_frames(kind), n) for n in (51, 91))
        per_step[kind] = calls_per_step(*runs)
    one, two = (sum(n for n in each.values() if n > 0) for each in per_step.values())
    assert one <= MOST_CALLS, per_step[Task]
    assert per_step[Task]["automatic.py:Steps.take"] == 1.0  # what is counted is the loop
    assert 0 < two - one <= MOST_CALLS_SECOND_OPTIMIZER, per_step[TwoOptimizers]


def test_calls_per_step_of_an_own_loop():
    calls(own_loop, 2)
    per_step = calls_per_step(calls(own_loop, 51), calls(own_loop, 91))
    assert sum(n for n in per_step.values() if n > 0) <= MOST_CALLS_OWN_LOOP, per_step
    assert per_step["accumulation.py:Accumulation.backward"] == 1.0


IMPORTS = """
import gc, json, sys, threading, time
gc.disable()
torch_began = time.process_time()
import torch
torch_took = time.process_time() - torch_began
before = set(sys.modules)
seen = []

def audit(event, arguments):
    if event.startswith(("socket.", "subprocess.", "os.fork", "os.posix_spawn", "os.system", "os.exec", "pty.")):
        seen.append(event)
    if event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
        if not str(arguments[0]).endswith((".pyc",)) and ".pyc." not in str(arguments[0]):
            seen.append(f"open {arguments[0]} {arguments[1]}")
    if event == "_thread.start_new_thread":
        seen.append(event)

sys.addaudithook(audit)
threads = threading.active_count()
began = time.process_time()
import treadle
treadle.Trainer, treadle.Accelerator
took = time.process_time() - began
result = {
    "took": took,
    "torch": torch_took,
    "seen": seen,
    "threads": threading.active_count() - threads,
    "modules": sorted(set(sys.modules) - before),
}
print(json.dumps(result))
"""
HEAVY = (
    "lightning",
    "matplotlib",
    "omegaconf",
    "pandas",
    "scipy",
    "sklearn",
    "tensorboard",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.fsdp",
    "torch.utils.tensorboard",
    "torchmetrics",
    "tqdm",
    "yaml",
)


MOST_OF_TORCHS_IMPORT = 0.06  # 0.04, without passes of the garbage collector over torch's objects, which take 0.05


@pytest.mark.long
def test_import():
    results = []
    for attempt in range(4):  # the first one compiles, if need be, and keeps the bytecode whatever the environment says
        done = script(IMPORTS, env={"PYTHONDONTWRITEBYTECODE": ""}, fresh=True)
        assert done.returncode == 0, done.stderr
        if not attempt:
            continue
        result = json.loads(done.stdout.splitlines()[-1])
        assert result["seen"] == []
        assert result["threads"] == 0
        heavy = [m for m in result["modules"] if any(m == name or m.startswith(name + ".") for name in HEAVY)]
        assert heavy == []
        results.append(result["took"] / result["torch"])
        if results[-1] <= MOST_OF_TORCHS_IMPORT:
            return
    pytest.fail(f"the imports took {results} of the time that torch's takes")


@pytest.mark.parametrize("form", ["file", "directory"])
def test_what_a_checkpoint_costs_beside_its_bytes(tmp_path, form):
    counted, points = {}, []

    def save_side_by_side(trainer, _):
        save, folder = partial(trainer.save_checkpoint, format=form), tmp_path / "saved"
        save(folder / "first")
        counted.update(calls(save, folder / "second"))
        points.extend(disk_points(lambda: save(folder / "third")))

    saves = LambdaCallback(on_train_epoch_end=save_side_by_side)
    trainer = treadle.Trainer(accelerator="cpu", max_epochs=1, default_root_dir=tmp_path, callbacks=[saves])
    trainer.fit(without_frames(), loader(4, 1, features=4))

    total = sum(counted.values())
    most = MOST_CALLS_CHECKPOINT[form]
    assert total <= most, f"{total} calls: {sorted(counted.items(), key=lambda n: -n[1])[:20]}"

    done = [point for point in points if point.moment == "after"]
    if form == "file":  # it is created, so that it is known whose it is if the writing is killed
        assert [point.operation for point in done] == ["write_bytes", "write_stream", "fsync", "replace", "fsync"]
        assert os.path.basename(done[-1].path) == "saved"
        return
    files = len(os.listdir(tmp_path / "saved" / "third")) - 1  # without the manifest
    operations = [point.operation.partition("_")[0] for point in done]
    expected = ["mkdir", *["write"] * files, *["fsync"] * files]  # all are written before the first is waited for
    assert operations == [*expected, "write", "fsync", "fsync", "rename", "fsync"]
    synced = [os.path.basename(point.path) for point in done if point.operation == "fsync"][-3:]
    assert (synced[0], synced[2]) == ("manifest.json", "saved")
    assert (synced[1][:7], synced[1][-5:]) == (".third.", ".part")  # with the writer's name between them
