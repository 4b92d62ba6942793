"""A loop of one's own: an optimizer applies no gradient that is not finite, on no rank."""

import math

import pytest
import torch
from support.processes import run
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from treadle.engine.optim.agreement import _one_on, flag_not_finite

import treadle

BREAKS = 5  # the sample whose gradient is not finite


class Net(nn.Module):
    """Registers its layers in another order than it runs them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(1, 1)
        self.entry, self.middle = nn.Linear(1, 1), nn.Linear(1, 1)

    def forward(self, x, value):
        h = self.middle(self.entry(x))
        if (x == BREAKS).any():
            h.register_hook(lambda gradient: gradient * value)
        return self.head(h)


def values(net):
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach().clone() for p in net.parameters()]


def act_as_on_a_device(accelerator, immediate=False):
    """Let the guard check gradients as on an accelerator, whose values the host reads one step later."""
    guard = accelerator._gradient_guard
    start = guard._start_checks

    def start_on_device(optimizer):
        check = start(optimizer)
        check.on_host, check.immediate = False, immediate
        return check

    guard.immediate, guard._start_checks = immediate, start_on_device


def loop(policy, value=math.nan, clip=None, k=1, on_device=False, **options):
    """Eight samples, one per batch and rank; returns the weights, the steps taken and left out, and the rates."""
    accelerator = treadle.Accelerator(cpu=True, on_nonfinite=policy, gradient_accumulation_steps=k, **options)
    if on_device:
        act_as_on_a_device(accelerator, immediate=policy == "skip")
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
    loader = DataLoader(TensorDataset(torch.arange(8.0)[:, None]), 1)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.ConstantLR(optimizer.optimizer, 1.0, 100))
    skipped = []
    for (x,) in loader:
        with accelerator.accumulate(net):
            loss = net(x, value).square().mean() / 100
            accelerator.backward(loss)
            if accelerator.sync_gradients and clip == "norm":
                accelerator.clip_grad_norm_(net.parameters(), 1.0)
            if accelerator.sync_gradients and clip == "value":
                accelerator.clip_grad_value_(net.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            skipped.append(accelerator.optimizer_step_was_skipped)
            optimizer.zero_grad()
    accelerator.end_training()
    return values(net), (optimizer.steps_taken, optimizer.skipped), scheduler.scheduler.last_epoch, skipped


def failure(*args, **options):
    """Return the message that the loop ends with."""
    with pytest.raises(ValueError, match="is not finite") as raised:
        loop(*args, **options)
    return str(raised.value)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(("clip", "strategy"), [(None, "auto"), ("norm", "auto"), (None, "fsdp"), ("norm", "fsdp")])
def test_the_step_and_the_samples_are_named(value, clip, strategy):
    message = failure("raise", value, clip, strategy=strategy)
    place = "the first of 4 such gradients in the order of the backward pass, in optimizer"
    assert f"the gradient of middle.bias is not finite, {place}" in message
    assert "optimizer step 6. On rank 0: sample 5 of the dataset. Check the data" in message
    assert "Accelerator(on_nonfinite='skip')" in message


def test_an_accumulation_group_that_is_clipped_by_value():
    message = failure("raise", clip="value", k=3)
    assert "the gradient of middle.bias is not finite, the first of 4" in message
    assert "optimizer step 2. On rank 0: samples 3, 4, 5 of the dataset." in message


@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
@pytest.mark.parametrize("clip", [None, "norm"])
def test_a_step_is_left_out(strategy, clip, caplog):
    weights, counts, advanced, skipped = loop("skip", clip=clip, strategy=strategy, on_device=clip is not None)
    assert all(value.isfinite().all() for value in weights)
    assert (counts, advanced) == ((7, 1), 7)
    assert skipped == [number == BREAKS for number in range(8)]
    assert "which is skipped. On rank 0: sample 5 of the dataset." in caplog.text


def test_nobody_looks_if_asked_not_to():
    weights, counts, *_ = loop("ignore")
    assert counts == (8, 0)
    assert not all(value.isfinite().all() for value in weights)


def test_a_finite_run_is_as_without():
    assert all(map(torch.equal, loop("raise", 1.0)[0], loop("ignore", 1.0)[0]))


@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
def test_what_a_device_tells_one_step_later(strategy):
    message = failure("raise", strategy=strategy, on_device=True)
    assert "the gradient of middle.bias is not finite" in message
    assert "optimizer step 6. This step was already applied to the weights in memory" in message
    accelerator = treadle.Accelerator(cpu=True)
    act_as_on_a_device(accelerator)
    weight = nn.Parameter(torch.ones(1))
    optimizer = accelerator.prepare(torch.optim.SGD([weight], lr=0.1))
    weight.grad = torch.tensor([math.nan])
    optimizer.step()
    with pytest.raises(ValueError, match="a gradient is not finite in optimizer step 1"):
        accelerator.end_training()


@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
def test_a_fused_step_is_left_out_on_the_device(strategy):
    accelerator = treadle.Accelerator(cpu=True, strategy=strategy)
    act_as_on_a_device(accelerator)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1, fused=True)
    net, optimizer = accelerator.prepare(net, optimizer)
    weights = []
    for number, value in enumerate([1.0, math.nan]):
        accelerator.backward(net(torch.tensor([[float(BREAKS)]]), value).sum())
        optimizer.step()
        optimizer.zero_grad()
        weights.append(values(net))
        assert optimizer.steps_taken == number + 1
    assert all(map(torch.equal, *weights))
    with pytest.raises(ValueError, match=r"is not finite, the .* of 4 .*in optimizer step 2. Check the data") as raised:
        accelerator.end_training()
    assert "weights in memory" not in str(raised.value)


def test_two_models_are_told_apart():
    accelerator = treadle.Accelerator(cpu=True)
    first, second = nn.Linear(1, 1), nn.Linear(1, 1)
    first, second, one, other = accelerator.prepare(
        first, second, torch.optim.SGD(first.parameters(), lr=0.1), torch.optim.SGD(second.parameters(), lr=0.1)
    )
    accelerator.backward(first(torch.ones(1, 1)).sum() + second(torch.full((1, 1), math.nan)).sum())
    one.step()  # its gradients are finite
    with pytest.raises(ValueError, match=r"weight \(model 1, Linear\) is not finite in optimizer step 1"):
        other.step()


def test_the_loss_scaler_leaves_out_its_own_steps():
    _, counts, *_ = loop("raise", mixed_precision="fp16")
    assert counts[1] >= 1


def test_a_policy_that_does_not_exist():
    with pytest.raises(ValueError, match="on_nonfinite='stop'"):
        treadle.Accelerator(cpu=True, on_nonfinite="stop")


def both_policies(strategy):
    message = failure("raise", strategy=strategy)
    return message, loop("skip", strategy=strategy)


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.exhaustive)])
def test_all_ranks_decide_alike(strategy):
    first, second = run(both_policies, 2, strategy)
    for rank, (message, (weights, counts, advanced, _)) in enumerate((first, second)):
        place = "the first of 4 such gradients in the order of the backward pass, in"
        assert f"the gradient of middle.bias is not finite, {place}" in message
        own = f"On rank {rank}: sample {4 + rank} of the dataset."
        assert f"optimizer step 3. {own if strategy == 'ddp' else 'On rank 0: sample 4 of the dataset.'}" in message
        assert "are already reduced over ranks" in message
        assert (counts, advanced) == ((3, 1), 6)  # a schedule is sized in batches of one process
        assert all(value.isfinite().all() for value in weights)
    assert all(map(torch.equal, first[1][0], second[1][0]))


def test_what_the_device_is_told_has_one_format_whatever_the_default_is():
    """A fused optimizer reads float32; a step in bf16-true runs with another default."""
    before = torch.get_default_dtype()
    _one_on.cache_clear()
    torch.set_default_dtype(torch.bfloat16)
    try:
        flags = [flag_not_finite(torch.tensor([1.0, value])) for value in (2.0, float("nan"))]
    finally:
        torch.set_default_dtype(before)
    assert [flag.item() for flag in flags] == [0.0, 1.0]
    assert {flag.dtype for flag in flags} == {torch.float32}
