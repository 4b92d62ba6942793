"""A call that the others do not make is an error that names the lines of all ranks, outside of debug mode too."""

import re

import pytest
import torch
from processes import run, script
from treadle.strategies import DistributedOperationException

import treadle


def other_calls():
    accelerator = treadle.Accelerator(cpu=True)
    try:
        if accelerator.is_main_process:
            accelerator.reduce(torch.ones(3))
        else:
            accelerator.gather(torch.ones(1))
    except DistributedOperationException as error:
        return str(error)
    return ""


def test_exchanges_that_do_not_match_are_refused_on_every_rank():
    for text in run(other_calls, 2):
        assert re.search(r"rank 0: reduce at .*test_waiting_call.py:\d+\n  rank 1: gather at .*:\d+", text), text


ALONE = """
import torch, treadle
from treadle.strategies.distributed import watchdog

watchdog._STALL = 2.0
accelerator = treadle.Accelerator(cpu=True, devices=2)
model = accelerator.prepare(torch.nn.Linear(2, 1))
for step in range(3):
    if step == 2 and accelerator.is_main_process:
        accelerator.wait_for_everyone()
    accelerator.backward(model(torch.ones(4, 2)).sum())
"""


@pytest.mark.guarantee
def test_ranks_that_wait_in_different_calls_end_with_both_lines(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where the stacks are written
    (tmp_path / "train.py").write_text(ALONE)
    done = script(tmp_path / "train.py")
    assert done.returncode == 1, done.stderr
    assert re.search(r"treadle:   rank 0: barrier in wait_for_everyone at .*train.py:10", done.stderr), done.stderr
    assert re.search(r"treadle:   rank 1: backward at .*train.py:11", done.stderr), done.stderr


FIRST = """
import torch, treadle
import torch.distributed as dist
from treadle.strategies.distributed import watchdog

watchdog._STALL = 2.0
accelerator = treadle.Accelerator(cpu=True, devices=2)
if accelerator.is_main_process:
    dist.all_reduce(torch.ones(3))
else:
    dist.barrier()
"""


@pytest.mark.exhaustive
def test_calls_of_torch_that_come_first_of_all_are_told_apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(FIRST)
    done = script(tmp_path / "train.py")
    assert done.returncode == 1, done.stderr
    assert re.search(r"treadle:   rank 0: all_reduce at .*train.py:9", done.stderr), done.stderr
    assert re.search(r"treadle:   rank 1: barrier at .*train.py:11", done.stderr), done.stderr


LONE = """
import sys, torch, treadle
from torch.utils.data import DataLoader, TensorDataset

class Task(treadle.TaskModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(2, 1)

    def validation_step(self, batch, batch_idx):
        self.log("loss", self.net(batch[0]).mean())

trainer = treadle.Trainer(accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_progress_bar=False)
loader = DataLoader(TensorDataset(torch.ones(16, 2)), 4)
trainer.validate(Task(), loader)
if trainer.global_rank == int(sys.argv[1]):
    trainer.validate(Task(), loader)
"""


@pytest.mark.guarantee
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_a_call_of_one_rank_after_the_others_have_ended_names_its_line(tmp_path, rank):
    (tmp_path / "train.py").write_text(LONE)
    done = script(tmp_path / "train.py", str(rank))
    assert done.returncode == 1, done.stderr
    assert f"treadle: rank {1 - rank} of 2 ended first, without a Python error: process " in done.stderr
    assert "or reached the end of its script, while this rank was in a call that needs all ranks\n" in done.stderr
    assert "line 17, in <module>" in done.stderr
    assert done.stderr.count("Traceback") == 1
