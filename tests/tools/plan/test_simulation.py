"""A plan against what really happens: the same model on real processes, and arithmetic by hand."""

from functools import partial

import pytest
import torch
from support.collective_counts import CountedCollectives
from support.processes import run
from torch import nn
from treadle.strategies import BALLOT_SIZE, DDP, FSDP, Precision, SingleDevice, open_world

WIDTH, LAYERS, CLASSES = 12, 3, 5  # 5 and 12 are cut unevenly by 4 and 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.second(self.first(x).relu())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        return self.head(self.blocks(x))


def batch_of(samples):
    return torch.ones(samples, WIDTH), torch.zeros(samples, dtype=torch.int64)


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]).float(), batch[1])


ADAMW = partial(torch.optim.AdamW, lr=1e-3)


class Shared(Net):
    """The work on a sample is shared by two processes."""

    def parallelize(self, mesh):
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        for block in self.blocks:
            parallelize_module(block, mesh, {"first": ColwiseParallel(), "second": RowwiseParallel()})


def strategy_called(name):
    if name == "tensor":
        return FSDP(tensor_parallel_size=2)
    if name == "checkpointed":
        return FSDP(activation_checkpointing_policy=True)
    if name == "hybrid":
        return FSDP(data_parallel_replicate=2)
    if name == "each":
        return FSDP(sync_each_batch=True)
    if name == "kept":
        return FSDP(reshard_after_forward=False)
    if name == "half":
        from torch.distributed.fsdp import MixedPrecisionPolicy

        return FSDP(mixed_precision=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    return FSDP()


def really(name, accumulate, clip):
    """One process of a real run: its shards and what it sends in its second step."""
    world = open_world(accelerator="cpu")
    strategy = strategy_called(name)
    strategy.attach(world, Precision.parse("32-true"))
    model = Shared()
    called = strategy.wrap(model)
    optimizer = strategy.wrap_optimizer(ADAMW(model.parameters()))
    for _ in range(2):
        written = CountedCollectives()
        with written:
            for number in range(accumulate):
                if strategy.delays_sync:
                    strategy.set_gradient_sync(called, number == accumulate - 1)
                loss(called, batch_of(4)).backward()
            if clip:
                strategy.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    shards = {name: tuple(p.to_local().shape) for name, p in model.named_parameters()}
    state = sum(
        v.to_local().numel() * 4 for state in optimizer.state.values() for v in state.values() if hasattr(v, "to_local")
    )
    return shards, dict(written.found), state


def planned(name, world, rank, accumulate=1, clip=None, **more):
    from treadle.tools.plan.simulation import simulate

    given = {"strategy": strategy_called(name), "precision": "32-true", "micro_batch": 4, **more}
    return simulate(
        Shared, batch_of, loss, ADAMW, world_size=world, accumulate=accumulate, clip=clip, rank=rank, **given
    )


@pytest.mark.parametrize(
    ("name", "world", "accumulate", "clip"),
    [
        pytest.param("flat", 2, 1, None, marks=pytest.mark.exhaustive),
        pytest.param("flat", 4, 1, 1.0, marks=pytest.mark.exhaustive),
        pytest.param("hybrid", 4, 1, None, marks=pytest.mark.exhaustive),
        ("hybrid", 4, 2, 1.0),
        pytest.param("checkpointed", 2, 2, None, marks=pytest.mark.exhaustive),
        pytest.param("each", 2, 2, None, marks=pytest.mark.exhaustive),
        pytest.param("kept", 2, 2, None, marks=pytest.mark.exhaustive),
        pytest.param("half", 2, 1, None, marks=pytest.mark.exhaustive),
        pytest.param("tensor", 4, 2, 1.0, marks=pytest.mark.exhaustive),
    ],
)
def test_shards_and_traffic_are_those_of_real_processes(name, world, accumulate, clip):
    real = run(really, world, name, accumulate, clip)
    for rank in (0, world - 1):
        shards, sent, state = real[rank]
        plan = planned(name, world, rank, accumulate, clip)
        sizes = {f"{kind} bytes": size for kind, size in plan.traffic.size.items()}
        assert plan.shards == shards
        assert {**plan.traffic.count, **sizes} == sent
        assert plan.memory["optimizer"] >= state


def after_a_plan():
    """A real run in a process that has planned before, of more processes and clipped as well."""
    before = planned("hybrid", 8, 0, 2, 1.0)
    return before.traffic.count["all_gather"], really("flat", 1, 1.0)


def test_a_plan_leaves_nothing_behind():
    plan = planned("flat", 2, 0, 1, 1.0)
    for gathers, (_, sent, _) in run(after_a_plan, 2):
        assert gathers == 2 * (2 * LAYERS + 1)
        assert {kind: sent[kind] for kind in plan.traffic.count} == plan.traffic.count


class Scored(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(3))

    def score(self, batch, _):
        return loss(self, batch)


def replicas(step, cap, precision):
    """One process of a real run of replicas: the bytes of what is reduced together, after torch has laid it out."""
    world = open_world(accelerator="cpu")
    strategy = DDP(bucket_cap_mb=cap)
    strategy.attach(world, Precision.parse(precision))
    model = Scored()
    called = strategy.wrap(model, step)
    batch = strategy.precision.cast(batch_of(4))
    optimizer = strategy.wrap_optimizer(ADAMW(model.parameters()))
    for _ in range(3):
        value = loss(called, batch) if step is None else strategy.method(called, step)(batch, 0)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
    return called._get_ddp_logging_data()["rebuilt_bucket_sizes"]


@pytest.mark.parametrize(
    ("step", "cap", "precision"),
    [
        (None, 0.004, "32-true"),
        ("score", 0.002, "32-true"),
        pytest.param("score", None, "32-true", marks=pytest.mark.exhaustive),
        pytest.param("score", 0.002, "64-true", marks=pytest.mark.exhaustive),
        pytest.param("score", 0.002, "bf16-true", marks=pytest.mark.exhaustive),
    ],
)
def test_replicas_reduce_in_the_pieces_of_real_ones(step, cap, precision):
    from treadle.tools.plan.simulation import simulate

    sizes = [int(size) for size in run(replicas, 2, step, cap, precision)[0].split(",")]
    plan = simulate(
        Scored,
        batch_of,
        loss if step is None else lambda score, batch: score(batch, 0),
        ADAMW,
        world_size=2,
        strategy=DDP(bucket_cap_mb=cap),
        precision=precision,
        step=step,
    )
    each = {"64-true": 8, "32-true": 4, "bf16-true": 2}[precision]
    assert plan.traffic.count["all_reduce"] == len(sizes)
    votes = BALLOT_SIZE * max(each, 4) if step else 0
    assert plan.traffic.size["all_reduce"] == sum(sizes) == each * plan.parameters + votes
    assert plan.traffic.count["broadcast"] == 1
    assert plan.traffic.size["broadcast"] == 3 * each


def test_replicas_keep_copies_of_gradients_to_send_them_from():
    def peak(**options):
        return planned("replicas", 2, 0, strategy=DDP(**options)).peak

    plan = planned("single", 1, 0, strategy=SingleDevice())
    assert peak() == plan.peak + 4 * plan.parameters
    assert peak(gradient_as_bucket_view=True) == plan.peak


def test_two_optimizers_have_the_states_of_one():
    from treadle.tools.plan.simulation import simulate

    def halves(parameters):
        parameters = list(parameters)
        return [ADAMW(parameters[::2]), ADAMW(parameters[1::2])]

    one, two = (
        simulate(Shared, batch_of, loss, make, strategy=SingleDevice(), world_size=1, precision="32-true")
        for make in (ADAMW, halves)
    )
    assert one.states == two.states
    assert one.checkpoint == two.checkpoint
    assert one.states["optimizer"] <= two.memory["optimizer"] <= one.memory["optimizer"]


def test_states_are_those_of_the_arithmetic():
    parameters = LAYERS * (2 * 4 * WIDTH * WIDTH + 5 * WIDTH) + CLASSES * WIDTH + CLASSES
    single = planned("single", 1, 0, strategy=SingleDevice())
    assert single.parameters == parameters
    tensors = LAYERS * 4 + 2
    assert single.states == {"parameters": 4 * parameters, "optimizer": 8 * parameters + 4 * tensors}
    assert single.memory["gradients"] == 4 * parameters
    assert single.checkpoint == 12 * parameters + 4 * tensors
    assert not single.traffic.count


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.register_buffer("kept", torch.ones(3))
        self.register_buffer("left", torch.ones(4), persistent=False)
        self.remembered = torch.arange(WIDTH)  # neither a parameter nor a buffer

    def forward(self, samples):
        return self.head(self.frozen(self.embedding.weight[: len(samples)] * self.remembered))


@pytest.mark.parametrize(("strategy", "size"), [(SingleDevice, 1), (DDP, 2), (FSDP, 1)])
def test_what_is_tied_counts_once_and_what_is_frozen_has_no_state(strategy, size):
    from treadle.tools.plan.simulation import simulate

    plan = simulate(
        Tied, lambda samples: (torch.zeros(samples, WIDTH), torch.zeros(samples, dtype=torch.int64)), loss, ADAMW,
        world_size=size, strategy=strategy(), precision="32-true",
    )  # fmt: skip
    tied, frozen = CLASSES * WIDTH, WIDTH * WIDTH
    assert (plan.parameters, plan.trainable) == (tied + frozen, tied)
    assert plan.states == {"parameters": 4 * (tied + frozen + 3 + 4), "optimizer": 8 * tied + 4}
    assert plan.checkpoint == 4 * (tied + frozen + 3) + 8 * tied + 4


def test_a_big_model_is_cut_as_by_hand():
    plan = planned("flat", 1024, 1023)
    assert plan.shards["head.weight"] == (0, WIDTH)  # five rows for 1,024 processes: the last ones have none
    assert planned("flat", 1024, 0).shards["head.weight"] == (1, WIDTH)
    # each tensor is padded to 1,024 rows before it is gathered
    block = 1024 * (WIDTH + 1 + 4 * WIDTH + 1)
    assert plan.traffic.size["reduce_scatter"] == 4 * (LAYERS * block + 1024 * (WIDTH + 1))


def by_branch(model, batch):
    value = loss(model, batch)
    return value if value > 0 else -value


def by_mask(model, batch):
    return model(batch[0])[batch[1] == 0].mean()


def by_numpy(model, batch):
    return loss(model, batch) * batch[0].numpy().sum()


@pytest.mark.parametrize("curious", [by_branch, by_mask, by_numpy])
def test_a_value_that_is_looked_at_is_named(curious):
    from treadle.tools.plan.simulation import simulate

    line = curious.__code__.co_firstlineno + (2 if curious is by_branch else 1)
    with pytest.raises(ValueError, match=rf"reads a tensor's value \(.*test_simulation.py, line {line}\)"):
        simulate(Net, batch_of, curious, ADAMW, world_size=2, strategy=FSDP(), precision="32-true")
    assert not torch.distributed.is_initialized()


def test_a_stream_waits_for_another():
    from treadle.tools.plan.meter import Clocks

    clocks = Clocks()
    other = clocks.Stream(priority=-1)
    clocks.spend(2.0)
    with clocks.stream(other):
        clocks.spend(1.0)
        done = other.record_event()
    assert (clocks.compute.time, other.time) == (2.0, 1.0)
    clocks.current_stream().wait_event(done)
    assert clocks.compute.time == 2.0
    other.wait_stream(clocks.compute)
    assert other.time == 2.0
    group = (0, 1)
    with clocks.stream(other):
        assert clocks.exchange(group, 3.0, wait=True) == 5.0
    assert clocks.exchange(group, 1.0, wait=False) == 6.0  # after the one before, though this stream was free at 2
    assert clocks.compute.time == 2.0


def test_a_ring_within_a_machine_is_faster_than_between_machines():
    from treadle.tools.plan.gpus import find_gpu
    from treadle.tools.plan.op_costs import estimate_collective_seconds

    gpu, size = find_gpu("h100"), 400_000_000
    inside = estimate_collective_seconds("all_gather", size, tuple(range(8)), gpu)
    across = estimate_collective_seconds("all_gather", size, tuple(range(16)), gpu)
    strided = estimate_collective_seconds("all_gather", size, tuple(range(0, 128, 8)), gpu)
    assert inside < min(across, strided)
    assert inside == pytest.approx(size * 7 / 8 / 370e9, rel=0.1)
    assert estimate_collective_seconds("all_reduce", size, tuple(range(8)), gpu) == pytest.approx(2 * inside, rel=0.1)
    assert estimate_collective_seconds("all_gather", size, (0,), gpu) == 0.0
    everyone = tuple(range(1024))  # a ring has 1,024 hops, a tree's depth grows with the logarithm
    assert 1e-4 < estimate_collective_seconds("all_reduce", 1000, everyone, gpu) < 5e-4
    assert estimate_collective_seconds("all_gather", 1000, everyone, gpu) > 4e-3
    with pytest.raises(ValueError, match="Did you mean 'h100'"):
        find_gpu("h10")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA T4", None),
    ],
)
def test_a_gpu_is_known_by_its_drivers_name(name, kind):
    from treadle.tools.plan.gpus import match_driver_name

    found = match_driver_name(name)
    assert (found and found.name) == kind


def products(width):
    """A step that is little else than products of big matrices."""
    from treadle.tools.plan.simulation import simulate

    def made(precision, **options):
        return simulate(
            lambda: nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4))),
            lambda samples: torch.zeros(samples, width), lambda model, batch: model(batch).mean(),
            partial(torch.optim.SGD, lr=1.0), world_size=1, strategy=SingleDevice(), micro_batch=2 * width,
            precision=precision, **options,
        )  # fmt: skip

    return made


def test_float32_is_as_fast_as_torch_may_make_it():
    plan = products(8192)
    half, single = plan("bf16-true"), plan("32-true")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        tf32 = plan("32-true")
    finally:
        torch.set_float32_matmul_precision(before)
    arithmetic = [each.spent["arithmetic"] for each in (half, tf32, single)]
    assert arithmetic[1] / arithmetic[0] == pytest.approx(989 / 494)
    assert arithmetic[2] / arithmetic[0] == pytest.approx(989 / 66.9)
    assert sum(single.spent.values()) == pytest.approx(single.seconds)


def test_the_band_is_narrow_only_where_the_like_was_checked():
    def width(plan):
        return plan.band[2] / plan.band[0]

    big = products(8192)
    assert big("bf16-true").checked
    assert width(big("bf16-true")) < 1.11
    for other in (big("32-true"), big("bf16-true", gpu="a100"), products(512)("bf16-true")):
        assert not other.checked
        assert width(other) > 1.6


def test_a_small_step_waits_for_the_host():
    plan = planned("single", 1, 0, strategy=SingleDevice())
    assert plan.host_bound
    assert plan.band == plan.host
    assert plan.band[0] == pytest.approx(plan.launched * 5e-6)
    assert not products(8192)("bf16-true").host_bound
