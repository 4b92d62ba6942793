"""The searches for a learning rate and a batch size: what they find, on one process and two, and what they leave."""

import math
import random
import threading
import warnings

import numpy as np
import pytest
import torch
import torchmetrics
from support.processes import run
from support.trainers import NO_OUTPUT
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset
from treadle.callbacks import BatchSizeFinder, GradientAccumulationScheduler, LearningRateFinder, ModelCheckpoint
from treadle.callbacks.lr_finder import _LRFinder

import treadle
from treadle.tuner import Tuner

NO_OUTPUT = {"accelerator": "cpu", **NO_OUTPUT}


class Task(treadle.TaskModule):
    """Has a bit of all that a search could leave a trace in."""

    def __init__(self, lr=0.05, batch_size=4, fits=10**9, only_on=None, broken_from=None):
        super().__init__()
        self.save_hyperparameters("lr", "batch_size")
        self.lr, self.batch_size = lr, batch_size
        self.fits, self.only_on, self.broken_from = fits, only_on, broken_from
        self.net = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Dropout(0.2), nn.Linear(5, 1))
        self.error = torchmetrics.MeanSquaredError()
        self.data = dataset()
        self.noise = torch.Generator().manual_seed(5)
        self.calls, self.rates, self.sizes, self.losses = 0, [], [], []

    def training_step(self, batch, index):
        self.calls += 1
        x, y = batch
        self.sizes.append(len(x))
        if len(x) > self.fits and (self.only_on is None or self.global_rank == self.only_on):
            raise MemoryError("no room")
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        loss = (self.net(x) - y).pow(2).mean() + 0 * random.random() + 0 * np.random.rand()
        loss = loss * (1 + 0.01 * torch.rand((), generator=self.noise))
        if self.broken_from is not None and self.calls >= self.broken_from:
            loss = loss * float("nan")
        self.error.update(self.net(x).detach(), y)
        self.log("loss", loss)
        self.log("error", self.error, on_epoch=True, on_step=False)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch):
        self.log("val", (self.net(batch[0]) - batch[1]).pow(2).mean())

    def train_dataloader(self):
        return DataLoader(self.data, self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.data, self.batch_size)

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.lr)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]


def dataset(count=32):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 3, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True) + 0.1 * torch.randn(count, 1, generator=generator))


def trace(finders, *, tuner=None, kind=Task, given=None, **flags):
    """A short fit; returns all that a search before it could have changed."""
    treadle.seed_everything(0)
    task = kind()
    trainer = treadle.Trainer(**NO_OUTPUT, max_epochs=2, callbacks=finders, log_every_n_steps=1, **flags)
    if tuner is not None:
        tuner(Tuner(trainer), task)
    trainer.fit(task, given)
    optimizer = trainer.optimizers[0]
    everything = {
        "weights": {name: whole(value) for name, value in task.state_dict().items()},
        "optimizer": [
            {key: whole(value) for key, value in state.items()} for state in optimizer.state_dict()["state"].values()
        ],
        "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        "scheduler": trainer.lr_scheduler_configs[0].scheduler.state_dict(),
        "random": (torch.get_rng_state(), random.getstate(), np.random.get_state()[1], task.noise.get_state()),
        "progress": (trainer.progress.step, trainer.progress.epoch, trainer.progress.samples),
        "logged": trainer.callback_metrics,
        "metric": task.error.metric_state,
        "task": (task.calls, task.losses, task.sizes, task.lr, task.batch_size, dict(task.hparams)),
        "accumulate": trainer.accumulate_grad_batches,
    }
    return everything


def whole(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def same(a, b):
    """Equal, bit for bit."""
    if isinstance(a, torch.Tensor | np.ndarray):
        return np.array_equal(np.asarray(a), np.asarray(b), equal_nan=True)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (a != a and b != b)


def check(a, b):
    for name in a:
        assert same(a[name], b[name]), f"{name}: {a[name]} != {b[name]}"


class Data(treadle.DataModule):
    def __init__(self, batch_size=4):
        super().__init__()
        self.save_hyperparameters()
        self.data = dataset()

    def train_dataloader(self):
        return DataLoader(self.data, self.hparams.batch_size, shuffle=True)


# -- no trace --------------------------------------------------------------------------------------------------------


def no_rate(**kwargs):
    return LearningRateFinder(num_training_steps=20, update_attr=False, **kwargs)


def no_size(**kwargs):
    return BatchSizeFinder(init_val=4, max_trials=1, steps_per_trial=2, **kwargs)


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.exhaustive), 3])
def test_nothing_is_left_of_searches_that_change_nothing(accumulate):
    plain = trace([], accumulate_grad_batches=accumulate)
    check(plain, trace([no_rate(), no_size()], accumulate_grad_batches=accumulate))


def test_nothing_is_left_of_a_tuner_alone():
    def search(tuner, task):
        found = tuner.lr_find(task, num_training=20, update_attr=False)
        assert len(found.results["lr"]) == 20
        assert tuner.scale_batch_size(task, init_val=4, max_trials=1) == 4

    check(trace([]), trace([], tuner=search))


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
    trainer = treadle.Trainer(**NO_OUTPUT, max_epochs=1)
    task = Task()
    found = Tuner(trainer).scale_batch_size(task, max_trials=2)
    assert (found, trainer.train_dataloader.batch_size) == (4, 4)
    assert len(trainer.train_dataloader.dataset) == 32
    trainer.fit(task)
    assert trainer.global_step == 8
    trainer.validate(task, DataLoader(dataset(), 4), verbose=False)
    assert trainer.train_dataloader is None


def test_a_search_that_fails_leaves_nothing():
    task, trainer = Task(fits=0), treadle.Trainer(**NO_OUTPUT, max_epochs=1)
    weights, state = [p.clone() for p in task.parameters()], torch.get_rng_state()
    with pytest.raises(MemoryError, match="even batch_size=1, the smallest"):
        Tuner(trainer).scale_batch_size(task)
    assert task.batch_size == task.hparams.batch_size == 4
    assert all(map(torch.equal, weights, task.parameters()))
    assert torch.equal(state, torch.get_rng_state())
    assert trainer.callbacks == []


class Unbuilt(Task):
    def __init__(self):
        super().__init__()
        self.net = None

    def configure_model(self):
        if self.net is None:
            self.net = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.2), nn.Linear(5, 1))


def traces_on_two(kind, strategy):
    flags = {"devices": 2, "strategy": strategy}
    plain = trace([], kind=kind, **flags)
    check(plain, trace([no_rate(), no_size()], kind=kind, **flags))
    return plain["task"][1]


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


def test_a_run_that_goes_on_keeps_what_was_found(tmp_path):
    def fit(epochs, path=None, fits=8):
        treadle.seed_everything(0)
        finders = [LearningRateFinder(1e-4, 1.0, 30), BatchSizeFinder(keep_global_batch=True, max_trials=5)]
        task = Task(batch_size=16, fits=fits)
        task.noise = torch.default_generator  # one of its own would be in no checkpoint
        saver = ModelCheckpoint(tmp_path / str(epochs), every_n_epochs=1, save_top_k=-1)
        settings = {**NO_OUTPUT, "enable_checkpointing": True}
        trainer = treadle.Trainer(**settings, max_epochs=epochs, callbacks=[*finders, saver])
        trainer.fit(task, ckpt_path=path)
        found = [finders[0].optimal_lr.results, finders[1].optimal_batch_size, task.lr, task.batch_size]
        return [
            *found,
            trainer.accumulate_grad_batches,
            task.state_dict(),
        ], saver.last_model_path or saver.best_model_path

    whole_run, _ = fit(2)
    assert whole_run[3:5] == [8, 2]
    _, path = fit(1)
    gone_on, _ = fit(2, path, fits=10**9)  # with another memory it would find another size
    for one, other in zip(whole_run, gone_on, strict=True):
        assert same(one, other)


# -- the learning rate -----------------------------------------------------------------------------------------------


def independent_suggestion(lrs, losses, mode, skip_begin, skip_end):
    """Written again from the words of the docstring."""
    mean, smoothed, seen = 0.0, [], 0
    for loss in losses:
        if not math.isfinite(loss):
            smoothed.append(float("nan"))
            continue
        seen += 1
        mean = 0.98 * mean + 0.02 * loss
        smoothed.append(mean / (1 - 0.98**seen))
    x = np.log(lrs) if mode == "exponential" else np.array(lrs)
    y = np.array(smoothed)
    inner = slice(skip_begin, len(lrs) - skip_end)
    fine = np.isfinite(y[inner])
    slopes = np.gradient(y[inner][fine], x[inner][fine])
    return np.array(lrs)[inner][fine][slopes.argmin()], y


@pytest.mark.parametrize("mode", ["exponential", "linear"])
@pytest.mark.parametrize("skips", [(10, 1), (0, 0), (3, 5)], ids=str)
def test_the_suggestion_is_numpys(mode, skips):
    numbers = np.random.default_rng(0)
    found = _LRFinder(mode, 1e-6, 2.0, 60)
    losses = [4 - 3 / (1 + math.exp(20 - k / 1.5)) + 0.3 * float(numbers.normal()) for k in range(60)]
    losses[25] = float("nan")
    losses[33] = float("inf")
    for k, loss in enumerate(losses):
        found.add(found.rate(k), loss)
    grid = np.geomspace(1e-6, 2.0, 60) if mode == "exponential" else np.linspace(1e-6, 2.0, 60)
    assert found.results["lr"] == pytest.approx(grid.tolist(), rel=1e-9)
    expected, smoothed = independent_suggestion(grid, losses, mode, *skips)
    assert found.results["loss"] == pytest.approx(smoothed.tolist(), nan_ok=True)
    assert found.suggestion(*skips) == pytest.approx(expected)


def test_where_nothing_can_be_suggested():
    found = _LRFinder("exponential", 1e-3, 1.0, 12)
    for k in range(12):
        found.add(found.rate(k), float(k))
    with pytest.warns(UserWarning, match="at least 2 points are needed, but .* leave only 1 of 12"):
        assert found.suggestion() is None
    with pytest.warns(UserWarning, match="falls no further than the noise"):
        assert found.suggestion(0, 0) is None
    few = _LRFinder("exponential", 1e-3, 1.0, 3)  # too few to tell noise
    for k in range(3):
        few.add(few.rate(k), float(k))
    with pytest.warns(UserWarning, match="the loss does not fall at any rate from"):
        assert few.suggestion(0, 0) is None
    with pytest.raises(ValueError, match="skip_end=-1"):
        found.suggestion(0, -1)


class Real(treadle.TaskModule):
    """A small network on data of scikit-learn."""

    def __init__(self, sizes, loss, optimizer):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(sizes[0], 32), nn.ReLU(), nn.Linear(32, sizes[1]))
        self.loss, self.optimizer, self.lr = loss, optimizer, 1e-3

    def training_step(self, batch):
        return self.loss(self.net(batch[0]).squeeze(-1), batch[1])

    def configure_optimizers(self):
        return self.optimizer(self.parameters(), lr=self.lr)


@pytest.mark.parametrize(
    ("name", "optimizer", "low", "high"),
    [
        ("diabetes", torch.optim.Adam, 1e-3, 0.3),
        ("digits", torch.optim.Adam, 1e-3, 0.3),
        pytest.param("diabetes", torch.optim.SGD, 0.01, 0.9, marks=pytest.mark.exhaustive),
        pytest.param("digits", torch.optim.SGD, 0.1, 1.0, marks=pytest.mark.exhaustive),
        ("noise", torch.optim.Adam, None, None),
    ],
)
def test_noise_is_no_suggestion(name, optimizer, low, high):
    """Good rates on each seed, and none where there is nothing to learn: then the rate stays, which is told."""
    from sklearn.datasets import load_diabetes, load_digits

    x, y = (load_digits if name == "digits" else load_diabetes)(return_X_y=True)
    x, y = torch.tensor(x).float(), torch.tensor(y)
    if name == "digits":
        x, sizes, loss = x / 16, (64, 10), nn.functional.cross_entropy
    else:
        x, y, sizes, loss = x / x.std(0), ((y - y.mean()) / y.std()).float(), (10, 1), nn.functional.mse_loss
    for seed in range(2):
        torch.manual_seed(seed)
        data = TensorDataset(torch.randn_like(x), torch.randn_like(y)) if name == "noise" else TensorDataset(x, y)
        task, trainer = Real(sizes, loss, optimizer), treadle.Trainer(**NO_OUTPUT, max_epochs=1)
        with pytest.warns(UserWarning, match="falls no further") if low is None else warnings.catch_warnings():
            Tuner(trainer).lr_find(task, DataLoader(data, 32, shuffle=True))
        assert task.lr == 1e-3 if low is None else low < task.lr < high, (seed, task.lr)


class Skips(Real):
    """Returns no loss for each fifth batch."""

    calls = 0

    def training_step(self, batch):
        self.calls += 1
        return None if self.calls % 5 == 3 else super().training_step(batch)


@pytest.mark.filterwarnings("ignore:training_step returned None")
def test_batches_without_a_loss_are_left_out_of_a_search():
    torch.manual_seed(0)
    x = torch.randn(512, 10)
    task = Skips((10, 1), nn.functional.mse_loss, torch.optim.Adam)
    loader = DataLoader(TensorDataset(x, x.sum(1)), 32)
    found = Tuner(treadle.Trainer(**NO_OUTPUT, max_epochs=1)).lr_find(task, loader, num_training=100)
    assert len(found.results["lr"]) == 100
    assert [math.isnan(loss) for loss in found.results["loss"]] == [k % 5 == 2 for k in range(100)]
    assert 1e-3 < task.lr < 0.5


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


class Plain(treadle.TaskModule):
    def __init__(self, manual=False):
        super().__init__()
        self.learning_rate = 0.1
        self.net = nn.Linear(3, 1)
        self.automatic_optimization = not manual
        self.seen = []

    def training_step(self, batch):
        return (self.net(batch[0]) - batch[1]).pow(2).mean()

    def on_train_start(self):
        self.seen.append([group["lr"] for group in self.trainer.optimizers[0].param_groups])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.learning_rate)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)]


def search_plainly(accumulate=1, size=8, **flags):
    treadle.seed_everything(0)
    task = Plain()
    finder = LearningRateFinder(1e-4, 0.5, 25, early_stop_threshold=None)
    trainer = treadle.Trainer(
        **NO_OUTPUT,
        max_epochs=2,
        callbacks=[finder],
        accumulate_grad_batches=accumulate,
        num_sanity_val_steps=0,
        **flags,
    )
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
        treadle.Trainer(**NO_OUTPUT, max_epochs=1, callbacks=[finder]).fit(task, DataLoader(dataset(), 8))
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
    trainer = treadle.Trainer(**NO_OUTPUT, max_epochs=1)
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
    trainer = treadle.Trainer(**NO_OUTPUT, max_epochs=1, devices=2, strategy="ddp")
    found = Tuner(trainer).lr_find(BreaksOnOne(factor), DataLoader(dataset(), 4), num_training=40, update_attr=False)
    return list(map(str, found.results["loss"])), found.suggestion()


@pytest.mark.parametrize("factor", [pytest.param(1e6, marks=pytest.mark.exhaustive), math.nan])
def test_it_stops_on_all_ranks_where_the_loss_of_one_diverges(factor):
    first, second = run(search_broken_on_one, 2, factor)
    assert first == second
    assert 10 < len(first[0]) < 40


class Groups(Plain):
    def configure_optimizers(self):
        groups = [{"params": [self.net.weight], "lr": self.learning_rate / 10}, {"params": [self.net.bias]}]
        return torch.optim.SGD(groups, lr=self.learning_rate)

    def on_train_batch_end(self, outputs, batch, index):
        self.trainer.rates.append([group["lr"] for group in self.trainer.optimizers[0].param_groups])


class Fixed(Plain):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_groups_keep_their_proportions_and_an_attribute_without_use_is_told():
    trainer = treadle.Trainer(**NO_OUTPUT, max_epochs=1)
    trainer.rates = []
    Tuner(trainer).lr_find(Groups(), DataLoader(dataset(), 8), num_training=12, max_lr=0.1)
    assert [second for _, second in trainer.rates] == pytest.approx(np.geomspace(1e-8, 0.1, 12).tolist())
    assert [10 * first for first, _ in trainer.rates] == pytest.approx([second for _, second in trainer.rates])
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


# -- the batch size --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "most", "data", "tried", "expected"),
    [
        pytest.param({}, 10, 1000, [2, 4, 8, 16], 8, id="power"),
        pytest.param({"init_val": 64}, 10, 1000, [64, 32, 16, 8], 8, id="power-down"),
        pytest.param({"init_val": 3, "max_trials": 2}, 99, 1000, [3, 6], 6, id="trials"),
        pytest.param({"max_val": 20}, 99, 1000, [2, 4, 8, 16, 20], 20, id="max_val"),
        pytest.param({}, 99, 12, [2, 4, 8, 12], 12, id="data"),
        pytest.param({"init_val": 32}, 99, 12, [32], 12, id="data-at-once"),
        pytest.param({"mode": "binsearch", "margin": 0.0}, 11, 1000, [2, 4, 8, 16, 12, 10, 11], 11, id="binsearch"),
        pytest.param({"mode": "binsearch", "margin": 0.2}, 11, 1000, [2, 4, 8, 16, 12, 10, 11], 8, id="margin"),
        pytest.param({"mode": "binsearch", "margin": 0.2}, 99, 12, [2, 4, 8, 12], 12, id="no-margin-without-an-end"),
        pytest.param({"mode": "binsearch", "init_val": 9, "margin": 0}, 3, 99, [9, 4, 2, 3], 3, id="binsearch-down"),
    ],
)
def test_which_sizes_are_tried(settings, most, data, tried, expected):
    sizes = []

    def fits(size):
        sizes.append(size)
        return None if size > most else data

    finder = BatchSizeFinder(**settings)
    assert finder.search(fits, finder.max_val) == expected
    assert sizes == tried


def test_a_task_gets_its_batch_size():
    finder = BatchSizeFinder(max_trials=4)
    found = trace([finder], kind=lambda: Task(fits=10))
    calls, _, sizes, _, size, hparams = found["task"]
    assert finder.optimal_batch_size == size == hparams["batch_size"] == 8
    assert set(sizes) == {8}
    assert calls == 8


def test_a_data_module_gets_its_batch_size_and_the_global_batch_stays():
    data, task = Data(batch_size=12), Task(fits=10)
    task.val_dataloader = list
    del task.hparams["batch_size"], task.batch_size
    trainer = treadle.Trainer(**NO_OUTPUT, max_epochs=1, accumulate_grad_batches=2, limit_val_batches=0)
    size = Tuner(trainer).scale_batch_size(task, datamodule=data, keep_global_batch=True, mode="binsearch", margin=0)
    assert (size, trainer.accumulate_grad_batches) == (8, 3)  # 10 would fit, and does not divide 24
    trainer.fit(task, data)
    assert data.hparams.batch_size == 8
    assert task.sizes == [8, 8, 8, 8]
    assert trainer.global_step == 2


@pytest.mark.parametrize("method", ["validate", "test", "predict"])
def test_sizes_for_evaluation(method):
    class Evaluated(Task):
        def validation_step(self, batch, index=0):
            if len(batch[0]) > 10:
                raise MemoryError
            self.log("n", float(len(batch[0])))

        test_step = validation_step

        def predict_step(self, batch, index):
            return self.validation_step(batch, index)

        test_dataloader = predict_dataloader = Task.val_dataloader

    task, trainer = Evaluated(), treadle.Trainer(**NO_OUTPUT, max_epochs=1)
    kind = {"validate": "val"}.get(method, method)
    assert Tuner(trainer).scale_batch_size(task, method=method) == 8
    assert task.batch_size == 8
    task.batch_size = 4
    trainer = treadle.Trainer(**NO_OUTPUT, max_epochs=1, callbacks=[BatchSizeFinder()])
    getattr(trainer, method)(task)
    assert task.batch_size == 8
    with pytest.raises(ValueError, match=f"{kind}_dataloader\\(\\) with batch_size=self.batch_size"):
        getattr(trainer, method)(task, DataLoader(dataset(), 4))


def sizes_on_two(kind, strategy, fits, only_on):
    treadle.seed_everything(0)
    task = kind()
    task.fits, task.only_on = fits, only_on
    finder = BatchSizeFinder(max_trials=5, keep_global_batch=True)
    trainer = treadle.Trainer(**NO_OUTPUT, max_epochs=1, devices=2, strategy=strategy, callbacks=[finder])
    task.batch_size = 16
    trainer.fit(task)
    return task.batch_size, trainer.accumulate_grad_batches, trainer.global_step, task.losses


@pytest.mark.parametrize(
    ("kind", "strategy", "fits", "only_on"),
    [
        pytest.param(Task, "ddp", 5, 1, id="ddp-one-rank"),
        pytest.param(Unbuilt, "fsdp", 5, 1, id="fsdp-unbuilt-one-rank", marks=pytest.mark.exhaustive),
        pytest.param(Task, "fsdp", 5, None, id="fsdp-all", marks=pytest.mark.slow),
    ],
)
def test_memory_runs_out_on_two_processes(kind, strategy, fits, only_on):
    first, second = run(sizes_on_two, 2, kind, strategy, fits, only_on, timeout=60)
    assert first[:3] == second[:3] == (4, 4, 1)
    assert all(map(math.isfinite, first[3] + second[3]))


# -- errors ----------------------------------------------------------------------------------------------------------


def lambda_task():
    task = Task()
    task.train_dataloader = lambda: DataLoader(task.data, 4)
    return task


def locked_task():
    task = Task()
    task.lock = threading.Lock()
    return task


@pytest.mark.parametrize(
    ("task", "finder", "loader", "text"),
    [
        pytest.param(
            Task,
            BatchSizeFinder,
            lambda: DataLoader(dataset(), 4),
            "but a dataloader was passed to fit",
            id="given",
        ),
        pytest.param(lambda_task, BatchSizeFinder, None, "the batch size of the dataloader stayed ", id="unused"),
        pytest.param(
            Task, lambda: BatchSizeFinder(batch_arg_name="batch_sise"), None, "Did you mean 'batch_size'", id="name"
        ),
        pytest.param(
            lambda: Plain(manual=True),
            LearningRateFinder,
            lambda: [dataset()[:4]],
            "automatic_optimization=False",
            id="manual",
        ),
        pytest.param(
            Plain, lambda: LearningRateFinder(attr_name="learning_rat"), None, "Did you mean 'learning_rate'", id="lr"
        ),
        pytest.param(Plain, LearningRateFinder, lambda: iter([dataset()[:4]]), "can be read only once", id="iterator"),
        pytest.param(locked_task, LearningRateFinder, None, "Task cannot be copied", id="lock"),
        pytest.param(
            Task,
            lambda: [BatchSizeFinder(keep_global_batch=True), GradientAccumulationScheduler({1: 2})],
            None,
            "both set the number of micro-batches per optimizer step",
            id="accumulation",
        ),
    ],
)
def test_what_is_refused_before_the_first_step(task, finder, loader, text):
    task = task()
    trainer = treadle.Trainer(**NO_OUTPUT, max_epochs=1, callbacks=finder())
    with pytest.raises(ValueError, match=text):
        trainer.fit(task, loader and loader())
    assert getattr(task, "calls", 0) == 0


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: LearningRateFinder(mode="exponentiel"), "Did you mean 'exponential'"),
        (lambda: LearningRateFinder(min_lr=0.0), "above 0"),
        (lambda: LearningRateFinder(min_lr=1.0, max_lr=0.1), "min_lr must be smaller than max_lr"),
        (lambda: LearningRateFinder(num_training_steps=0), "num_training_steps=0"),
        (lambda: LearningRateFinder(early_stop_threshold=0.5), "more than 1"),
        (lambda: BatchSizeFinder(mode="pover"), "Did you mean 'power'"),
        (lambda: BatchSizeFinder(margin=1.0), "margin=1.0"),
        (lambda: BatchSizeFinder(init_val=0), "init_val=0"),
        (lambda: BatchSizeFinder(init_val=16, max_val=8), "more than max_val=8"),
        (lambda: Tuner(treadle.Trainer(**NO_OUTPUT)).lr_find(Plain(), method="test"), "must be 'fit'"),
        (lambda: Tuner(treadle.Trainer(**NO_OUTPUT)).scale_batch_size(Plain(), method="tets"), "Did you mean 'test'"),
        (
            lambda: Tuner(treadle.Trainer(**NO_OUTPUT)).scale_batch_size(Plain(), dataloaders=[1]),
            "dataloaders=... does not apply",
        ),
        (
            lambda: Tuner(treadle.Trainer(**NO_OUTPUT, callbacks=[LearningRateFinder()])).lr_find(Plain()),
            "already has a",
        ),
    ],
)
def test_arguments_that_can_not_be(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_no_search_within_a_run_and_none_with_fast_dev_run():
    class Later(LearningRateFinder):
        def on_train_epoch_start(self, trainer, task):
            self.lr_find(trainer, task)

    loader = DataLoader(dataset(), 8)
    with pytest.raises(RuntimeError, match="before the first step of fit"):
        treadle.Trainer(**NO_OUTPUT, max_epochs=1, callbacks=[Later(num_training_steps=12)]).fit(Plain(), loader)
    finders = [LearningRateFinder(), BatchSizeFinder(batch_arg_name="learning_rate")]
    trainer = treadle.Trainer(**NO_OUTPUT, fast_dev_run=True, callbacks=finders)
    trainer.fit(Plain(), loader)
    assert [finders[0].optimal_lr, finders[1].optimal_batch_size] == [None, None]


def test_no_trial_and_one_rate():
    task, trainer = Task(), treadle.Trainer(**NO_OUTPUT, max_epochs=1)
    assert Tuner(trainer).scale_batch_size(task, init_val=6, max_trials=0) == task.batch_size == 6
    assert task.calls == 0
    with pytest.warns(UserWarning, match="at least 2 points are needed"):
        found = Tuner(trainer).lr_find(Plain(), DataLoader(dataset(), 8), None, None, None, "fit", 1e-3, 0.1, 1)
    assert found.results["lr"] == [1e-3]
