"""`Accelerator.preemptible`: a loop of one's own that a signal ends, on all ranks after the same step."""

import os
import signal
import time

import pytest
import torch
from support.processes import run
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from treadle.engine import Preempted
from treadle.strategies.distributed.training_clock import progress

import treadle

EPOCHS, SAMPLES = 2, 600


def train(folder, number=None, rank=0, strategy="auto", accumulate=1, watches=True, pause=0.0, **options):
    """Train from the saved state, if any; a signal comes in the third batch."""
    torch.manual_seed(5)
    accelerator = treadle.Accelerator(accelerator="cpu", strategy=strategy, gradient_accumulation_steps=accumulate)
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    data = TensorDataset(torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1)))
    net, optimizer, loader = accelerator.prepare(
        net, torch.optim.AdamW(net.parameters(), lr=0.01), DataLoader(data, 2, shuffle=True)
    )
    first = accelerator.load_state(folder)["epoch"] if os.path.isdir(folder) else 0
    losses, status = [], None
    exchanges = progress.entered
    try:
        with accelerator.preemptible(**options) as preemption:
            for _epoch in range(first, EPOCHS):
                for (batch,) in loader:
                    with accelerator.accumulate(net):
                        loss = net(batch).square().mean()
                        accelerator.backward(loss)
                        optimizer.step()
                        optimizer.zero_grad()
                    losses.append(loss.item())
                    time.sleep(pause)
                    if len(losses) == 3 and number is not None and accelerator.process_index == rank:
                        os.kill(os.getpid(), number)
                    if watches and preemption.should_stop():
                        accelerator.save_state(folder)
                        preemption.leave()
        exchanges = progress.entered - exchanges
    except (Preempted, KeyboardInterrupt) as error:
        status = getattr(error, "code", 130)
    return {"status": status, "losses": losses, "steps": accelerator.steps, "drawn": torch.rand(()).item()}, exchanges


def check(first, second, whole, status=143):
    assert (first["status"], second["status"]) == (status, None)
    assert first["losses"] + second["losses"] == whole["losses"]
    assert (second["steps"], second["drawn"]) == (whole["steps"], whole["drawn"])


@pytest.mark.guarantee
@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.exhaustive), 4])
def test_a_signal_ends_the_loop_after_the_step(accumulate, tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    whole, _ = train(tmp_path / "whole", accumulate=accumulate)
    first, _ = train(tmp_path / "a", signal.SIGTERM, accumulate=accumulate)
    assert len(first["losses"]) == max(3, accumulate)
    assert signal.getsignal(signal.SIGTERM) is before
    check(first, train(tmp_path / "a", accumulate=accumulate)[0], whole)


def test_ctrl_c_too_where_that_is_asked_for(tmp_path):
    whole, _ = train(tmp_path / "whole")
    first, _ = train(tmp_path / "a", signal.SIGINT, interrupts=True)
    check(first, train(tmp_path / "a")[0], whole, 130)
    found, _ = train(tmp_path / "b", signal.SIGINT)
    assert (found["status"], len(found["losses"]), (tmp_path / "b").exists()) == (130, 3, False)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_loop_that_never_asks_ends_behind_the_block(number, tmp_path):
    called = []
    before = signal.signal(number, lambda *_: called.append(1))
    try:
        found, _ = train(tmp_path / "a", number, watches=False, interrupts=number == signal.SIGINT)
    finally:
        signal.signal(number, before)
    assert (found["status"], called) == (None, [1])


def on_two(folder, strategy, rank):
    whole, exchanges = train(f"{folder}/whole", strategy=strategy)
    _, without = train(f"{folder}/not", strategy=strategy, watches=False)
    assert exchanges == without
    first, _ = train(f"{folder}/a", signal.SIGTERM, rank, strategy, pause=0.02 * (1 + 0.2 * rank))
    second, _ = train(f"{folder}/a", strategy=strategy)
    check(first, second, whole)
    return len(first["losses"])


@pytest.mark.guarantee
@pytest.mark.parametrize(("strategy", "rank"), [("ddp", 1), pytest.param("fsdp", 0, marks=pytest.mark.exhaustive)])
def test_all_ranks_leave_after_the_same_step(strategy, rank, tmp_path):
    steps, other = run(on_two, 2, str(tmp_path), strategy, rank)
    assert steps == other
    assert 3 <= steps < EPOCHS * SAMPLES // 4
