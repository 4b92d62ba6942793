"""The Accelerator against loops written by hand, in one process and in two."""

import copy
import math

import pytest
import torch
from support.models import ScalarNet, Stream
from support.processes import run
from torch import nn
from torch.utils.data import DataLoader
from treadle.data_loader import DataLoaderDispatcher, DataLoaderShard, DataLoaderStateMixin

import treadle

SAMPLES = 10


def data():
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(3, dtype=torch.float64, generator=generator), torch.tensor(i % 4 + 1.0)) for i in range(SAMPLES)
    ]


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def by_hand(k, width, weighted, clip, processes=1):
    """The reference: each step on the mean over its whole group, clipped once; a batch of each process is a step of
    the schedule."""
    model = ScalarNet()
    torch.manual_seed(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    batches = list(DataLoader(data(), batch_size=width, shuffle=True))
    trace = []
    for start in range(0, len(batches), k):
        x, tokens = (torch.cat(parts) for parts in zip(*batches[start : start + k], strict=True))
        per_sample = model(x) ** 2
        loss = (per_sample * tokens).sum() / tokens.sum() if weighted else per_sample.mean()
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip).item()
        optimizer.step()
        for _ in range(processes):
            scheduler.step()
        trace.append((norm, optimizer.param_groups[0]["lr"], weights(model)))
    return trace


def by_accelerator(k, width, weighted, clip):
    model = ScalarNet()
    torch.manual_seed(7)
    accelerator = treadle.Accelerator(cpu=True, gradient_accumulation_steps=k)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    loader = DataLoader(data(), batch_size=width // accelerator.num_processes, shuffle=True)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    trace = []
    for x, tokens in loader:
        with accelerator.accumulate(model):
            per_sample = model(x) ** 2
            if weighted:
                loss = (per_sample * tokens).sum() / tokens.sum()
                accelerator.backward(loss, weight=tokens.sum() if weighted == "tensor" else tokens.sum().item())
            else:
                accelerator.backward(per_sample.mean())
            norm = accelerator.clip_grad_norm_(model.parameters(), clip)
            assert (norm is None) != accelerator.sync_gradients
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            trace.append((norm.item(), optimizer.param_groups[0]["lr"], weights(accelerator.unwrap_model(model))))
    return trace


GRID = [
    (k, width, weighted, clip)
    for k in (1, 3)
    for width in (2, 4, 6)
    for weighted in (False, "tensor", "number")
    for clip in (0.05, 1e9)
]


def all_traces():
    return [by_accelerator(*point) for point in GRID]


@pytest.mark.guarantee
def test_gradients_clipping_and_schedules(two_ranks):
    for processes, found in ((1, all_traces()), *((2, found["traces"]) for found in two_ranks)):
        wanted = [by_hand(*point, processes) for point in GRID]
        for one, other in zip(found, wanted, strict=True):
            assert len(one) == len(other)
            for (norm, lr, values), (norm_by_hand, lr_by_hand, values_by_hand) in zip(one, other, strict=True):
                assert norm == pytest.approx(norm_by_hand, rel=1e-11)
                assert lr == lr_by_hand
                assert values == pytest.approx(values_by_hand, rel=1e-11, abs=1e-12)


def test_a_group_that_weighs_nothing_has_no_gradient():
    accelerator = treadle.Accelerator(cpu=True)
    model = accelerator.prepare(nn.Linear(1, 1))
    accelerator.backward(model(torch.ones(1, 1)).mean(), weight=0.0)
    accelerator.accumulation.finish_gradients()
    assert model.weight.grad.item() == 0.0


def test_weights_in_some_micro_batches_only():
    accelerator = treadle.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = accelerator.prepare(nn.Linear(1, 1))

    def run_backward(*weights):
        for weight in weights:
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(1, 1)).mean(), weight=weight)

    run_backward(None, None, 2, 2)  # the group before may have reported none
    for weights, words in (((2, None), "had a weight"), ((None, 2), "had no weight")):
        accelerator.accumulation.drop_gradients()
        with pytest.raises(ValueError, match=f"of this accumulation group {words}"):
            run_backward(*weights)
    accelerator.accumulation.drop_gradients()
    run_backward(2)


def test_two_models_that_share_a_parameter():
    accelerator = treadle.Accelerator(cpu=True)
    first, second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    second.weight = first.weight
    first, second = accelerator.prepare(first, second)
    x = torch.ones(1, 1)
    accelerator.backward((first(x) + second(x)).mean(), weight=4.0)
    accelerator.accumulation.finish_gradients()
    assert first.weight.grad.item() == 2.0


# -- float16 ---------------------------------------------------------------------------------------------------------


@pytest.mark.guarantee
def test_a_skipped_step_advances_nothing():
    """The second of four steps overflows, for the first of two optimizers that share a scale."""
    accelerator = treadle.Accelerator(cpu=True, mixed_precision="fp16")
    model = nn.ParameterList([nn.Parameter(torch.ones(())) for _ in range(2)])
    prepared = [accelerator.prepare(torch.optim.SGD([p], lr=0.5)) for p in model]
    schedules = [accelerator.prepare(torch.optim.lr_scheduler.StepLR(o.optimizer, 1, 0.1)) for o in prepared]
    trace = []
    for step in range(4):
        overflow = torch.tensor(float("inf") if step == 1 else 1.0)
        with accelerator.accumulate(model):
            accelerator.backward(model[0] * overflow + model[1])
            scale = accelerator.scaler.get_scale()
            for p in model:
                accelerator.clip_grad_norm_([p], 0.25)
            if step != 1:
                assert [round(p.grad.item(), 6) for p in model] == [0.25, 0.25]
            skipped = []
            for optimizer, schedule in zip(prepared, schedules, strict=True):
                optimizer.step()
                skipped.append(accelerator.optimizer_step_was_skipped)
                schedule.step()
                optimizer.zero_grad()
        trace.append((scale, skipped, [o.param_groups[0]["lr"] for o in prepared], [p.item() for p in model]))
    scales, skipped, rates, values = zip(*trace, strict=True)
    assert scales == (65536.0, 65536.0, 32768.0, 32768.0)
    assert skipped == ([False, False], [True, False], [False, False], [False, False])
    assert [lr for lr, _ in rates] == pytest.approx([0.05, 0.05, 0.005, 0.0005])
    assert [p for p, _ in values] == pytest.approx([0.875, 0.875, 0.8625, 0.86125], abs=1e-6)
    assert [p for _, p in values] == pytest.approx([0.875, 0.8625, 0.86125, 0.861125], abs=1e-6)


def step_with_scaler(scaler, factors, folder=None, resume=None):
    """Return the scale of each loss, whether its step was skipped, and the parameter after it."""
    accelerator = treadle.Accelerator(cpu=True, mixed_precision="fp16")
    parameter = nn.Parameter(torch.ones(()))
    optimizer = accelerator.prepare(torch.optim.SGD([parameter], lr=0.5))
    accelerator.scaler = scaler
    assert optimizer.scaler is accelerator.scaler is scaler
    if resume is not None:
        accelerator.load_state(resume)
    trace = []
    for factor in factors:
        accelerator.backward(parameter * factor)
        scale = parameter.grad.item() / factor
        accelerator.clip_grad_norm_([parameter], 0.25)
        optimizer.step()
        trace.append((scale, accelerator.optimizer_step_was_skipped, parameter.item()))
        optimizer.zero_grad()
    if folder is not None:
        accelerator.save_state(folder)
    return trace


def make_scaler(**options):
    return torch.amp.GradScaler("cpu", **{"init_scale": 4.0, "growth_interval": 2, **options})


def test_a_scaler_that_takes_the_place_of_the_accelerators(tmp_path):
    huge = 3e38  # finite, and infinite once it is scaled
    trace = step_with_scaler(make_scaler(), (1.0, huge, 1.0, 1.0), tmp_path / "c")
    scales, skipped, values = zip(*trace, strict=True)
    assert scales == (4.0, math.inf, 2.0, 2.0)
    assert skipped == (False, True, False, False)
    assert values == pytest.approx([0.875, 0.875, 0.75, 0.625], abs=1e-6)
    (resumed, *_) = step_with_scaler(make_scaler(init_scale=64.0), (1.0,), resume=tmp_path / "c")
    assert resumed[0] == 4.0  # two steps without an overflow: it has grown, and is the checkpoint's
    for scaler in (None, make_scaler(enabled=False)):
        trace = step_with_scaler(scaler, (1.0, 2.0))
        assert trace == [(1.0, False, pytest.approx(0.875)), (1.0, False, pytest.approx(0.75))]


def test_a_schedule_by_epoch_outlives_a_skipped_last_step():
    accelerator = treadle.Accelerator(cpu=True, mixed_precision="fp16")
    parameter = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    optimizer, schedule = accelerator.prepare(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1))
    for epoch in ((1.0, math.inf), (math.inf,)):
        for factor in epoch:
            accelerator.backward(parameter * factor)
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)


def test_two_precisions_in_one_process():
    half, full = (treadle.Accelerator(cpu=True, mixed_precision=p) for p in ("bf16", "no"))
    layer = nn.Linear(2, 2)
    one, other = half.prepare(copy.deepcopy(layer)), full.prepare(copy.deepcopy(layer))
    x = torch.randn(1, 2)
    assert one(x).dtype == other(x).dtype == torch.float32
    assert torch.equal(one(x), layer.bfloat16()(x.bfloat16()).float())
    assert not torch.equal(one(x), other(x))

    class Twice(nn.Module):
        def forward(self, x, model=None):
            return {"y": x @ x} if model is None else {**model(x), "x": x, "inside": (x @ x).dtype}

    twice = half.prepare(Twice())
    found = twice(x.T @ x, twice)
    assert (found["y"].dtype, found["inside"]) == (torch.float32, torch.bfloat16)
    assert not torch.is_autocast_enabled("cpu")


# -- two processes --------------------------------------------------------------------------------------------------


def step_of_a_compiled_model():
    accelerator = treadle.Accelerator(cpu=True, strategy="ddp", mixed_precision="bf16")
    net = nn.Linear(2, 1)
    net.outputs = lambda x: {"inside": net.forward(x).dtype, "loss": net.forward(x).sum()}
    model = torch.compile(accelerator.prepare(net), backend="eager")
    found = accelerator.method(model, "outputs")(torch.full((1, 2), 1.0 + accelerator.process_index))
    accelerator.backward(found["loss"])
    return found["inside"], net.weight.grad.tolist()


def private_generators():
    accelerator = treadle.Accelerator(cpu=True)
    generator = torch.Generator().manual_seed(accelerator.process_index)
    loader = accelerator.prepare(DataLoader(range(8), shuffle=True, generator=generator))
    return [batch.item() for batch in loader]


def several():
    return {
        "compiled": step_of_a_compiled_model(),
        "order": private_generators(),
        "traces": all_traces(),
    }


@pytest.fixture(scope="module")
def two_ranks():
    """What two processes found: one start for all of it."""
    return run(several, 2)


def test_a_method_of_a_model_that_is_compiled_after_it_was_prepared(two_ranks):
    assert [found["compiled"] for found in two_ranks] == [(torch.bfloat16, [[1.5, 1.5]])] * 2


def test_ranks_with_different_generators_share_one_order(two_ranks):
    assert sorted(i for found in two_ranks for i in found["order"]) == list(range(8))


# -- preparing -------------------------------------------------------------------------------------------------------


def test_preparing_twice_and_reaching_through():
    from treadle.compat.optimizer import AcceleratedOptimizer
    from treadle.compat.scheduler import AcceleratedScheduler

    accelerator = treadle.Accelerator(cpu=True, mixed_precision="bf16")
    net = ScalarNet()
    model = accelerator.prepare(net)
    optimizer = accelerator.prepare(torch.optim.SGD(net.parameters(), lr=0.1))
    scheduler = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1))
    assert accelerator.prepare(model) is model
    assert accelerator.prepare(net) is model
    assert accelerator.prepare(optimizer) is optimizer
    assert isinstance(optimizer, AcceleratedOptimizer)
    assert isinstance(scheduler, AcceleratedScheduler)
    assert accelerator.unwrap_model(model) is net
    assert model.context == "the user's own"
    with pytest.raises(AttributeError, match="nothing"):
        _ = model.nothing
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    optimizer.step()
    assert calls == [1]
    assert accelerator.free_memory(model, optimizer) == [None, None]
    assert not accelerator.models


def test_the_public_surface_is_in_one_file():
    """What users read off an Accelerator is in its own file, or in that of its bases."""
    assert [base.__name__ for base in treadle.Accelerator.__mro__] == ["Accelerator", "Prepared", "Process", "object"]
    accelerator = treadle.Accelerator(cpu=True)
    public = {name for name in dir(accelerator) if not name.startswith("_")}
    assert len(public) > 100
    # Attributes are set by the constructors of these classes: no other file adds any.
    net, optimizer = accelerator.prepare(ScalarNet(), torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.1))
    accelerator.backward(net(data()[0][0]).sum())
    optimizer.step()
    accelerator.free_memory()
    assert {name for name in dir(accelerator) if not name.startswith("_")} == public


def record(name, calls):
    def method(self, *args, **options):
        calls.append(name)
        return getattr(treadle.Accelerator, name)(self, *args, **options)

    return method


def test_what_a_subclass_overrides_is_called(tmp_path):
    names, calls = ("backward", "unscale_gradients", "get_state_dict", "finish_saving", "wait_for_everyone"), []
    accelerator = type("Own", (treadle.Accelerator,), {name: record(name, calls) for name in names})(cpu=True)
    net = ScalarNet()
    net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    with accelerator.accumulate(net):
        accelerator.backward(net(data()[0][0]).sum())
        accelerator.clip_grad_norm_(net.parameters(), 1.0)
        accelerator.clip_grad_value_(net.parameters(), 1.0)
        optimizer.step()
    assert calls == ["backward", "unscale_gradients", "unscale_gradients"]
    calls.clear()
    accelerator.save_model(net, tmp_path / "model")
    assert calls == ["get_state_dict"]
    calls.clear()
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: None)
    accelerator.save_state(tmp_path / "state")
    accelerator.load_state(tmp_path / "state")
    assert calls == ["get_state_dict"]
    calls.clear()
    accelerator.end_training()
    assert calls == ["finish_saving", "wait_for_everyone"]


@pytest.mark.parametrize("dispatches", [None, False, True])
def test_the_kind_of_a_prepared_dataloader(dispatches):
    kinds = (DataLoaderShard, DataLoaderDispatcher, DataLoaderStateMixin)
    config = treadle.utils.DataLoaderConfiguration(dispatch_batches=dispatches)
    accelerator = treadle.Accelerator(cpu=True, dataloader_config=config)
    for dataset in (range(4), Stream(range(4))):
        prepared = accelerator.prepare(DataLoader(dataset, 2))
        # Accelerate's answers. By default it dispatches streams only.
        dispatched = isinstance(dataset, Stream) if dispatches is None else dispatches
        expected = [not dispatched, dispatched, True]
        assert [isinstance(prepared, kind) for kind in kinds] == expected
        assert [isinstance(treadle.skip_first_batches(prepared, 1), kind) for kind in kinds] == expected
        assert not any(isinstance(DataLoader(dataset, 2), kind) for kind in kinds)
