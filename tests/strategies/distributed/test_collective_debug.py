"""TREADLE_DEBUG=1: calls that do not match are errors with both sides, on every process, before anything runs."""

import ast
import inspect
import os
import re
import sys
import time
from pathlib import Path

import pytest
import torch
from processes import run, script
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from treadle.strategies import DistributedOperationException, World, open_world
from treadle.strategies.distributed.collective_debug import Call, DebugWorld, verdict_on
from treadle.strategies.distributed.launch_environment import DebugEnvironment

import treadle

DEBUG = {"TREADLE_DEBUG": "1"}
SOON = {**DEBUG, "TREADLE_DEBUG_TIMEOUT": "2"}
FILE = Path(__file__).name


def told(call):
    """The words of the error that `call` raises, and the line that it was called in; None if it raises none."""
    line = sys._getframe(1).f_lineno
    try:
        call()
    except DistributedOperationException as error:
        return line, str(error)
    return line, None


def mismatches():
    accelerator = treadle.Accelerator(cpu=True)
    world, rank = accelerator.world, accelerator.process_index
    odd = rank == world.size - 1
    found = [
        told(lambda: accelerator.reduce(torch.ones(3 if odd else 2, 4))),
        told(lambda: accelerator.reduce(torch.ones(2, dtype=torch.float64 if odd else torch.float32))),
        told(lambda: accelerator.wait_for_everyone() if odd else accelerator.gather(torch.ones(2))),
        told(lambda: world.all_reduce(torch.ones(2), "max" if odd else "sum")),
        told(lambda: world.broadcast("x", 1 if odd else 0)),
        told(lambda: world.broadcast_tensor(torch.ones(2) if odd else torch.ones(2, 1))),
        told(lambda: world.any(True) if odd else world.all_gather(torch.tensor(1))),
    ]
    # Nothing ran, so nothing is out of step.
    return found, world.all_reduce(torch.tensor(rank + 1)).item(), accelerator.gather(torch.tensor([rank])).tolist()


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_calls_that_do_not_match(size):
    results = run(mismatches, size, env=DEBUG)
    others, odd = ("rank 0" if size == 2 else "ranks 0-1"), f"rank {size - 1}"
    found = results[0][0]
    for other in results[1:]:
        assert other[0] == found, "all processes say the same"
    assert [other[1:] for other in results] == [(size * (size + 1) // 2, list(range(size)))] * size
    wanted = [
        (
            r"all_reduce sum of float32 \[2, 4\] on cpu in reduce",
            r"all_reduce sum of float32 \[3, 4\] on cpu in reduce",
        ),
        (r"all_reduce sum of float32 \[2\] on cpu in reduce", r"all_reduce sum of float64 \[2\] on cpu in reduce"),
        ("gather_objects in gather", "barrier in wait_for_everyone"),
        ("all_reduce sum of", "all_reduce max of"),
        ("broadcast from 0", "broadcast from 1"),
        (r"broadcast_tensor from 0 of float32 \[2, 1\]", r"broadcast_tensor from 0 of float32 \[2\]"),
        (r"all_gather of int64 \[\]", r"all_reduce max of int64 \[\] on cpu in any"),
    ]
    for (line, text), (mine, theirs) in zip(found, wanted, strict=True):
        assert text is not None
        assert re.search(rf"^  {others}: {mine} .*{FILE}:{line} <lambda>$", text, re.MULTILINE), text
        assert re.search(rf"^  {odd}: {theirs} .*{FILE}:{line} <lambda>$", text, re.MULTILINE), text
    assert "calls that differ in the tensor:" in found[0][1]
    assert "pad_across_processes" in found[0][1]
    assert "calls that differ in the operation" in found[2][1]
    assert "same calls in the same order" in found[2][1]


def skipped():
    accelerator = treadle.Accelerator(cpu=True)
    accelerator.gather(torch.ones(1))
    began = time.monotonic()
    found = [told(lambda: accelerator.wait_for_everyone() if accelerator.is_main_process else time.sleep(3))]
    if not accelerator.is_main_process:  # late: the others have given up, and the call must not hang now
        found = [told(lambda: accelerator.reduce(torch.ones(1)))]
    found.append(told(lambda: accelerator.reduce(torch.ones(1))))
    return found, time.monotonic() - began


def test_a_process_that_does_not_come_is_named():
    results = run(skipped, 2, env=SOON)
    texts = {text for found, _ in results for _, text in found}
    assert len(texts) == 1, "one verdict, on every process, for this call and all later ones"
    text = texts.pop()
    assert text.startswith("rank 1 did not make a call that needs all processes within 2 s:\n  rank 0: barrier in ")
    assert re.search(rf"rank 0: barrier in wait_for_everyone at .*{FILE}:\d+ <lambda>\n", text)
    assert re.search(rf"rank 1: missing; its last call was all_gather of .* at .*{FILE}:\d+ skipped\n", text)
    assert "TREADLE_DEBUG_TIMEOUT" in text
    assert all(took < 8 for _, took in results)


LEAVES = """
import sys, torch, treadle
accelerator = treadle.Accelerator(cpu=True, devices=2)
accelerator.wait_for_everyone()
if not accelerator.is_main_process:
    {leave}
try:
    accelerator.gather(torch.ones(1))
except treadle.strategies.DistributedOperationException as error:
    print(error, flush=True)
"""


@pytest.mark.parametrize(
    ("leave", "words"),
    [
        pytest.param("sys.exit()", "has ended; its", marks=pytest.mark.exhaustive),
        ("sys.last_value = KeyError('own'); sys.exit()", "has ended with KeyError: 'own'; its"),
    ],
    ids=["normally", "with an error"],  # an exit status would make the launcher end the other one,
)
def test_a_process_that_ends_is_named_at_once(leave, words):
    began = time.monotonic()
    done = script(LEAVES.format(leave=leave), env={**DEBUG, "TREADLE_DEBUG_TIMEOUT": "100"})
    assert time.monotonic() - began < 50
    assert "rank 1 will not make a call that needs all processes:" in done.stdout, done.stderr
    assert "rank 0: gather_objects in gather" in done.stdout
    assert f"rank 1: {words} last call was barrier in wait_for_everyone at train.py:4 <module>" in done.stdout


def from_different_lines():
    accelerator = treadle.Accelerator(cpu=True)
    with accelerator.main_process_first():
        pass
    if accelerator.is_main_process:
        accelerator.wait_for_everyone()
        sent = accelerator.world.broadcast("sent")
    else:
        accelerator.wait_for_everyone()
        sent = accelerator.world.broadcast(None)
    if accelerator.is_main_process:
        mixed = told(lambda: accelerator.reduce(torch.ones(1)))
    else:
        mixed = told(lambda: accelerator.reduce(torch.ones(1)))
    return sent, mixed[1]


def test_branches_may_meet_in_a_barrier_but_not_mix_values():
    first, second = run(from_different_lines, 2, env=DEBUG)
    assert first == second
    assert first[0] == "sent"
    assert "calls that differ in the line:" in first[1]
    assert "\nEarlier: the processes make the call broadcast from 0 from different lines:" in first[1]


def parts():
    world = open_world("cpu")
    assert isinstance(world, DebugWorld)
    part = world.part(world.mesh(pair=2, single=2)["pair"] if world.size == 4 else world.mesh(all=world.size))
    assert isinstance(part, DebugWorld)
    fine = part.all_reduce(torch.tensor(world.rank)).item()
    return fine, told(lambda: part.all_reduce(torch.ones(2 + world.rank // 2)))[1]


def test_a_part_of_the_world_is_checked_for_itself():
    results = run(parts, 4, env=DEBUG)
    assert [fine for fine, _ in results] == [2, 4, 2, 4]
    assert "rank 0: all_reduce sum of float32 [2]" in results[0][1]
    assert "rank 2: all_reduce sum of float32 [3]" in results[0][1]
    assert "rank 1:" not in results[0][1]
    assert results[1][1] == results[3][1]
    assert "rank 3: all_reduce sum of float32 [3]" in results[1][1]


def several_worlds():
    worlds = [open_world("cpu") for _ in range(2)]
    values = [worlds[number % 2].all_reduce(torch.ones(1)).item() for number in range(5)]
    # One of them on one process, the other on the other: still one sequence.
    values.append(worlds[worlds[0].rank].all_reduce(torch.ones(1)).item())
    return values


def test_several_worlds_over_one_group_are_one_sequence():
    assert run(several_worlds, 2, env=SOON) == [[2.0] * 6] * 2


class Task(treadle.TaskModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = (self.net(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()
        self.losses.append(loss.item())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("value", self.net(batch[0]).mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-2)


def training(folder):
    treadle.seed_everything(3)
    loader = DataLoader(TensorDataset(torch.randn(36, 4)), 4, shuffle=True)
    task = Task()
    trainer = treadle.Trainer(
        accelerator="cpu",
        max_epochs=2,
        accumulate_grad_batches=2,
        default_root_dir=os.path.join(folder, os.environ.get("TREADLE_DEBUG", "0")),
        enable_progress_bar=False,
    )
    trainer.fit(task, loader, loader)
    return task.losses, [p.tolist() for p in task.state_dict().values()]


def test_training_is_the_same_bit_for_bit(tmp_path):
    plain = run(training, 2, str(tmp_path))
    checked = run(training, 2, str(tmp_path), env={**DEBUG, "TREADLE_DEBUG_REPLICAS": "1"})
    assert len(plain[0][0]) == 10
    assert checked == plain


def test_verdicts():
    def call(operation="barrier", value="", name="f", line="3 main", path="a/train.py"):
        return Call(operation, value, name, "", path, line)

    assert verdict_on([call(), call(path="b/train.py")], [0, 1]) == "=", "machines may keep a file elsewhere"
    assert verdict_on([call("has ended"), call("has ended; its last call was x")], [0, 1]) == "="
    text = verdict_on([call(), call(), call("has ended"), call(), call("has ended")], [0, 1, 2, 4, 5])
    assert text.startswith("?ranks 2, 5 will not make")
    assert "  ranks 0-1, 4: barrier in f at a/train.py:3 main" in text
    assert verdict_on([call(), call(line="4 main")], [0, 1])[0] == "~"
    assert verdict_on([call(), call(name="g")], [0, 1])[0] == "!"
    assert verdict_on([call("all_reduce sum"), call("all_reduce sum", line="4 main")], [0, 1])[0] == "!"


def test_the_environment():
    assert DebugEnvironment.read({}) is None
    assert DebugEnvironment.read({"TREADLE_DEBUG": "0", "TREADLE_DEBUG_TIMEOUT": "5"}) is None
    assert DebugEnvironment.read({"TREADLE_DEBUG": ""}) is None
    assert DebugEnvironment.read(DEBUG) == DebugEnvironment(timeout=60, replicas=100)
    given = {**DEBUG, "TREADLE_DEBUG_TIMEOUT": "5", "TREADLE_DEBUG_REPLICAS": "0"}
    assert DebugEnvironment.read(given) == DebugEnvironment(timeout=5, replicas=0)
    for name, value in (("TREADLE_DEBUG", "yes"), ("TREADLE_DEBUG_TIMEOUT", "0"), ("TREADLE_DEBUG_REPLICAS", "-1")):
        with pytest.raises(ValueError, match=f"{name}="):
            DebugEnvironment.read({**DEBUG, name: value})


def test_a_world_of_one_answers_at_once(monkeypatch):
    monkeypatch.setenv("TREADLE_DEBUG", "1")
    world = open_world("cpu", 1)
    assert type(world) is DebugWorld
    assert world.all_reduce(torch.ones(1)).item() == 1.0
    assert (world.gather_objects(1), world.broadcast(2), world.any(True)) == ([1], 2, True)
    world.barrier()


def test_off_nothing_of_it_is_there(monkeypatch):
    monkeypatch.delenv("TREADLE_DEBUG", raising=False)
    world = World()
    assert type(world) is World
    assert world.debug is None
    done = script(
        "import sys, treadle; treadle.Accelerator(cpu=True); print(type(treadle.Accelerator(cpu=True).world))"
    )
    assert "World'>" in done.stdout
    assert "DebugWorld" not in done.stdout


def test_every_exchange_is_checked():
    """Whatever in World calls torch.distributed to exchange something has its counterpart."""
    asks_only = {"get_global_rank", "get_process_group_ranks", "get_rank", "get_world_size", "ReduceOp"}
    asks_only |= {"get_backend_config"}
    asks_only |= {"ProcessGroup", "Work"}
    asks_only |= {"new_group"}  # `World.beside`, right after a call that is compared
    asks_only |= {"PrefixStore"}  # `World.claim`, which any process may call alone
    tree = ast.parse(inspect.getsource(sys.modules[World.__module__]))
    world = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "World")
    exchanging = {
        method.name
        for method in world.body
        if isinstance(method, ast.FunctionDef)
        for call in ast.walk(method)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
        if getattr(call.func.value, "id", None) == "dist" and call.func.attr not in asks_only
    }
    assert {"barrier", "all_reduce", "all_gather", "gather_objects", "broadcast"} <= exchanging
    assert exchanging <= set(vars(DebugWorld))
