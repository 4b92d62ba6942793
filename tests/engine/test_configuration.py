"""Each argument of Accelerate's Accelerator: honoured, or refused in words."""

import inspect
import itertools
import json
import types
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.models import Stream
from support.processes import run
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from treadle.engine.configuration import resolve_group

import treadle
from treadle import utils

ARGUMENTS = [
    "device_placement",
    "split_batches",
    "mixed_precision",
    "gradient_accumulation_steps",
    "cpu",
    "dataloader_config",
    "deepspeed_plugin",
    "fsdp_plugin",
    "torch_tp_plugin",
    "megatron_lm_plugin",
    "rng_types",
    "log_with",
    "project_dir",
    "project_config",
    "gradient_accumulation_plugin",
    "step_scheduler_with_optimizer",
    "kwargs_handlers",
    "dynamo_backend",
    "dynamo_plugin",
    "deepspeed_plugins",
    "parallelism_config",
]


def cpu(**options):
    return treadle.Accelerator(cpu=True, **options)


def test_the_arguments_are_accelerates_in_its_order():
    names = list(inspect.signature(treadle.Accelerator).parameters)
    assert names[: len(ARGUMENTS)] == ARGUMENTS
    assert cpu(mixed_precision="bf16").mixed_precision == "bf16"
    assert treadle.Accelerator(True, False, "bf16", 3, True).gradient_accumulation_steps == 3


FSDP_PLUGIN, BY_3 = utils.FullyShardedDataParallelPlugin(), utils.GradientAccumulationPlugin(num_steps=3)
REFUSED = {
    "deepspeed": ({"deepspeed_plugin": object()}, ValueError, "strategy='fsdp'"),
    "deepspeeds": ({"deepspeed_plugins": {}}, ValueError, "strategy='fsdp'"),
    "megatron": ({"megatron_lm_plugin": object()}, ValueError, "ParallelismConfig"),
    "tensor": ({"torch_tp_plugin": object()}, ValueError, "tp_size"),
    "precision": ({"mixed_precision": "bff16"}, ValueError, "Did you mean 'bf16'"),
    "steps": ({"gradient_accumulation_steps": 0}, ValueError, "gradient_accumulation_steps=0"),
    "both steps": ({"gradient_accumulation_steps": 2, "gradient_accumulation_plugin": BY_3}, ValueError, "contradicts"),
    "random": ({"rng_types": ["generator", "torch"]}, ValueError, "rng_types contains 'torch'"),
    "tracker": ({"log_with": "tensorbord", "project_dir": "."}, ValueError, "Did you mean 'tensorboard'"),
    "directory": ({"log_with": "tensorboard"}, ValueError, "project_dir"),
    "projects": ({"project_dir": "a", "project_config": utils.ProjectConfiguration("b")}, ValueError, "contradicts"),
    "handler": ({"kwargs_handlers": [object()]}, TypeError, "contains an object"),
    "one handler": ({"kwargs_handlers": utils.AutocastKwargs()}, TypeError, r"Pass \[AutocastKwargs\(...\)\]"),
    "kinds": ({"rng_types": 5}, TypeError, "rng_types=5 must be a list"),
    "loaders": ({"dataloader_config": {"split_batches": True}}, TypeError, "must be a DataLoaderConfiguration"),
    "project_dir": ({"project_dir": 5}, TypeError, "project_dir=5 must be a path"),
    "dynamo": ({"dynamo_plugin": "inductor"}, TypeError, "must be a TorchDynamoPlugin"),
    "fsdp": ({"fsdp_plugin": True}, TypeError, "must be a FullyShardedDataParallelPlugin"),
    "layout": ({"parallelism_config": 5}, TypeError, "must be a ParallelismConfig"),
    "handlers": ({"kwargs_handlers": [utils.AutocastKwargs(), utils.AutocastKwargs()]}, ValueError, "two"),
    "backend": ({"dynamo_backend": "indcutor"}, ValueError, "Did you mean 'inductor'"),
    "compilers": ({"dynamo_backend": "eager", "dynamo_plugin": utils.TorchDynamoPlugin()}, ValueError, "Set only one"),
    "grid": ({"parallelism_config": utils.ParallelismConfig(dp_shard_size=2)}, ValueError, "the world size is 1"),
    "typo": ({"gradient_acumulation_steps": 2}, TypeError, "Did you mean 'gradient_accumulation_steps'"),
    "logging_dir": ({"logging_dir": "x"}, TypeError, "ProjectConfiguration"),
    "strategy": ({"strategy": "dpp"}, ValueError, "Did you mean 'ddp'"),
    "strategies": ({"strategy": "single", "fsdp_plugin": FSDP_PLUGIN}, ValueError, "Pass only one of them"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_says_why(case):
    options, error, words = REFUSED[case]
    with pytest.raises(error, match=words):
        cpu(**options)


def test_names_that_are_not_there_say_why():
    for name in ("lomo_backward", "maybe_context_parallel", "fp8_backend"):
        with pytest.raises(AttributeError, match=rf"'{name}'\. \w"):
            getattr(cpu(), name)
    with pytest.raises(AttributeError, match=r"no attribute 'nonsense'\.$"):
        _ = cpu().nonsense


def test_facts():
    accelerator = cpu(project_dir="x", dataloader_config=utils.DataLoaderConfiguration(even_batches=False))
    assert (accelerator.project_dir, accelerator.logging_dir, accelerator.save_iteration) == ("x", "x", 0)
    off = ("split_batches", "even_batches", "use_seedable_sampler", "non_blocking", "use_stateful_dataloader")
    off += ("native_amp", "multi_device", "is_fsdp2", "dispatch_batches", "deepspeed_plugin")
    assert not any(getattr(accelerator, name) for name in off)
    assert accelerator.distributed_type == utils.DistributedType.NO
    assert accelerator.should_save_model
    assert "Num processes: 1" in repr(accelerator)
    assert not accelerator.verify_device_map(nn.Linear(1, 1))


UNKNOWN = (number for number in range(3)), torch.optim.SGD, lambda batch: batch, range(3), {}, torch.ones(2)


@pytest.mark.parametrize("value", UNKNOWN, ids=lambda value: getattr(value, "__name__", type(value).__name__))
def test_prepare_returns_what_it_does_not_know(value):
    accelerator = cpu()
    kind = f"the class {value.__name__}" if isinstance(value, type) else f"an? {type(value).__name__}"
    is_iterable = isinstance(value, types.GeneratorType | range)
    advice = "Every rank reads all items of this object. To shard batches" if is_iterable else ""
    with pytest.warns(UserWarning, match=f"prepare returns .*{kind} unchanged.*{advice}"):
        model, same = accelerator.prepare(nn.Linear(1, 1), value)
    assert same is value
    assert accelerator.models == [model]
    assert not accelerator.schedulers


def test_prepare_takes_none():
    accelerator = cpu()
    model, nothing = accelerator.prepare(nn.Linear(1, 1), None)
    assert nothing is None
    with pytest.raises(ValueError, match="device_placement has 2 values, but prepare got 1 object"):
        accelerator.prepare(model, device_placement=[True, True])
    with pytest.raises(TypeError, match="device_placement=True must be a list"):
        accelerator.prepare(model, device_placement=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert accelerator.prepare(optimizer) is accelerator.prepare(optimizer)
    assert accelerator.prepare(nothing, model) == (None, model)
    assert len(accelerator.optimizers) == len(accelerator.models) == 1


def test_without_placement_a_model_has_to_be_there():
    with pytest.raises(ValueError, match="weight is on meta"):
        cpu(device_placement=False).prepare(nn.Linear(1, 1, device="meta"))
    with pytest.raises(ValueError, match="weight is on meta"):
        cpu().prepare(nn.Linear(1, 1, device="meta"), device_placement=[False])


def test_float16_is_scaled_and_computed_on_the_cpu_too():
    scaling = utils.GradScalerKwargs(init_scale=8.0, growth_interval=1)
    accelerator = cpu(mixed_precision="fp16", kwargs_handlers=[scaling])
    net, seen = nn.Linear(1, 1), []
    net.register_forward_hook(lambda _, args, output: seen.append(output.dtype))
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(1, 1)).sum())
    assert net.weight.grad.item() == 8.0
    optimizer.step()
    assert seen == [torch.float16]
    accelerator.backward(model(torch.ones(1, 1)).sum())
    assert accelerator.scaler.get_scale() == 16.0
    assert cpu(mixed_precision="fp16", kwargs_handlers=[utils.GradScalerKwargs(enabled=False)]).scaler is None


def test_autocast_as_the_handler_says():
    x, layer = torch.ones(2, 2), nn.Linear(2, 2)
    accelerator = cpu(mixed_precision="bf16")
    with accelerator.autocast():
        assert layer(x).dtype == torch.bfloat16
        with accelerator.autocast(utils.AutocastKwargs(enabled=False)):
            assert layer(x).dtype == torch.float32
    off = cpu(mixed_precision="bf16", kwargs_handlers=[utils.AutocastKwargs(enabled=False)])
    with off.autocast():
        assert layer(x).dtype == torch.float32
    assert off.mixed_precision == "bf16"
    uncached = cpu(mixed_precision="bf16", kwargs_handlers=[utils.AutocastKwargs(cache_enabled=False)])
    with uncached.autocast():
        assert not torch.is_autocast_cache_enabled()


def test_profile(tmp_path):
    handler = utils.ProfileKwargs(activities=["cpu"], output_trace_dir=str(tmp_path))
    with cpu(kwargs_handlers=[handler]).profile() as profiler:
        torch.ones(2) + 1
    assert any(event.key == "aten::add" for event in profiler.key_averages())
    assert json.loads((tmp_path / "profile_0.json").read_text())["traceEvents"]
    ready = []
    option = {"wait": 0, "warmup": 1, "active": 1, "repeat": 2}
    scheduled = utils.ProfileKwargs(activities=["cpu"], schedule_option=option, on_trace_ready=ready.append)
    with cpu().profile(scheduled) as profiler:
        for _ in range(4):
            torch.ones(2) + 1
            profiler.step()
    assert len(ready) == 2
    with pytest.raises(ValueError, match="activities='gpu'"), cpu().profile(utils.ProfileKwargs(activities=["gpu"])):
        pass


# -- two processes ---------------------------------------------------------------------------------------------------


def on_two():
    group = utils.InitProcessGroupKwargs(timeout=timedelta(seconds=7), backend="gloo")
    options = utils.DistributedDataParallelKwargs(comm_hook=utils.DDPCommunicationHookType.BF16, bucket_cap_mb=1)
    accelerator = cpu(kwargs_handlers=[group, options])
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    assert backend.options._timeout == timedelta(seconds=7)
    with pytest.raises(ValueError, match="nccl"):
        cpu(kwargs_handlers=[utils.InitProcessGroupKwargs(backend="nccl")])
    rank = accelerator.process_index
    net = nn.Linear(1, 1, bias=False)
    nn.init.ones_(net.weight)
    model = accelerator.prepare(net)
    value = 1.0 + 2.0**-10 * (rank + 1)  # rounds to 1 in bfloat16
    accelerator.backward(model(torch.full((1, 1), value)).sum())
    assert net.weight.grad.item() == 1.0

    plain = cpu()
    model = plain.prepare(net)
    net.weight.grad = None
    with plain.no_sync(model):
        loss = model(torch.full((1, 1), rank + 1.0)).sum()
    with plain.trigger_sync_in_backward(model):
        plain.backward(loss)
    assert net.weight.grad.item() == 1.5

    every = cpu(gradient_accumulation_plugin=utils.GradientAccumulationPlugin(num_steps=2, sync_each_batch=True))
    net.weight.grad = None
    model = every.prepare(net)
    with every.accumulate(model):
        every.backward(model(torch.full((1, 1), rank + 1.0)).sum())
    assert net.weight.grad.item() == 0.75

    net = nn.Linear(1, 1)
    net.bias.requires_grad_(False)
    again = cpu()
    first = again.prepare(net)
    assert again.prepare(first) is first
    net.bias.requires_grad_(True)
    second = again.prepare(first)
    assert second is not first
    assert again.models == [second]
    again.backward(second(torch.ones(1, 1)).sum() * (rank + 1))
    assert net.bias.grad.item() == 1.5
    grid = utils.ParallelismConfig(dp_replicate_size=2)
    assert type(cpu(parallelism_config=grid).strategy).__name__ == "DDP"
    return {"split": split_batches(), "shared": share_out()}


def split_batches():
    accelerator = cpu(split_batches=True)
    loader = accelerator.prepare(DataLoader(range(10), batch_size=4))
    found = [batch.tolist() for batch in loader]
    assert loader.total_batch_size == 4
    assert loader.total_dataset_length == 10
    assert len(loader) == 3
    with pytest.raises(ValueError, match="multiple of 2, but this dataloader has batch_size=3"):
        accelerator.prepare(DataLoader(range(10), batch_size=3))
    sampler = type("Own", (BatchSampler,), {})(SequentialSampler(range(4)), 2, False)
    with pytest.raises(ValueError, match="a custom batch sampler"):
        accelerator.prepare(DataLoader(range(4), batch_sampler=sampler))
    with pytest.raises(ValueError, match="multiple of 2, but this dataloader has batch_size=5"):
        accelerator.prepare(DataLoader(Stream(range(4)), batch_size=5))
    with pytest.raises(ValueError, match=r"batches of unknown size\. Pass a DataLoader with batch_size, or remove"):
        accelerator.prepare(DataLoader(Stream(range(4)), batch_size=None))
    return found


@pytest.fixture(scope="module")
def two_ranks():
    return run(on_two, 2)


@pytest.mark.long
def test_on_two_processes(two_ranks):
    assert [found["split"] for found in two_ranks] == [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [9]]]


def test_the_data_seed_decides_the_order():
    def order(loader):
        return [i for batch in loader for i in batch.tolist()]

    config = utils.DataLoaderConfiguration(data_seed=5)
    torch.manual_seed(1)
    loader = cpu(dataloader_config=config).prepare(DataLoader(range(8), batch_size=4, shuffle=True))
    drawn = torch.rand(())
    torch.manual_seed(1)
    assert drawn == torch.rand(())
    torch.manual_seed(5)
    assert order(loader) == order(DataLoader(range(8), batch_size=4, shuffle=True))


# -- what public scripts ask for --------------------------------------------------------------------------------------


class Restarting:
    """An endless sampler whose `__iter__` starts it anew."""

    def __init__(self):
        self.started = 0

    def __iter__(self):
        self.started += 1
        self.numbers = itertools.cycle(range(16))
        return self

    def __next__(self):
        return next(self.numbers)


def read(loader, most=None):
    return [batch.flatten().int().tolist() for batch in itertools.islice(loader, most)]


def share_out():
    numbers = torch.arange(16.0).unsqueeze(1)
    dispatching = cpu(dataloader_config=utils.DataLoaderConfiguration(dispatch_batches=True))
    assert dispatching.dispatch_batches
    sampler = Restarting()
    endless = cpu().prepare(DataLoader(numbers, batch_size=2, sampler=sampler))
    return {
        "map": read(dispatching.prepare(DataLoader(numbers, batch_size=2))),
        "stream": read(dispatching.prepare(DataLoader(Stream(numbers), batch_size=2))),
        "endless": read(endless, 5),
        "started": sampler.started,
    }


def test_batches_that_the_main_process_was_to_read_and_samplers_that_restart(two_ranks, capfd):
    alone = share_out()
    assert "every rank reads the data itself" in capfd.readouterr().err
    pairs = [[2 * n, 2 * n + 1] for n in range(8)]
    for ranks in ([alone], [found["shared"] for found in two_ranks]):
        for rank, found in enumerate(ranks):
            assert found["map"] == found["stream"] == pairs[rank :: len(ranks)]
            assert found["endless"] == (pairs * 2)[rank :: len(ranks)][:5]
            assert found["started"] == 1


def test_accelerates_variable_sets_the_device(monkeypatch):
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu:1")
    assert str(treadle.Accelerator().device) == "cpu:1"
    assert str(cpu().device) == "cpu"  # an argument counts before a variable
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu")
    assert str(treadle.Accelerator().device) == "cpu"
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "gpu")
    with pytest.raises(ValueError, match="ACCELERATE_TORCH_DEVICE"):
        treadle.Accelerator()


def test_a_collective_outlasts_the_limit_of_a_rank():
    hour = utils.InitProcessGroupKwargs(timeout={"hours": 1})
    for handler, limit, minutes in ((None, None, None), (None, 600.0, None), (None, 7200.0, 121), (hour, 7200.0, 60)):
        timeout = resolve_group(handler, limit)["timeout"]
        assert timeout == (None if minutes is None else timedelta(minutes=minutes))
    assert run(group_timeout, 2, {"hours": 2}) == [timedelta(minutes=121)] * 2


def group_timeout(timeout):
    return cpu(timeout=timeout).world.timeout
