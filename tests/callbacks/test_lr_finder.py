"""The searches for a learning rate and a batch size: what they find, on one process and two, and what they leave."""

import math
import threading

import numpy as np
import pytest
import torch
from support.processes import run
from support.searched_runs import QUIET_ON_CPU, Data, Plain, Task, Unbuilt, check, dataset, trace
from support.trainers import make_trainer
from torch import nn
from torch.utils.data import DataLoader, Subset
from treadle.callbacks import BatchSizeFinder, LearningRateFinder
from treadle.callbacks.lr_finder import _LRFinder

import treadle
from treadle.tuner import Tuner

# -- no trace --------------------------------------------------------------------------------------------------------


def no_rate(**kwargs):
    return LearningRateFinder(num_training_steps=20, update_attr=False, **kwargs)


def no_size(**kwargs):
    return BatchSizeFinder(init_val=4, max_trials=1, steps_per_trial=2, **kwargs)


@pytest.mark.long
@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.exhaustive), 3])
def test_nothing_is_left_of_searches_that_change_nothing(accumulate):
    plain = trace([], accumulate_grad_batches=accumulate)
    check(plain, trace([no_rate(), no_size()], accumulate_grad_batches=accumulate))


def given_loader():
    return DataLoader(dataset(), 4, shuffle=True, generator=torch.Generator().manual_seed(3))


def test_nothing_is_left_in_a_loader_that_was_given():
    check(trace([], given=given_loader()), trace([no_rate()], given=given_loader()))


class Drawing(Data):
    """Its order is drawn, and turns, whenever a loader is asked for."""

    def __init__(self):
        super().__init__()
        self.numbers, self.turns = np.random.default_rng(7), list(range(32))
        self.lock = threading.Lock()  # can't be copied, and need not be

    def train_dataloader(self):
        self.turns.append(self.turns.pop(0))
        order = [self.turns[place] for place in self.numbers.permutation(32)]
        return DataLoader(Subset(self.data, order), self.hparams.batch_size)


def test_nothing_is_left_in_a_data_module_that_draws():
    plain, searched = Drawing(), Drawing()
    check(trace([], given=plain), trace([no_rate(), no_size()], given=searched))
    assert searched.turns == plain.turns
    assert searched.numbers.random() == plain.numbers.random()


def test_after_a_search_the_trainer_has_the_loaders_of_the_size_it_found():
    trainer = treadle.Trainer(**QUIET_ON_CPU, max_epochs=1)
    task = Task()
    found = Tuner(trainer).scale_batch_size(task, max_trials=2)
    assert (found, trainer.train_dataloader.batch_size) == (4, 4)
    assert len(trainer.train_dataloader.dataset) == 32
    trainer.fit(task)
    assert trainer.global_step == 8
    trainer.validate(task, DataLoader(dataset(), 4), verbose=False)
    assert trainer.train_dataloader is None


def test_a_search_that_fails_leaves_nothing():
    task, trainer = Task(fits=0), treadle.Trainer(**QUIET_ON_CPU, max_epochs=1)
    weights, state = [p.clone() for p in task.parameters()], torch.get_rng_state()
    with pytest.raises(MemoryError, match="even batch_size=1, the smallest"):
        Tuner(trainer).scale_batch_size(task)
    assert task.batch_size == task.hparams.batch_size == 4
    assert all(map(torch.equal, weights, task.parameters()))
    assert torch.equal(state, torch.get_rng_state())
    assert trainer.callbacks == []


def traces_on_two(kind, strategy):
    flags = {"devices": 2, "strategy": strategy}
    plain = trace([], kind=kind, **flags)
    check(plain, trace([no_rate(), no_size()], kind=kind, **flags))
    return plain["task"][1]


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        pytest.param(Task, "ddp", id="ddp"),
        pytest.param(Task, "fsdp", id="fsdp", marks=pytest.mark.exhaustive),
        pytest.param(Unbuilt, "fsdp", id="fsdp-unbuilt", marks=pytest.mark.slow),
    ],
)
def test_nothing_is_left_on_two_processes(kind, strategy):
    first, second = run(traces_on_two, 2, kind, strategy)
    assert first != second


# -- the learning rate -----------------------------------------------------------------------------------------------


def by_hand(rates, batches):
    """The plain loop: losses before each step, smoothed."""
    treadle.seed_everything(0)
    net = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    mean, smoothed = 0.0, []
    for k, rate in enumerate(rates):
        optimizer.param_groups[0]["lr"] = rate
        x, y = batches[k % len(batches)]
        loss = (net(x) - y).pow(2).mean()
        mean = 0.98 * mean + 0.02 * loss.item()
        smoothed.append(mean / (1 - 0.98 ** (k + 1)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return smoothed


def search_plainly(accumulate, size):
    treadle.seed_everything(0)
    task = Plain()
    finder = LearningRateFinder(1e-4, 0.5, 25, early_stop_threshold=None)
    trainer = make_trainer(max_epochs=2, callbacks=[finder], accumulate_grad_batches=accumulate)
    trainer.fit(task, DataLoader(dataset(), size))
    return finder.optimal_lr.results, task.learning_rate, task.seen, trainer.lr_scheduler_configs[0].scheduler.base_lrs


class TwoOptimizers(Plain):
    """The second optimizer's rate is a tenth of the first one's, in the search too."""

    def configure_optimizers(self):
        first = torch.optim.SGD([self.net.weight], lr=self.learning_rate)
        return [first, torch.optim.SGD([self.net.bias], lr=self.learning_rate / 10)]


class OneOptimizer(Plain):
    def configure_optimizers(self):
        groups = [{"params": [self.net.weight]}, {"params": [self.net.bias], "lr": self.learning_rate / 10}]
        return torch.optim.SGD(groups, lr=self.learning_rate)


def test_the_rates_of_two_optimizers_rise_together():
    found = []
    for kind in (TwoOptimizers, OneOptimizer):
        treadle.seed_everything(0)
        task, finder = kind(), LearningRateFinder(1e-4, 0.5, 25, early_stop_threshold=None)
        treadle.Trainer(**QUIET_ON_CPU, max_epochs=1, callbacks=[finder]).fit(task, DataLoader(dataset(), 8))
        found.append((finder.optimal_lr.results, [p.tolist() for p in task.parameters()]))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("processes", "accumulate", "size"),
    [
        (1, 1, 8),
        (1, 2, 4),
        pytest.param(2, 1, 4, marks=pytest.mark.exhaustive),
        pytest.param(2, 2, 2, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_the_losses_are_those_of_a_loop_by_hand(processes, accumulate, size):
    """Over several epochs, as one has four steps; the rate that is found is the optimizer's and the scheduler's."""
    expected = by_hand(np.geomspace(1e-4, 0.5, 25), list(DataLoader(dataset(), 8)))
    found = run(search_plainly, processes, accumulate, size) if processes > 1 else [search_plainly(accumulate, size)]
    for results, rate, seen, base in found:
        assert results["loss"] == pytest.approx(expected, rel=1e-4)
        assert rate == found[0][1] == pytest.approx(independent_of(results), rel=1e-12)
        assert seen == [[rate]]
        assert base == [rate]


def independent_of(results):
    y, x = np.array(results["loss"])[10:-1], np.log(results["lr"])[10:-1]
    return results["lr"][10 + np.gradient(y, x).argmin()]


def test_it_stops_where_the_loss_diverges():
    treadle.seed_everything(0)
    trainer = treadle.Trainer(**QUIET_ON_CPU, max_epochs=1)
    loader = DataLoader(dataset(), 8)
    found = Tuner(trainer).lr_find(Plain(), loader, min_lr=1e-3, max_lr=100.0, num_training=60)
    losses = found.results["loss"]
    assert 10 < len(losses) < 60
    assert losses[-1] > 4 * min(losses) >= max(losses[:-1]) * min(losses) / losses[-1]
    found = Tuner(trainer).lr_find(Task(broken_from=15), loader, num_training=40, update_attr=False)
    assert len(found.results["loss"]) == 15
    assert math.isnan(found.results["loss"][-1])
    task = Task(broken_from=15)
    found = Tuner(trainer).lr_find(task, loader, num_training=40, update_attr=False, early_stop_threshold=None)
    assert np.isnan(found.results["loss"]).sum() == 26
    negative = _LRFinder("linear", 0.1, 1.0, 3)
    for loss in (-1.0, -0.9):
        negative.add(0.1, loss)
        assert not negative.diverges(4.0)


class BreaksOnOne(Plain):
    """The loss of rank 1 alone diverges, or is no number, from a step on."""

    def __init__(self, factor):
        super().__init__()
        self.factor, self.calls = factor, 0

    def training_step(self, batch):
        self.calls += 1
        loss = super().training_step(batch)
        return loss * self.factor if self.global_rank == 1 and self.calls > 14 else loss


def search_broken_on_one(factor):
    treadle.seed_everything(0)
    trainer = treadle.Trainer(**QUIET_ON_CPU, max_epochs=1, devices=2, strategy="ddp")
    found = Tuner(trainer).lr_find(BreaksOnOne(factor), DataLoader(dataset(), 4), num_training=40, update_attr=False)
    return list(map(str, found.results["loss"])), found.suggestion()


@pytest.mark.long
@pytest.mark.parametrize("factor", [pytest.param(1e6, marks=pytest.mark.exhaustive), math.nan])
def test_it_stops_on_all_ranks_where_the_loss_of_one_diverges(factor):
    first, second = run(search_broken_on_one, 2, factor)
    assert first == second
    assert 10 < len(first[0]) < 40


class Groups(OneOptimizer):
    def on_train_batch_end(self, outputs, batch, index):
        self.trainer.rates.append([group["lr"] for group in self.trainer.optimizers[0].param_groups])


class Fixed(Plain):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_groups_keep_their_proportions_and_an_attribute_without_use_is_told():
    trainer = treadle.Trainer(**QUIET_ON_CPU, max_epochs=1)
    trainer.rates = []
    Tuner(trainer).lr_find(Groups(), DataLoader(dataset(), 8), num_training=12, max_lr=0.1)
    assert [first for first, _ in trainer.rates] == pytest.approx(np.geomspace(1e-8, 0.1, 12).tolist())
    assert [10 * second for _, second in trainer.rates] == pytest.approx([first for first, _ in trainer.rates])
    with pytest.warns(UserWarning, match="Fixed.configure_optimizers does not use learning_rate"):
        Tuner(trainer).lr_find(Fixed(), DataLoader(dataset(), 8), num_training=30, min_lr=1e-4, max_lr=0.1)


def test_the_plot(monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    found = _LRFinder("exponential", 1e-4, 1.0, 30)
    for k in range(30):
        found.add(found.rate(k), 1 / (1 + k))
    figure = found.plot(suggest=True)
    line, mark = figure.axes[0].lines
    assert line.get_xdata().tolist() == found.results["lr"]
    assert line.get_ydata().tolist() == found.results["loss"]
    assert mark.get_xdata() == [found.suggestion()]
    assert figure.axes[0].get_xscale() == "log"
    _, ax = plt.subplots()
    assert found.plot(ax=ax) is ax.figure
    plt.close("all")
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match="pip install matplotlib"):
        found.plot()
