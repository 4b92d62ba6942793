"""What metric objects have counted goes into a state and back: the same, on any number of processes, to the bit."""

import copy
from types import SimpleNamespace

import pytest
import torch
import torchmetrics
from support.models import Count
from support.processes import run
from torch import nn
from torchmetrics.wrappers import BootStrapper, ClasswiseWrapper, MinMaxMetric, Running
from treadle.engine.checkpoint.json_codec import decode, encode
from treadle.engine.metrics import metric_state
from treadle.strategies import World, open_world


class Tally(Count):
    """A metric object without torchmetrics."""

    def __init__(self):
        self.value = {}

    def update(self, found, _):
        for value in found.round().int().tolist():
            self.value = {**self.value, value: self.value.get(value, 0) + 1}

    def compute(self):
        return float(max(self.value.values()))

    def reset(self):
        self.value = {}


class Own(torchmetrics.Metric):
    """Every kind of reduction that a state may have."""

    def __init__(self):
        super().__init__()
        self.add_state("most", torch.tensor(-9.0), dist_reduce_fx="max")
        self.add_state("least", torch.tensor(9.0), dist_reduce_fx="min")
        self.add_state("mean", torch.zeros(2), dist_reduce_fx="mean")
        self.add_state("total", torch.zeros(2), dist_reduce_fx="sum")
        self.add_state("seen", [], dist_reduce_fx="cat")
        self.add_state("plain", [], dist_reduce_fx=None)
        self.add_state("norm", torch.tensor(0.0), dist_reduce_fx=lambda parts: parts.abs().amax(0))

    def update(self, found, target):
        self.most = torch.maximum(self.most, found.max())
        self.least = torch.minimum(self.least, found.min())
        self.mean = self.mean + 0.5 * (found.mean() - self.mean)
        self.total += torch.stack((found.sum(), target.sum()))
        self.seen.append(found)
        self.plain.append(target)
        self.norm = torch.maximum(self.norm, found.abs().max())

    def compute(self):
        seen, plain = torch.cat([x.reshape(-1) for x in self.seen]), torch.cat([x.reshape(-1) for x in self.plain])
        numbers = torch.stack((self.most, self.least, *self.mean, *self.total, self.norm))
        return torch.cat((numbers, seen.sort().values, plain.sort().values))


class Model(nn.Module):
    def __init__(self, merged=True):
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.own = Own()
        self.error = torchmetrics.MeanSquaredError()
        self.several = torchmetrics.MetricCollection([torchmetrics.R2Score(), torchmetrics.MeanSquaredError()])
        self.inside = nn.ModuleDict({"ranks": torchmetrics.SpearmanCorrCoef()})
        self.listed = [torchmetrics.MaxMetric(), 3]
        if not merged:
            self.tally = Tally()
            self.by_name = {"tally": Tally()}
            self.extremes = MinMaxMetric(torchmetrics.MeanSquaredError())
            self.recent = Running(torchmetrics.MeanMetric(), window=3)
            self.straps = BootStrapper(torchmetrics.MeanSquaredError(), num_bootstraps=3)
            self.correlation = torchmetrics.PearsonCorrCoef()

    def metrics(self):
        own = {**dict(self.named_children()), **vars(self), "listed": self.listed[0], "ranks": self.inside["ranks"]}
        return {name: value for name, value in own.items() if hasattr(value, "compute")}

    def count(self, rank, start, stop):
        torch.manual_seed(start)
        for step in range(start, stop):
            found = torch.linspace(-2, 3 + step, 4) + 0.3 * rank
            target = found.roll(1) + step
            for name, metric in self.metrics().items():
                if name in ("listed", "recent"):
                    metric.update(found)
                else:
                    metric.update(found, target)
            if hasattr(self, "by_name"):
                self.by_name["tally"].update(found, target)
                self.extremes.compute()

    def values(self):
        return {name: metric.compute() for name, metric in self.metrics().items()}


def test_everything_is_found():
    places = set(metric_state.find(Model(merged=False)))
    assert {"own", "error", "several.R2Score", "inside.ranks", "listed[0].", "tally", "by_name['tally']"} <= places
    assert {"extremes", "extremes._base_metric", "recent", "recent.base_metric", "straps.metrics.0"} <= places
    assert not any(place.startswith("net") for place in places)


@pytest.mark.guarantee
def test_one_process():
    whole, resumed = Model(merged=False), Model(merged=False)
    whole.count(0, 0, 3)
    document = encode(metric_state.collect_states(metric_state.find(whole), set(), World()))
    whole.count(0, 3, 5)  # must not reach the state
    resumed.count(0, 7, 8)  # of another run
    metric_state.load(metric_state.find(resumed), decode(*document), World())
    resumed.count(0, 3, 5)
    for name, value in whole.values().items():
        again = resumed.values()[name]
        assert repr(again) == repr(value), name
    assert resumed.by_name["tally"].value == whole.by_name["tally"].value
    assert resumed.recent._num_vals_seen == 5
    assert resumed.own.update_count == whole.own.update_count


def test_what_is_over_begins_anew():
    model = Model()
    model.count(0, 0, 2)
    objects = metric_state.find(model)
    state = metric_state.collect_states(objects, metric_state.collect_part_ids([model.error, model.several]), World())
    metric_state.load(objects, state, World())
    assert model.error.update_count == model.several["R2Score"].update_count == 0
    assert model.own.update_count == 2


def counted(world_size, state=None, start=0, stop=2):
    world = open_world("cpu") if world_size > 1 else World()
    model = Model()
    objects = metric_state.find(model)
    if state is None:
        model.count(world.rank, start, stop)
    else:
        metric_state.load(objects, decode(*state), world)
    values = model.values()  # synchronised by torchmetrics
    return {name: encode(v) for name, v in values.items()}, encode(metric_state.collect_states(objects, set(), world))


def on_two(of_one):
    two, of_two = counted(2)
    return two, of_two, counted(2, of_one)[0], counted(2, of_two)[0]


@pytest.mark.long
@pytest.mark.guarantee
def test_another_number_of_processes():
    """What torchmetrics computes over all processes is the same right after a resume on another number of them."""
    one, of_one = counted(1)
    ranks = run(on_two, 2, of_one)
    two, of_two, *_ = ranks[0]
    assert_close(counted(1, of_two)[0], two)
    for _, _, from_one, from_two in ranks:
        assert_close(from_one, one)
        assert_close(from_two, two)


def assert_close(ours, theirs):
    for name, value in theirs.items():
        one, other = decode(*ours[name]), decode(*value)
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, equal_nan=True, msg=name)


def seat(rank, size):
    """A process among so many, which meets no other."""
    return SimpleNamespace(rank=rank, size=size, is_main=rank == 0)


@pytest.mark.parametrize(("metric", "why"), [(torchmetrics.PearsonCorrCoef(), "no reduction"), (Tally(), "unknown")])
def test_what_can_not_be_shared_out(metric, why):
    found = torch.tensor([0.0, 1.0, 3.0])
    metric.update(found, found.roll(1))
    saved = metric_state.collect_states({"it": metric}, set(), World())["it"] * 3
    words = rf"metric 'it' \({type(metric).__name__}\).*3 process.* 2 processes: .*{why}.*end"
    with pytest.raises(ValueError, match=words):
        metric_state.load({"it": metric}, {"it": saved}, seat(0, 2))
    metric.reset()
    fresh = metric_state.collect_states({"it": metric}, set(), World())["it"] * 3
    if isinstance(metric, torchmetrics.Metric):  # nothing was counted, so there is nothing to share out
        metric_state.load({"it": metric}, {"it": fresh}, seat(0, 2))


def test_a_tally_of_one_process_goes_to_rank_zero():
    tally = Tally()
    tally.update(torch.ones(3), None)
    saved = metric_state.collect_states({"it": tally}, set(), World())
    ranks = [Tally(), Tally()]
    for rank, one in enumerate(ranks):
        one.update(torch.zeros(2), None)
        metric_state.load({"it": one}, saved, seat(rank, 2))
    assert [one.value for one in ranks] == [{1: 3}, {}]


def test_a_metric_that_is_gone():
    with pytest.warns(UserWarning, match="the metric 'it', but the task has no metric with this name"):
        metric_state.load({}, {"it": [{"counts": {}}], "over": None}, World())


def test_classes_one_by_one():
    accuracy = ClasswiseWrapper(torchmetrics.classification.MulticlassAccuracy(3, average=None))
    model, again = nn.ModuleDict({"each": accuracy}), nn.ModuleDict({"each": copy.deepcopy(accuracy)})
    model["each"].update(torch.tensor([0, 1, 2]), torch.tensor([0, 2, 2]))
    state = decode(*encode(metric_state.collect_states(metric_state.find(model), set(), World())))
    metric_state.load(metric_state.find(again), state, World())
    for one in (model, again):
        one["each"].update(torch.tensor([1, 1]), torch.tensor([1, 0]))
    assert repr(model["each"].compute()) == repr(again["each"].compute())
