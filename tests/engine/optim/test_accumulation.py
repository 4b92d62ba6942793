"""Loops that call `accumulate` several times for a batch compared with plain loops, and prepared optimizers."""

import copy
import io
import itertools
import pickle
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from support.models import take_step
from support.processes import run
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

import treadle
from treadle.utils import GradientAccumulationPlugin

EPOCHS = 2
LR = 0.05
KINDS = {  # samples, global batch size, calls for each batch
    "batches": (10, 4, lambda batch, width: [batch]),
    "slices": (10, 4, lambda batch, width: batch.split(width // 2)),
    "slices of whole batches": (8, 4, lambda batch, width: batch.split(width // 2)),
    "passes": (9, 4, lambda batch, width: [batch] * 3),
    "rollouts": (8, 4, lambda batch, width: [*batch.split(width // 2)] * 2),
}
GRID = [(kind, k, sync) for kind in KINDS for k in (1, 2, 4) for sync in (True, False) if kind != "batches" or not sync]


def rows(count):
    return torch.randn(count, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


def build():
    torch.manual_seed(1)
    return nn.Linear(3, 1).double()


def start(*loaders, momentum=0.0, **options):
    """An Accelerator, and what it prepared: a model, its optimizer and loaders."""
    accelerator, model = treadle.Accelerator(cpu=True, **options), build()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=momentum)
    return accelerator, *accelerator.prepare(model, optimizer, *loaders)


def loss_of(model, x):
    return (model(x) ** 2).mean()


def norm_of(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def by_hand(losses, momentum=0.0, clip=None):
    """A plain loop with a step on each of ``losses``, which take the model: gradient norms, and weights at the end."""
    model, norms = build(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=momentum)
    for loss in losses:
        loss(model).backward()
        norms.append(norm_of(model))
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return norms, weights(model)


def mean_loss(calls, weight):
    return lambda model: sum(weight(x) * loss_of(model, x) for x in calls) / sum(map(weight, calls))


def plain_loop(kind, k, world):
    """Every k-th call is a step on the mean over the calls since the last step, each with the slices of all ranks.

    Whole batches weigh as many samples as they have.
    """
    samples, width, split = KINDS[kind]
    calls = []
    for batch in [*rows(samples).split(width)] * EPOCHS:
        shares = [split(share, width // world) for share in batch.chunk(world)]
        calls += map(torch.cat, zip(*shares, strict=True))
    steps = [calls[first : first + k] for first in range(0, len(calls) - len(calls) % k, k)]
    weight = len if kind == "batches" else lambda x: 1
    return by_hand([mean_loss(step, weight) for step in steps], momentum=0.9, clip=0.5)


def own_loop(kind, k, sync, stop=None, folder=None):
    """With ``stop``, save a checkpoint after so many batches and return; with ``folder`` alone, resume from it."""
    samples, width, split = KINDS[kind]
    plugin = GradientAccumulationPlugin(num_steps=k, sync_with_dataloader=sync)
    accelerator, model, optimizer = start(momentum=0.9, gradient_accumulation_plugin=plugin)
    width //= accelerator.num_processes
    loader = accelerator.prepare(DataLoader(rows(samples), width))
    trace, done = [], 0
    if folder and not stop:
        accelerator.load_state(folder)
    for _ in range(loader.epoch, EPOCHS):
        for batch in loader:
            for x in split(batch, width):
                with accelerator.accumulate(model):
                    accelerator.backward(loss_of(model, x))
                    if accelerator.sync_gradients:
                        trace.append(norm_of(model))
                        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
                    optimizer.zero_grad()
            done += 1
            if done == stop:
                accelerator.save_state(folder)
                return trace, weights(model)
    if not accelerator.sync_gradients:  # also behind the last batch
        with pytest.raises((ValueError, RuntimeError), match="during gradient accumulation"):
            accelerator.save_state("never")
        assert not Path("never").exists()
    return trace, weights(model)


def plain_gan(k, samples=10, width=4):
    """Every k-th batch is a step of both models, and so is the last batch of an epoch."""
    batches = rows(samples).split(width)
    steps = [torch.cat(batches[first : first + k]) for first in range(0, len(batches), k)] * EPOCHS
    first = by_hand([lambda model, x=x: loss_of(model, x) for x in steps])
    second = by_hand([lambda model, x=x: loss_of(model, x) * 2 for x in steps])
    return [norm for pair in zip(first[0], second[0], strict=True) for norm in pair], first[1] + second[1]


def own_gan(k, weighted=False, samples=10, width=4):
    accelerator = treadle.Accelerator(cpu=True, gradient_accumulation_steps=k)
    models = [build(), build()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=LR) for model in models]
    loader = DataLoader(rows(samples), width // accelerator.num_processes)
    *models, loader = accelerator.prepare(*models, loader)
    optimizers = [accelerator.prepare(optimizer) for optimizer in optimizers]
    trace = []
    for _ in range(EPOCHS):
        for x in loader:
            for model, power in zip(models, (1, 2), strict=True):  # the steps follow the second backward pass
                with accelerator.accumulate(model):
                    accelerator.backward(loss_of(model, x) * power, weight=len(x) if weighted else None)
                    if accelerator.sync_gradients:
                        trace.append(norm_of(model))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return trace, weights(models[0]) + weights(models[1])


TOKENS = ((3.0, 8.0), (5.0, 1.0), (2.0, 0.0))  # of each micro-batch, on ranks 0 and 1


def weighted_gradients(how, precision="no"):
    """Return the gradient norm that the user sees after each backward pass of a complete group, and after the clip."""
    accelerator, model, optimizer = start(gradient_accumulation_steps=3, mixed_precision=precision)
    rank, trace = accelerator.process_index, []
    for _ in range(2):
        for number, tokens in enumerate(TOKENS):
            x, weight = rows(6)[2 * number + rank][None], tokens[rank]
            with accelerator.accumulate(model):
                if how == "halves":  # two backward passes with half of the tokens each
                    accelerator.backward(loss_of(model, x), weight=weight / 2)
                    accelerator.backward(loss_of(model, x), weight=weight / 2)
                else:
                    weight = torch.tensor(weight) if how == "tensor" else weight
                    accelerator.backward(loss_of(model, x), weight=weight)
                if accelerator.sync_gradients:
                    if precision == "fp16":
                        accelerator.unscale_gradients()
                    trace.append(norm_of(model))
                    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
    return trace, weights(model)


def plain_weighted_gradients(world):
    tokens = torch.tensor(TOKENS, dtype=torch.float64)[:, :world].flatten()
    x = torch.cat([rows(6)[2 * number + rank][None] for number in range(3) for rank in range(world)])
    return by_hand([lambda model: (model(x) ** 2).squeeze(1) @ tokens / tokens.sum()] * 2, clip=0.5)


def skipped_steps():
    """Return the gradients of a loop that discards every second gradient without a step."""
    accelerator, model, optimizer = start()
    optimizer.param_groups[0]["lr"] = 0.0
    seen = []
    for number, x in enumerate(rows(4)):
        if number % 2:
            model.zero_grad()
        else:
            optimizer.zero_grad()
        accelerator.backward(loss_of(model, x[None]), weight=number + 1)
        seen.append(norm_of(model))
    return seen


# -- what a loop may do between backward and step --------------------------------------------------------------------


def scale(backward, model, inner, x):
    backward(loss_of(model, x))
    for parameter in model.parameters():
        parameter.grad *= 0.5


def remove_one(backward, model, inner, x):
    backward(loss_of(model, x))
    inner.bias.grad = None


def backward_twice_through_one_graph(backward, model, inner, x):
    output = model(x)
    backward((output**2).mean(), retain_graph=True)
    backward(output.abs().mean())
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def backward_after_two_forwards(backward, model, inner, x):
    first, second = loss_of(model, x), model(x).abs().mean()
    backward(first)
    backward(second)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def forward_of_the_users_module(backward, model, inner, x):
    backward(loss_of(inner, x))
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def forward_of_both(backward, model, inner, x):
    backward(loss_of(model, x))
    backward(loss_of(inner, x))


def penalty(backward, model, inner, x):
    x = x.clone().requires_grad_()
    output = model(x)
    (gradient,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    backward((output**2).mean() + gradient.pow(2).sum(1).mean())


def sharpness_aware(backward, model, inner, x):
    backward(loss_of(model, x))
    before = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * parameter.grad / norm_of(model)
    model.zero_grad()
    backward(loss_of(model, x))
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), before, strict=True):
            parameter.copy_(value)


BODIES = (
    *(scale, remove_one, backward_twice_through_one_graph, backward_after_two_forwards),
    *(forward_of_the_users_module, forward_of_both, penalty, sharpness_aware),
)


def own_body(body, k):
    accelerator, model, optimizer = start(momentum=0.9, gradient_accumulation_steps=k)
    inner = accelerator.unwrap_model(model)
    for x in accelerator.prepare(DataLoader(rows(9), 4 // accelerator.num_processes)):
        with accelerator.accumulate(model):
            body(accelerator.backward, model, inner, x)
            optimizer.step()
            optimizer.zero_grad()
    return weights(inner)


def plain_body(body):
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    for x in rows(9).split(4):
        body(lambda loss, **options: loss.backward(**options), model, model, x)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def loops():
    return {
        **{body.__name__: own_body(body, 1) for body in BODIES},
        "accumulated": [own_body(body, 2) for body in (forward_of_both, penalty)],
        **{("weights", how): weighted_gradients(how) for how in ("number", "tensor", "halves")},
        ("weights", "fp16"): weighted_gradients("number", "fp16"),
        "skipped": skipped_steps(),
        **{point: own_loop(*point) for point in GRID},
        **{("gan", k, weighted): own_gan(k, weighted) for k in (1, 2, 4) for weighted in (False, True)},
    }


@pytest.fixture(scope="module")
def found():
    return {1: [loops()], 2: run(loops, 2)}


def check(one, other):
    assert one[0] == pytest.approx(other[0], rel=1e-10)
    assert one[1] == pytest.approx(other[1], rel=1e-10)


@pytest.mark.guarantee
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("point", GRID, ids=str)
def test_each_call_for_a_batch_is_a_micro_batch(found, world, point):
    for ranks in found[world]:
        check(ranks[point], plain_loop(*point[:2], world))


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("weighted", [False, True])
def test_two_models_in_turn_share_the_loaders_groups(found, world, k, weighted):
    for ranks in found[world]:
        check(ranks["gan", k, weighted], plain_gan(k))


@pytest.mark.guarantee
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("how", ["number", "tensor", "halves", "fp16"])
def test_a_weighted_gradient_is_the_mean_as_soon_as_it_is_complete(found, world, how):
    trace, values = plain_weighted_gradients(world)
    for ranks in found[world]:
        assert ranks["weights", how][0] == pytest.approx(trace, rel=1e-4 if how == "fp16" else 1e-10)
        assert ranks["weights", how][1] == pytest.approx(values, rel=1e-4 if how == "fp16" else 1e-10)


def test_discarded_gradients_leave_no_weight(found):
    wanted = [by_hand([lambda model, x=x: loss_of(model, x[None])])[0][0] for x in rows(4)]
    for ranks in (*found[1], *found[2]):
        assert ranks["skipped"] == pytest.approx(wanted, rel=1e-10)


def take_within(count):
    """`next(batches)` within `accumulate`, over two epochs: which calls were steps, and the weights at the end."""
    accelerator, model, optimizer, loader = start(DataLoader(rows(count), 4), gradient_accumulation_steps=2)
    batches, synced = itertools.chain.from_iterable(itertools.repeat(loader)), []
    for _ in range(2 * len(loader)):
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, next(batches)))
            synced.append(accelerator.sync_gradients)
            optimizer.step()
            optimizer.zero_grad()
    return synced, weights(model)


@pytest.mark.parametrize("world", [1, 2])
def test_batches_taken_within_the_context(world):
    """Each call counts from the first, on the mean over the group's calls, also across the end of an epoch."""
    count = 11 * world - 1  # of the last batch, two processes get unequal shares
    calls = [*rows(count).split(4 * world)] * 2
    pairs = zip(calls[::2], calls[1::2], strict=True)
    _, wanted = by_hand([mean_loss(pair, lambda x: 1) for pair in pairs])
    for synced, found in run(take_within, world, count):
        assert synced == [False, True] * 3
        assert found == pytest.approx(wanted, rel=1e-10)


def take_ahead(steps, sets_sync):
    """All batches of a step before its losses, whose sum over all its rows the loop itself divides by their number."""
    counted = 1 if sets_sync else steps
    accelerator, model, optimizer, loader = start(DataLoader(rows(11), 2), gradient_accumulation_steps=counted)
    norms = []
    for _ in range(EPOCHS):
        batches = iter(loader)
        for first in range(0, len(loader), steps):
            taken = list(itertools.islice(batches, min(steps, len(loader) - first)))
            count = accelerator.gather(torch.tensor(sum(map(len, taken)))).sum()
            for x in taken:
                loss = loss_of(model, x) * len(x) / count
                if sets_sync:
                    accelerator.gradient_state._set_sync_gradients(x is taken[-1])
                with nullcontext() if x is taken[-1] else accelerator.no_sync(model):
                    accelerator.backward(loss * counted * accelerator.num_processes)
            norms.append(norm_of(model))
            optimizer.step()
            optimizer.zero_grad()
    return norms, weights(model)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("steps", "sets_sync"), [(4, False), (4, True), (2, True)])
def test_batches_taken_ahead_without_the_context(world, steps, sets_sync):
    """The loop of Accelerate's guide for samples of different size, whose last steps have fewer and smaller batches.

    That of transformers' ``Trainer`` sets ``sync_gradients`` itself, and may take one batch per process.
    """
    losses = [lambda model, x=x: loss_of(model, x) for x in rows(11).split(2 * steps) * EPOCHS]
    norms, values = by_hand(losses)
    for found in run(take_ahead, world, steps // world, sets_sync):
        assert found == (pytest.approx(norms, rel=1e-10), pytest.approx(values, rel=1e-10))


def test_calls_for_the_only_batch_of_an_epoch(recwarn):
    """The first call already was a step, because nothing shows that others follow."""
    accelerator, model, optimizer, loader = start(DataLoader(rows(4), 4), gradient_accumulation_steps=2)
    synced = []
    for _ in range(2):
        for x in loader:
            for _ in range(4):
                take_step(accelerator, model, optimizer, x)
                synced.append(accelerator.sync_gradients)
    assert synced == [True, False, True, False, True, False, True, False]
    assert [str(w.message) for w in recwarn if "From now on, each call counts as a micro-batch" in str(w.message)]


def test_a_resumed_loop_counts_calls_from_its_first_batch(tmp_path):
    whole = own_loop("passes", 3, True)
    before = own_loop("passes", 3, True, stop=5, folder=tmp_path / "c")
    after = own_loop("passes", 3, True, folder=tmp_path / "c")
    assert before[0] + after[0] == whole[0]
    assert after[1] == whole[1]


@pytest.mark.guarantee
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_what_a_loop_does_between_backward_and_step(found, world, body):
    """torch reduces only the first backward pass after a forward pass of DDP; each one counts here."""
    for ranks in found[world]:
        assert ranks[body.__name__] == pytest.approx(plain_body(body), rel=1e-10)


def test_backward_passes_that_torch_does_not_reduce_with_accumulation(found):
    for ranks in found[2]:
        for values, wanted in zip(ranks["accumulated"], found[1][0]["accumulated"], strict=True):
            assert values == pytest.approx(wanted, rel=1e-10)


def prepare_after_backward():
    model = nn.Linear(2, 2)
    model, optimizer = treadle.Accelerator(cpu=True).prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(1, 2)).sum().backward()
    return model, optimizer


def test_zero_grad_drops_the_gradients_or_keeps_them_as_zeros():
    model, optimizer = prepare_after_backward()
    optimizer.zero_grad(set_to_none=False)
    assert torch.equal(model.weight.grad, torch.zeros(2, 2))
    optimizer.zero_grad()
    assert [parameter.grad for parameter in model.parameters()] == [None, None]
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        optimizer.zero_grad()
    assert "Optimizer.zero_grad#SGD.zero_grad" in {row.key for row in recorded.key_averages()}


@pytest.mark.parametrize("owner", [lambda optimizer: optimizer, type], ids=["patched", "class"])
def test_a_zero_grad_of_ones_own_is_called(monkeypatch, owner):
    _, optimizer = prepare_after_backward()
    calls = []
    monkeypatch.setattr(owner(optimizer.optimizer), "zero_grad", lambda *_, set_to_none=True: calls.append(set_to_none))
    optimizer.zero_grad()
    assert calls == [True]


def copy_with_torch(optimizer):
    torch.save(optimizer, buffer := io.BytesIO())
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("make_copy", [lambda o: pickle.loads(pickle.dumps(o)), copy.deepcopy, copy_with_torch])
def test_a_copy_is_the_wrapped_optimizer_with_its_state(make_copy):
    model = nn.Linear(2, 2)
    prepared = treadle.Accelerator(cpu=True).prepare(torch.optim.Adam(model.parameters(), lr=0.1))
    x = torch.tensor([[1.0, -2.0]])
    model(x).square().sum().backward()
    prepared.step()
    copied = make_copy(prepared)
    assert type(copied) is torch.optim.Adam
    weight, bias = copied.param_groups[0]["params"]
    assert torch.equal(weight, model.weight)
    for optimizer in (prepared, copied):
        optimizer.zero_grad()
    nn.functional.linear(x, weight, bias).square().sum().backward()
    copied.step()
    assert not torch.equal(weight, model.weight)  # its parameters are its own
    model(x).square().sum().backward()
    prepared.step()
    assert torch.equal(weight, model.weight)  # the moments and the step count came along


def test_an_optimizer_whose_zero_grad_takes_no_argument():
    class Own(torch.optim.SGD):
        def zero_grad(self):
            super().zero_grad()

    accelerator = treadle.Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model := nn.Linear(2, 1), Own(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
    optimizer.zero_grad()
    assert model.weight.grad is None
