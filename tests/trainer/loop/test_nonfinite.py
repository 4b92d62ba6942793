"""NaN and infinity in losses and gradients: on one rank, in one micro-batch, against a loop written by hand."""

import itertools
import math

import pytest
import torch
from support.models import gathered
from support.processes import run
from support.trainers import make_trainer
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import treadle

BATCHES, SAMPLES = 8, 2  # of each rank; the poisoned group is the second
SCALE = 1e-3  # with float16's first loss scale, 2**16, its gradients are still finite
KINDS = {
    "loss": lambda loss, h, value: loss * value,
    "loss alone": lambda loss, h, value: loss + value,  # its gradient is finite
    "gradient": lambda loss, h, value: h.register_hook(lambda gradient: gradient * value) and loss,
    "root": lambda loss, h, value: loss + (h * 0.0).sqrt().sum(),  # 0 has an infinite slope, times 0
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


class Poisoned(treadle.TaskModule):
    """Poisons one micro-batch of one rank; remembers everything that a skipped step must leave as it was."""

    def __init__(self, kind, value, rank, batch, k, manual):
        super().__init__()
        self.net = Net()
        self.kind, self.value, self.poisoned, self.k = kind, value, (rank, batch), k
        self.automatic_optimization = not manual
        self.states = []

    def training_step(self, batch, batch_idx):
        h = self.net.first(batch[0])
        loss = self.net.second(torch.tanh(h)).float().square().mean() * SCALE
        if (self.global_rank, batch_idx) == self.poisoned:
            loss = KINDS[self.kind](loss, h, self.value)
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        self.manual_backward(loss / self.k)
        if batch_idx % self.k == self.k - 1:
            optimizer.step()
            optimizer.zero_grad()
        return None

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx % self.k == self.k - 1:
            optimizer = self.trainer.optimizers[0]
            state = [v for p in self.parameters() for v in optimizer.state[p].values()]
            scheduler = self.trainer.lr_scheduler_configs[0].scheduler.state_dict()
            values = [gathered(tensor).clone() for tensor in (*self.parameters(), *state)]
            self.states.append((values, {name: scheduler[name] for name in ("last_epoch", "_last_lr")}))

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": StepLR(optimizer, 1, 0.5), "interval": "step"}]


def data(ranks):
    """Rank r of two reads the r-th half of each global batch."""
    return torch.randn(BATCHES, 2, SAMPLES, 3, generator=torch.Generator().manual_seed(1))[:, :ranks]


def by_hand(ranks, k, left_out, manual):
    """Adam over all ranks' batches, without the group ``left_out``."""
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    schedule = StepLR(optimizer, 1, 0.5)
    for group in range(BATCHES // k):
        if group == left_out:
            continue
        batches = data(ranks)[group * k : (group + 1) * k]
        (net(batches).square().mean() * SCALE).backward()
        optimizer.step()
        optimizer.zero_grad()
        if not manual:
            schedule.step()
    return list(net.parameters())


def train(kind, value, rank, at, k, policy, strategy, precision, manual, ranks):
    batch = k + (0 if at == "first" else k - 1)
    task = Poisoned(kind, value, rank, batch, k, manual)
    flags = {"devices": ranks, "strategy": strategy, "precision": precision, "on_nonfinite": policy}
    trainer = make_trainer(accumulate_grad_batches=1 if manual else k, **flags)
    try:
        trainer.fit(task, DataLoader(TensorDataset(data(ranks).reshape(-1, 3)), SAMPLES))
    except ValueError as error:
        check_error(str(error), task, kind, rank, batch, policy)
    else:
        assert policy == "skip" or (precision == "16-mixed" and "loss" not in kind), "nothing was raised"
        check_skipped(task, trainer, k, precision, manual, ranks)


def check_error(text, task, kind, rank, batch, policy):
    assert policy == "raise", text
    assert "optimizer step 2 (epoch 0" in text, text
    if "loss" in kind:
        assert f"the loss is not finite on rank {rank} in" in text, text
        assert f"micro-batch {batch})" in text, text
    else:
        assert "every loss is finite, but the gradient of net.first." in text, text
    assert all(torch.isfinite(gathered(p)).all() for p in task.parameters())


def check_skipped(task, trainer, k, precision, manual, ranks):
    assert (trainer.global_step, trainer.progress.skipped) == (BATCHES // k - 1, 1)
    (before, schedule_before), (after, schedule_after) = task.states[:2]
    assert schedule_before == schedule_after
    assert all(map(torch.equal, before, after))
    assert all(torch.isfinite(value).all() for values, _ in task.states for value in values)
    tolerance = 1e-6 if precision == "32-true" else 2e-2
    for found, expected in zip(task.parameters(), by_hand(ranks, k, 1, manual), strict=True):
        torch.testing.assert_close(gathered(found), expected.detach(), atol=tolerance, rtol=1e-5)


def name_cases(ranks, strategy):
    """Every combination: what ``train`` takes."""
    values = [(kind, value) for kind in ("loss", "loss alone", "gradient") for value in (math.nan, math.inf)]
    product = itertools.product(
        [*values, ("root", 0.0)],
        range(ranks),
        [("last", 1), ("first", 2), ("last", 2)],
        ("raise", "skip"),
        ("32-true", "bf16-mixed", "16-mixed"),
        (False, True) if strategy != "fsdp" else (False,),  # which can't run manual optimization
    )
    return [
        (kind, value, rank, at, k, policy, strategy, precision, manual, ranks)
        for (kind, value), rank, (at, k), policy, precision, manual in product
    ]


def train_all(cases):
    for case in cases:
        try:
            train(*case)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


@pytest.mark.parametrize("every", [17, pytest.param(1, marks=pytest.mark.exhaustive)], ids=["spread", "all"])
@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [(1, "auto"), (2, "ddp"), *(pytest.param(ranks, "fsdp", marks=pytest.mark.exhaustive) for ranks in (1, 2))],
)
def test_what_is_not_finite_is_an_error_or_left_out(ranks, strategy, every):
    cases = name_cases(ranks, strategy)[::every]
    assert len({case[5] for case in cases}) == 2
    run(train_all, ranks, cases, timeout=600)
