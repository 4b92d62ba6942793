"""A plan against what really happens: the same model on real processes, and arithmetic by hand."""

from functools import partial

import pytest
import torch
from processes import run
from torch import nn
from traffic import Written
from treadle.strategies import DDP, FSDP, Precision, SingleDevice, World

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


def strategy_called(name):
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
    world = World.from_env(accelerator="cpu")
    strategy = strategy_called(name)
    strategy.attach(world, Precision.parse("32-true"))
    model = Net()
    called = strategy.wrap(model)
    optimizer = strategy.wrap_optimizer(ADAMW(model.parameters()))
    for _ in range(2):
        written = Written()
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
    from treadle.engine.planning.simulation import simulate

    given = {"strategy": strategy_called(name), "precision": "32-true", "micro_batch": 4, **more}
    return simulate(Net, batch_of, loss, ADAMW, world_size=world, accumulate=accumulate, clip=clip, rank=rank, **given)


@pytest.mark.parametrize(
    ("name", "world", "accumulate", "clip"),
    [
        ("flat", 2, 1, None),
        ("flat", 4, 1, 1.0),
        ("hybrid", 4, 1, None),
        ("hybrid", 4, 2, 1.0),
        ("checkpointed", 2, 2, None),
        ("each", 2, 2, None),
        ("kept", 2, 2, None),
        ("half", 2, 1, None),
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


def replicas(step, cap):
    """One process of a real run of replicas: the bytes of what is reduced together, after torch has laid it out."""
    world = World.from_env(accelerator="cpu")
    strategy = DDP(bucket_cap_mb=cap)
    strategy.attach(world, Precision.parse("32-true"))
    model = Scored()
    called = strategy.wrap(model, step)
    optimizer = strategy.wrap_optimizer(ADAMW(model.parameters()))
    for _ in range(3):
        value = loss(called, batch_of(4)) if step is None else strategy.method(called, step)(batch_of(4), 0)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
    return called._get_ddp_logging_data()["rebuilt_bucket_sizes"]


@pytest.mark.parametrize(("step", "cap"), [(None, 0.004), ("score", 0.002), ("score", None)])
def test_replicas_reduce_in_the_pieces_of_real_ones(step, cap):
    from treadle.engine.planning.simulation import simulate

    sizes = [int(size) for size in run(replicas, 2, step, cap)[0].split(",")]
    plan = simulate(
        Scored,
        batch_of,
        loss if step is None else lambda score, batch: score(batch, 0),
        ADAMW,
        world_size=2,
        strategy=DDP(bucket_cap_mb=cap),
        precision="32-true",
        step=step,
    )
    assert plan.traffic.count["all_reduce"] == len(sizes)
    assert plan.traffic.size["all_reduce"] == sum(sizes) == 4 * plan.parameters + (16 if step else 0)
    assert plan.traffic.count["broadcast"] == 1
    assert plan.traffic.size["broadcast"] == 12


def test_states_are_those_of_the_arithmetic():
    parameters = LAYERS * (2 * 4 * WIDTH * WIDTH + 5 * WIDTH) + CLASSES * WIDTH + CLASSES
    single = planned("single", 1, 0, strategy=SingleDevice())
    assert single.parameters == parameters
    tensors = LAYERS * 4 + 2
    assert single.states == {"parameters": 4 * parameters, "optimizer": 8 * parameters + 4 * tensors}
    assert single.memory["gradients"] == 4 * parameters
    assert single.checkpoint == 12 * parameters + 4 * tensors
    assert not single.traffic.count


def test_a_big_model_is_cut_as_by_hand():
    plan = planned("flat", 1024, 1023)
    assert plan.shards["head.weight"] == (0, WIDTH)  # five rows for 1,024 processes: the last ones have none
    assert planned("flat", 1024, 0).shards["head.weight"] == (1, WIDTH)
    # each tensor is padded to 1,024 rows before it is gathered
    block = 1024 * (WIDTH + 1 + 4 * WIDTH + 1)
    assert plan.traffic.size["reduce_scatter"] == 4 * (LAYERS * block + 1024 * (WIDTH + 1))


def test_a_value_that_is_looked_at_is_named():
    def curious(model, batch):
        value = loss(model, batch)
        return value if value.item() > 0 else -value

    from treadle.engine.planning.simulation import simulate

    with pytest.raises(ValueError, match="looks at a tensor's value"):
        simulate(Net, batch_of, curious, ADAMW, world_size=2, strategy=FSDP(), precision="32-true")
    assert not torch.distributed.is_initialized()


def test_a_stream_waits_for_another():
    from treadle.engine.planning.clocks import Clocks

    clocks = Clocks()
    other = clocks.Stream(priority=-1)
    clocks.spend(2.0)
    with clocks.stream(other):
        clocks.spend(1.0)
        done = other.record_event()
    assert (clocks.compute.now, other.now) == (2.0, 1.0)
    clocks.current_stream().wait_event(done)
    assert clocks.compute.now == 2.0
    other.wait_stream(clocks.compute)
    assert other.now == 2.0
    group = (0, 1)
    with clocks.stream(other):
        assert clocks.exchange(group, 3.0, wait=True) == 5.0
    assert clocks.exchange(group, 1.0, wait=False) == 6.0  # after the one before, though this stream was free at 2
    assert clocks.compute.now == 2.0


def test_a_ring_within_a_machine_is_faster_than_between_machines():
    from treadle.engine.planning.gpus import gpu_called
    from treadle.engine.planning.network import collective_seconds

    gpu, size = gpu_called("h100"), 400_000_000
    inside = collective_seconds("all_gather", size, tuple(range(8)), gpu)
    across = collective_seconds("all_gather", size, tuple(range(16)), gpu)
    strided = collective_seconds("all_gather", size, tuple(range(0, 128, 8)), gpu)
    assert inside < min(across, strided)
    assert inside == pytest.approx(size * 7 / 8 / 370e9, rel=0.1)
    assert collective_seconds("all_reduce", size, tuple(range(8)), gpu) == pytest.approx(2 * inside, rel=0.1)
    assert collective_seconds("all_gather", size, (0,), gpu) == 0.0
    with pytest.raises(ValueError, match="Did you mean 'h100'"):
        gpu_called("h10")
