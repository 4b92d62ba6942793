"""NaN and infinity in losses and gradients: on one rank, in one micro-batch, against a loop written by hand."""

import itertools
import math

import pytest
import torch
from support.models import whole
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
            values = [whole(tensor).clone() for tensor in (*self.parameters(), *state)]
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
    """Return whether the run went as it must, in words: "" or what was wrong."""
    batch = k + (0 if at == "first" else k - 1)
    task = Poisoned(kind, value, rank, batch, k, manual)
    flags = {"devices": ranks, "strategy": strategy, "precision": precision, "on_nonfinite": policy}
    trainer = make_trainer(accumulate_grad_batches=1 if manual else k, **flags)
    try:
        trainer.fit(task, DataLoader(TensorDataset(data(ranks).reshape(-1, 3)), SAMPLES))
    except ValueError as error:
        return check_error(str(error), task, kind, rank, batch, policy, manual)
    if policy == "raise" and (precision != "16-mixed" or "loss" in kind):
        return "nothing was raised"
    return check_skipped(task, trainer, k, precision, manual, ranks)


def check_error(text, task, kind, rank, batch, policy, manual):
    if policy != "raise":
        return text
    words = ["optimizer step 2 (epoch 0"]
    if "loss" in kind:
        words += [f"the loss is not finite on rank {rank} in", f"micro-batch {batch})"]
    else:
        words += ["every loss is finite, but the gradient of net.first."]
    missing = [word for word in words if word not in text]
    finite = all(torch.isfinite(whole(p)).all() for p in task.parameters())
    return f"{missing} not in {text!r}" if missing else "" if finite else "weights were spoiled"


def check_skipped(task, trainer, k, precision, manual, ranks):
    steps = BATCHES // k - 1
    counts = (trainer.global_step, trainer.progress.skipped)
    if counts != (steps, 1):
        return f"{counts} steps taken and skipped"
    (before, schedule_before), (after, schedule_after) = task.states[:2]
    if schedule_before != schedule_after:
        return "the scheduler was advanced"
    if not all(map(torch.equal, before, after)):
        return "weights or optimizer state have changed"
    if not all(torch.isfinite(value).all() for values, _ in task.states for value in values):
        return "weights or optimizer state are not finite"
    expected, tolerance = by_hand(ranks, k, 1, manual), 1e-6 if precision == "32-true" else 2e-2
    if not all(torch.allclose(whole(a), b, atol=tolerance) for a, b in zip(task.parameters(), expected, strict=True)):
        return "other weights than by hand"
    return ""


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
    return {case: train(*case) for case in cases}


@pytest.mark.parametrize("every", [17, pytest.param(1, marks=pytest.mark.exhaustive)], ids=["spread", "all"])
@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [(1, "auto"), (2, "ddp"), *(pytest.param(ranks, "fsdp", marks=pytest.mark.exhaustive) for ranks in (1, 2))],
)
def test_what_is_not_finite_is_an_error_or_left_out(ranks, strategy, every):
    cases = name_cases(ranks, strategy)[::every]
    assert len({case[5] for case in cases}) == 2
    for by_case in run(train_all, ranks, cases, timeout=600):
        assert {case: wrong for case, wrong in by_case.items() if wrong} == {}
        assert len(by_case) == len(cases)
