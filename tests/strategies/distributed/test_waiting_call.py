"""Calls that ranks do not make together: errors for exchanges of objects and in debug mode, else the watchdog ends."""

import re
import time
from datetime import timedelta

import pytest
import torch
from support.ddp_loops import message
from support.models import LoggedLine, Normed, take_step
from support.processes import run, script
from support.trainers import make_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from treadle.strategies import open_world

import treadle

DEBUG = {"TREADLE_DEBUG": "1"}


def other_calls():
    accelerator = treadle.Accelerator(cpu=True)
    main = accelerator.is_main_process
    return message(lambda: accelerator.reduce(torch.ones(3)) if main else accelerator.gather(torch.ones(1)))[1]


def test_exchanges_that_do_not_match_are_refused_on_every_rank():
    for text in run(other_calls, 2):
        assert re.search(r"rank 0: reduce at .*test_waiting_call.py:\d+\n  rank 1: gather at .*:\d+", text), text


def compared():
    accelerator = treadle.Accelerator(cpu=True)
    world, rank = accelerator.world, accelerator.process_index
    odd = rank == world.size - 1
    calls = [
        lambda: world.all_reduce(torch.ones(3 if odd else 2, 4)),
        lambda: world.all_reduce(torch.ones(2, dtype=torch.float64 if odd else torch.float32)),
        lambda: accelerator.wait_for_everyone() if odd else accelerator.gather(torch.ones(2)),
        lambda: world.all_reduce(torch.ones(2), "max" if odd else "sum"),
        lambda: world.broadcast("x", 1 if odd else 0),
        lambda: world.any(True) if odd else world.all_gather(torch.tensor(1)),
        lambda: accelerator.wait_for_everyone() if odd else accelerator.save_state("never written"),
    ]
    texts = [message(call)[1] for call in calls]
    if odd:  # a barrier may stand in two branches, but values must not be mixed
        accelerator.wait_for_everyone()
        texts.append(message(lambda: world.all_reduce(torch.ones(1)))[1])
    else:
        accelerator.wait_for_everyone()
        texts.append(message(lambda: world.all_reduce(torch.ones(1)))[1])
    part = world.part(world.mesh(pair=2, single=2)["pair"])
    in_part = part.all_reduce(torch.tensor(rank)).item(), message(part.all_reduce, torch.ones(2 + rank // 2))
    worlds = world, open_world("cpu")  # two worlds over one group have one sequence of calls
    # Nothing ran, so nothing is out of step.
    total = worlds[rank % 2].all_reduce(torch.tensor(rank + 1)).item()
    return texts, in_part, total, accelerator.gather(torch.tensor([rank])).tolist()


@pytest.mark.long
def test_debug_mode_compares_each_call_before_it_runs():
    results = run(compared, 4, env=DEBUG)
    texts = results[0][0]
    wanted = [
        (r"all_reduce sum of float32 \[2, 4\] on cpu", r"all_reduce sum of float32 \[3, 4\] on cpu"),
        (r"all_reduce sum of float32 \[2\] on cpu", r"all_reduce sum of float64 \[2\] on cpu"),
        ("gather_objects in gather", "barrier in wait_for_everyone"),
        ("all_reduce sum of", "all_reduce max of"),
        ("broadcast from 0", "broadcast from 1"),
        (r"all_gather of int64 \[\]", r"all_reduce max of int64 \[\]"),
        ("meet in save_state", "barrier in wait_for_everyone"),
        ("all_reduce sum of", "all_reduce sum of"),
    ]
    for text, (most, odd) in zip(texts, wanted, strict=True):
        assert re.search(rf"^  ranks 0-2: {most} .*test_waiting_call.py:\d+$", text, re.MULTILINE), text
        assert re.search(rf"^  rank 3: {odd} .*test_waiting_call.py:\d+$", text, re.MULTILINE), text
    assert [result[0] for result in results] == [texts] * 4
    assert [result[1][0] for result in results] == [2, 4, 2, 4]
    for rank, (_, (_, (_, text)), *_) in enumerate(results):
        assert [n for n in range(4) if f"  rank {n}: all_reduce" in text] == [rank % 2, rank % 2 + 2]
    assert [result[2:] for result in results] == [(10, [0, 1, 2, 3])] * 4


def train(folder):
    treadle.seed_everything(3)
    task = LoggedLine()
    task.net = nn.Sequential(Normed(), nn.Dropout(0.2))
    data = DataLoader(TensorDataset(torch.randn(36, 3)), 4, shuffle=True)
    make_trainer(max_epochs=2, default_root_dir=folder, enable_checkpointing=True).fit(task, data)
    return [value.tolist() for value in task.state_dict().values()]


@pytest.mark.long
def test_debug_mode_changes_no_number(tmp_path):
    plain = run(train, 2, str(tmp_path / "plain"))
    assert run(train, 2, str(tmp_path / "debug"), env={**DEBUG, "TREADLE_DEBUG_REPLICAS": "1"}) == plain


def come_late(root, strategy):
    """In each step one rank is busy by itself, now one and now the other; after that both save."""
    accelerator = treadle.Accelerator(cpu=True, strategy=strategy)
    model = accelerator.prepare(nn.Linear(2, 1))
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(2):
        take_step(accelerator, model, optimizer, torch.ones(2, 2))
        if accelerator.process_index == step:
            time.sleep(0.5)
        accelerator.save_state(f"{root}/{step}")
    world = open_world("cpu", timeout=timedelta(seconds=0.5))
    if world.is_main:
        with pytest.raises(RuntimeError, match=r"a save needs all processes, but only 1 of 2 called it within 0\.5 s"):
            world.meet("a save")
    else:
        time.sleep(0.8)
    world.meet("the next save")
    world.meet("the next save")
    return accelerator.steps


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.exhaustive)])
def test_ranks_may_come_late(tmp_path, strategy):
    assert run(come_late, 2, str(tmp_path), strategy) == [2, 2]


HEAD = """
import sys, torch, treadle
import torch.distributed as dist
from treadle.compat.demos.boring_classes import BoringModel
from treadle.strategies.distributed import watchdog

watchdog._STALL = 1.5
"""
LOOP = """
accelerator = treadle.Accelerator(cpu=True, devices=2)
model = accelerator.prepare(torch.nn.Linear(2, 1))
for step in range(3):
    if step == 2 and accelerator.process_index == 1:
        CALL
    accelerator.backward(model(torch.ones(4, 2)).sum())
"""
BARRIER = LOOP.replace("CALL", "accelerator.wait_for_everyone()")
SAVE = LOOP.replace("CALL", "accelerator.save_state('s')")
MODEL = """
accelerator = treadle.Accelerator(cpu=True, devices=2, strategy="fsdp")
model = accelerator.prepare(torch.nn.Linear(2, 1))
accelerator.save_state("s") if accelerator.is_main_process else accelerator.save_model(model, "m")
"""
FIRST = """
accelerator = treadle.Accelerator(cpu=True, devices=2)
dist.all_reduce(torch.ones(3)) if accelerator.is_main_process else dist.barrier()
"""
END = """
accelerator = treadle.Accelerator(cpu=True, devices=2)
if accelerator.is_main_process:
    accelerator.save_state("s")
"""
PASSED = """
import threading
accelerator = treadle.Accelerator(cpu=True, devices=2)
model = accelerator.prepare(torch.nn.Linear(2, 1))
accelerator.save_state("s")
if accelerator.process_index == 1:
    accelerator.save_state("s")
model(torch.ones(4, 2))
lock = threading.Lock()  # as in a collective of NCCL's, which no stack shows
lock.acquire()
lock.acquire()
"""
FIT = """
class Task(BoringModel):
    def on_train_epoch_end(self):
        if self.trainer.global_rank == 1:
            self.trainer.save_checkpoint("one")

trainer = treadle.Trainer(accelerator="cpu", devices=2, limit_train_batches=2, limit_val_batches=0, logger=False)
trainer.fit(Task())
"""


@pytest.mark.long
@pytest.mark.guarantee
@pytest.mark.parametrize(
    ("source", "first", "second"),
    [
        pytest.param(BARRIER, "backward at ", "barrier in wait_for_everyone at .*:13", marks=pytest.mark.exhaustive),
        (SAVE, "backward at .*train.py:14", "meet in save_state at .*train.py:13"),
        pytest.param(MODEL, "meet in save_state at", "meet in save_model at", marks=pytest.mark.exhaustive),
        # Calls of torch that come first of all.
        pytest.param(FIRST, "all_reduce at .*train.py:10", "barrier at .*train.py:10", marks=pytest.mark.exhaustive),
        (END, "meet in save_state at .*train.py:11", "has reached the end of the script"),
        (PASSED, "has continued, and waits or works in .*train.py:18", "meet in save_state at .*train.py:14"),
        (FIT, r"(\w+ in fit at|has continued, and waits or works in) .*:15", "meet in save_checkpoint at .*:12"),
    ],
    ids=["barrier", "save_state", "save_model", "torch", "end", "passed", "fit"],
)
def test_ranks_that_wait_in_different_calls_end_with_both_lines(source, first, second):
    done = script(HEAD + source)
    assert done.returncode == 1, done.stderr
    assert re.search(rf"treadle:   rank 0: {first}", done.stderr), done.stderr
    assert re.search(rf"treadle:   rank 1: {second}", done.stderr), done.stderr


LONE = """
import sys, treadle
from treadle.compat.demos.boring_classes import BoringModel

trainer = treadle.Trainer(accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_progress_bar=False)
trainer.validate(BoringModel())
if trainer.global_rank == int(sys.argv[1]):
    trainer.validate(BoringModel())
"""


@pytest.mark.guarantee
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_a_call_of_one_rank_after_the_others_have_ended_names_its_line(rank):
    done = script(LONE, str(rank))
    assert done.returncode == 1, done.stderr
    assert f"treadle: rank {1 - rank} of 2 ended first, without a Python error: process " in done.stderr
    assert "or reached the end of its script, while this rank was in a call that needs all ranks\n" in done.stderr
    assert "line 8, in <module>" in done.stderr
    assert done.stderr.count("Traceback") == 1
