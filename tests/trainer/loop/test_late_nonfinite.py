"""NaN where the host learns of it one step later, as on a GPU: the device leaves out the step meanwhile."""

import math

import pytest
import torch
from support.models import gathered
from support.processes import run
from support.trainers import make_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from treadle.engine.optim import Accumulation

import treadle

STEPS = 6


class Net(treadle.TaskModule):
    """Has a NaN in one loss of one rank; remembers the weights and the optimizer's state before each step."""

    def __init__(self, bad, kind, rank=0, manual=False):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(3, 2)
        self.bad, self.kind, self.rank = bad, kind, rank
        self.automatic_optimization = not manual
        self.wrapped = manual != "unwrapped"
        self.before = []

    def training_step(self, batch, batch_idx):
        loss = self.net(batch[0]).square().mean()
        if batch_idx == self.bad and self.global_rank == self.rank:
            loss = loss * math.nan
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers(use_pl_optimizer=self.wrapped)
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return None

    def on_before_optimizer_step(self, optimizer):
        self.before.append(read(self, optimizer))

    def configure_optimizers(self):
        if self.kind == "SGD":
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, fused=True)
        return torch.optim.AdamW(self.parameters(), lr=0.1, fused=self.kind == "fused AdamW")


def read(task, optimizer):
    tensors = [*task.parameters(), *(v for state in optimizer.state.values() for v in state.values())]
    return [gathered(t).clone() for t in tensors]


class LateAccumulation(Accumulation):
    """Reads votes as if they came from a device."""

    def agree_on_steps(self, *, finite, at_once):
        super().agree_on_steps(finite=finite, at_once=at_once)
        self.always_agree = True
        self.agreement.on_host = False
        self.agreement.immediate = at_once


def fit(bad, kind, rank=0, manual=False, **flags):
    """Return the error, whether the weights and the optimizer are as before the bad step, and the steps prepared."""
    task = Net(bad, kind, rank, manual)
    trainer = make_trainer(**flags)
    data = torch.randn(STEPS * trainer.world_size, 3, generator=torch.Generator().manual_seed(1))
    trainer.accelerator.accumulation.__class__ = LateAccumulation
    with pytest.raises(ValueError, match="is not finite") as raised:
        trainer.fit(task, DataLoader(TensorDataset(data), 1))
    after, before = read(task, trainer.optimizers[0]), task.before[bad]
    unchanged = all(map(torch.equal, after[:2], before[:2]))
    if before[2:]:
        unchanged &= all(map(torch.equal, after, before))
    return str(raised.value), unchanged, len(task.before)


@pytest.mark.guarantee
@pytest.mark.parametrize("manual", [False, True, "unwrapped"])
@pytest.mark.parametrize("bad", [0, 2, STEPS - 1])
@pytest.mark.parametrize("kind", ["fused AdamW", "SGD"])
def test_the_bad_step_is_left_out(kind, bad, manual):
    if kind == "SGD" and not bad:
        return  # see below
    message, unchanged, prepared = fit(bad, kind, manual=manual)
    assert unchanged
    assert f"optimizer step {bad + 1} (epoch 0, micro-batch {bad})" in message
    assert "the weights in memory" not in message
    assert prepared == bad + 1  # the step after it is not begun


@pytest.mark.parametrize(("kind", "bad", "manual"), [("AdamW", 2, False), ("AdamW", 2, "unwrapped"), ("SGD", 0, False)])
def test_what_can_not_be_left_out_is_said(kind, bad, manual):
    message, unchanged, _ = fit(bad, kind, manual=manual)
    assert not unchanged
    assert "This step was already applied to the weights in memory. Resume from a checkpoint." in message


def on_two_ranks(strategy, cases):
    for bad, manual in cases:
        message, unchanged, _ = fit(bad, "fused AdamW", rank=1, manual=manual, strategy=strategy)
        assert unchanged, message
        assert f"the loss is not finite on rank 1 in optimizer step {bad + 1}" in message, message


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "cases"),
    [
        ("ddp", [(2, False), (STEPS - 1, False), (2, "unwrapped")]),
        pytest.param("fsdp", [(2, False), (STEPS - 1, False)], marks=pytest.mark.exhaustive),
    ],
)
def test_two_ranks_leave_it_out(strategy, cases):
    run(on_two_ranks, 2, strategy, cases)
