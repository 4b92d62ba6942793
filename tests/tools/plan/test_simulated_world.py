"""Ranks that are simulated shard and exchange as real ones, and leave nothing behind."""

import pytest
from support.collective_counts import CountedCollectives
from support.planned_models import ADAMW, LAYERS, Shared, batch_of, loss, planned, strategy_called
from support.processes import run
from treadle.strategies import Precision, open_world


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


@pytest.mark.long
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


@pytest.mark.long
def test_a_plan_leaves_nothing_behind():
    plan = planned("flat", 2, 0, 1, 1.0)
    for gathers, (_, sent, _) in run(after_a_plan, 2):
        assert gathers == 2 * (2 * LAYERS + 1)
        assert {kind: sent[kind] for kind in plan.traffic.count} == plan.traffic.count
