"""Logged values against sums worked out by hand, on one process and on two."""

import gc
import math

import pytest
import torch
from support.processes import run
from torchmetrics import ConfusionMatrix, MeanMetric
from treadle.engine import Metrics
from treadle.engine.checkpoint.json_codec import decode, encode
from treadle.engine.metrics import AsyncNumbers, read_numbers
from treadle.strategies import World, open_world

REDUCTIONS = ("mean", "sum", "min", "max")


def log(metrics, name, value, prog_bar=False, logger=None, on_step=None, on_epoch=None, reduce_fx="mean"):
    metrics.log(name, value, prog_bar, logger, on_step, on_epoch, reduce_fx, None)


def by_name(found):
    return {entry.name: value for entry, value in found}


def values(rank, count=150):
    """(value, weight) of each step of one rank; some are stand-ins that must not count."""
    generator = torch.Generator().manual_seed(rank)
    drawn = torch.randn(count, generator=generator).tolist()
    return [(math.nan, 0) if i % 7 == 5 and rank else (v, i % 4 + 1) for i, v in enumerate(drawn)]


def expected(pairs):
    known = [v for v, w in pairs if w]
    mean = sum(v * w for v, w in pairs if w) / sum(w for _, w in pairs)
    return {"mean": mean, "sum": sum(known), "min": min(known), "max": max(known)}


def log_steps(metrics, pairs):
    for value, weight in pairs:
        metrics.weight = weight
        for reduction in REDUCTIONS:
            log(metrics, f"float_{reduction}", value, reduce_fx=reduction, on_step=True, on_epoch=True)
            tensor = torch.tensor([value], dtype=torch.float64, requires_grad=True) * 1.0
            log(metrics, f"tensor_{reduction}", tensor, reduce_fx=reduction, on_step=True, on_epoch=True)


def two_ranks():
    world = open_world("cpu")
    metrics = Metrics(training=True)
    own = values(world.rank)
    log_steps(metrics, own)
    found = {"step": by_name(metrics.step_values(world)), "epoch": by_name(metrics.epoch_values(world))}

    half = Metrics(training=True)
    log_steps(half, own[:70])
    state = decode(*encode(half.state_dict(world)))
    for name, more in (("resumed", own[70:]), ("untouched", [])):
        again = Metrics(training=True)
        again.load_state_dict(state, world)
        log_steps(again, more)
        found[name] = by_name(again.epoch_values(world))

    odd = Metrics(training=False)
    log(odd, "both", 1.0)
    log(odd, "mine" if world.rank else "yours", 1.0)
    with pytest.raises(ValueError, match=r"yours \(mean\): 'logged' on rank 0, missing on rank 1"):
        odd.epoch_values(world)

    lost = Metrics(training=False)
    log(lost, "lost", math.nan if world.rank else 1.0, reduce_fx="min")
    assert math.isnan(by_name(lost.epoch_values(world))["lost"])
    nothing = Metrics(training=False)
    nothing.weight = 0
    log(nothing, "nothing", 1.0)
    assert nothing.epoch_values(world) == []

    metric = MeanMetric()
    whole = Metrics(training=True)
    for value in range(3):
        metric.update(float(value + 10 * world.rank))
        log(whole, "metric", metric, on_step=False, on_epoch=True)
    assert by_name(whole.epoch_values(world)) == {"metric": 6.0}
    whole.reset()
    assert metric._update_count == 0
    return found


@pytest.mark.long
@pytest.mark.guarantee
def test_over_steps_and_ranks():
    every = [values(rank) for rank in (0, 1)]
    epoch, step = expected(every[0] + every[1]), expected([every[0][-1], every[1][-1]])
    half = expected(every[0][:70] + every[1][:70])
    first, second = run(two_ranks, 2)
    assert first == second
    for kind in ("float", "tensor"):
        for reduction in REDUCTIONS:
            name = f"{kind}_{reduction}"
            assert first["epoch"][name] == pytest.approx(epoch[reduction], rel=1e-12)
            assert first["step"][name] == pytest.approx(step[reduction], rel=1e-12)
            assert first["resumed"][name] == pytest.approx(epoch[reduction], rel=1e-12)
            assert first["untouched"][name] == pytest.approx(half[reduction], rel=1e-12)


def test_one_process():
    """And a state that is read later is that of when it was taken."""
    metrics, world = Metrics(training=True), World()
    log_steps(metrics, values(1))
    late, state = (metrics.state_dict(world, read=read) for read in (False, True))
    log_steps(metrics, values(0))
    assert repr(read_numbers(late)) == repr(state)  # some are NaN
    wanted = expected(values(1) + values(0))
    for name, value in by_name(metrics.epoch_values(world)).items():
        assert value == pytest.approx(wanted[name.split("_")[1]], rel=1e-12)
    metrics.reset()
    assert metrics.entries == []


def test_a_step_value_is_the_very_number_that_was_logged():
    for weight in (1, 3, 7, 49):
        metrics = Metrics(training=True)
        metrics.weight = weight
        for number in range(50):
            value = torch.rand(())
            log(metrics, f"n{number}", value)
            assert by_name(metrics.step_values(World()))[f"n{number}"] == value.item()


def test_what_changes_later_is_logged_as_it_was():
    metrics = Metrics(training=False)
    count, parameter = torch.zeros(()), torch.nn.Parameter(torch.zeros(()))
    for _ in range(4):
        log(metrics, "count", count)
        log(metrics, "parameter", parameter)
        count += 1
        with torch.no_grad():
            parameter += 1
    with torch.inference_mode():
        log(metrics, "inference", torch.ones(()))
    assert by_name(metrics.epoch_values(World())) == {"count": 1.5, "parameter": 1.5, "inference": 1.0}


def test_defaults():
    training, evaluation = Metrics(training=True), Metrics(training=False)
    for metrics in (training, evaluation):
        log(metrics, "a", 1)
        metrics.between_batches(True)
        log(metrics, "b", 2)
    forms = {e.name: (e.on_step, e.on_epoch, e.label("step"), e.logger) for e in training.entries}
    assert forms == {"a": (True, False, "a", True), "b": (False, True, "b", True)}
    assert all((e.on_step, e.on_epoch) == (False, True) for e in evaluation.entries)
    both = Metrics(training=True)
    log(both, "a", 1, on_step=True, on_epoch=True)
    assert (both.entries[0].label("step"), both.entries[0].label("epoch")) == ("a_step", "a_epoch")
    both.suffix = "/dataloader_idx_1"
    log(both, "a", 1)
    assert both.entries[1].name == "a/dataloader_idx_1"


def test_a_metric_that_is_no_number():
    metrics, matrix = Metrics(training=False), ConfusionMatrix(task="multiclass", num_classes=3)
    matrix.update(torch.tensor([1]), torch.tensor([2]))
    log(metrics, "matrix", matrix)
    with pytest.raises(TypeError, match=r"'matrix' .* MulticlassConfusionMatrix.* shape \(3, 3\)"):
        metrics.epoch_values(World())


def test_wrong_arguments():
    metrics = Metrics(training=True)
    log(metrics, "a", 1.0)
    with pytest.raises(ValueError, match=r"'a' was logged twice .* different arguments"):
        log(metrics, "a", 1.0, prog_bar=True)
    with pytest.raises(ValueError, match=r"shape \(2,\)"):
        log(metrics, "b", torch.ones(2))
    with pytest.raises(TypeError, match=r"got 'x' \(a str\)"):
        log(metrics, "c", "x")
    with pytest.raises(ValueError, match="Did you mean 'mean'"):
        log(metrics, "d", 1.0, reduce_fx="maen")
    with pytest.raises(ValueError, match=r"batch_size=-1, but a weight in a mean is at least 0"):
        metrics.log("e", 1.0, False, None, None, None, "mean", -1)
    with pytest.raises(TypeError, match=r"got the name 3 \(an int\), but a name must be a string"):
        log(metrics, 3, 1.0)
    metrics.between_batches(True)
    with pytest.raises(ValueError, match="Omit on_step"):
        log(metrics, "e", 1.0, on_step=True)


def test_one_number_of_many_does_not_keep_the_others():
    """On an accelerator, as "meta" is one: there a value is read later."""
    metrics = Metrics(training=True)
    logits = torch.zeros(1000, 1000, device="meta", requires_grad=True) * 2
    log(metrics, "first", logits[0, 0], on_step=True, on_epoch=False)
    kept = [o for o in gc.get_objects() if isinstance(o, torch.Tensor) and o.is_meta and o.ndim == 0]
    assert kept
    assert {tensor.untyped_storage().nbytes() for tensor in kept} == {4}


def test_numbers_are_read_in_the_place_of_tensors():
    nested = {"a": torch.tensor(2), "b": [(torch.tensor(0.1, dtype=torch.float64), 3), "word"], "c": None}
    assert read_numbers(nested) == {"a": 2.0, "b": [(0.1, 3), "word"], "c": None}
    assert read_numbers({"a": 1}) == {"a": 1}


def test_numbers_of_the_host_are_never_late():
    numbers = AsyncNumbers()
    assert numbers.read({"loss": torch.tensor(1.5), "rate": 2}) == {"loss": 1.5, "rate": 2.0}
    assert numbers.read({"loss": torch.tensor(2.5)}) == {"loss": 2.5}
