"""A plan against what really happens: the same model on real processes, and arithmetic by hand."""

import pytest
import torch
from support.planned_models import ADAMW, LAYERS, WIDTH, Net, Shared, batch_of, loss, planned
from support.processes import run
from treadle.strategies import BALLOT_SIZE, DDP, Precision, SingleDevice, open_world
from treadle.tools.plan.simulation import simulate


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


@pytest.mark.long
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
    sizes = [int(size) for size in run(replicas, 2, step, cap, precision)[0].split(",")]
    called = loss if step is None else lambda score, batch: score(batch, 0)
    options = {"strategy": DDP(bucket_cap_mb=cap), "precision": precision, "step": step}
    plan = simulate(Scored, batch_of, called, ADAMW, world_size=2, **options)
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


@pytest.mark.long
def test_a_big_model_is_cut_as_by_hand():
    plan = planned("flat", 1024, 1023)
    assert plan.shards["head.weight"] == (0, WIDTH)  # five rows for 1,024 processes: the last ones have none
    assert planned("flat", 1024, 0).shards["head.weight"] == (1, WIDTH)
    # each tensor is padded to 1,024 rows before it is gathered
    block = 1024 * (WIDTH + 1 + 4 * WIDTH + 1)
    assert plan.traffic.size["reduce_scatter"] == 4 * (LAYERS * block + 1024 * (WIDTH + 1))
