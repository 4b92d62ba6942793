"""A search leaves no trace in the run, its loaders, its data and its generators."""

import math
import warnings

import numpy as np
import pytest
import torch
from support.searched_runs import Task, check
from support.trainers import make_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from treadle.callbacks import BatchSizeFinder, LearningRateFinder, ModelCheckpoint
from treadle.callbacks.lr_finder import _LRFinder

import treadle
from treadle.tuner import Tuner


def test_a_run_that_goes_on_keeps_what_was_found(tmp_path):
    def fit(epochs, path=None, fits=8):
        treadle.seed_everything(0)
        finders = [LearningRateFinder(1e-4, 1.0, 30), BatchSizeFinder(keep_global_batch=True, max_trials=5)]
        task = Task(batch_size=16, fits=fits)
        task.noise = torch.default_generator  # one of its own would be in no checkpoint
        saver = ModelCheckpoint(tmp_path / str(epochs), every_n_epochs=1, save_top_k=-1)
        trainer = make_trainer(max_epochs=epochs, enable_checkpointing=True, callbacks=[*finders, saver])
        trainer.fit(task, ckpt_path=path)
        found = [finders[0].optimal_lr.results, finders[1].optimal_batch_size, task.lr, task.batch_size]
        return [*found, trainer.accumulate_grad_batches, task.state_dict()]

    whole_run = fit(2)
    assert whole_run[3:5] == [8, 2]
    fit(1)
    (path,) = (tmp_path / "1").iterdir()
    gone_on = fit(2, path, fits=10**9)  # with another memory it would find another size
    for one, other in zip(whole_run, gone_on, strict=True):
        check(one, other)


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


@pytest.mark.long
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
        task, trainer = Real(sizes, loss, optimizer), make_trainer()
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
    found = Tuner(make_trainer()).lr_find(task, loader, num_training=100)
    assert len(found.results["lr"]) == 100
    assert [math.isnan(loss) for loss in found.results["loss"]] == [k % 5 == 2 for k in range(100)]
    assert 1e-3 < task.lr < 0.5
