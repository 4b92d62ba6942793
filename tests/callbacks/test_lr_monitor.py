"""`LearningRateMonitor`: the rates that steps are taken with, under the names that Lightning 2.6.6 gives them."""

from contextlib import nullcontext

import pytest
import torch
from support.callback_runs import Rows, Tiny, fit
from torch import nn
from treadle.callbacks import (
    LambdaCallback,
    LearningRateMonitor,
)


class Built(Tiny):
    """Its optimizers and schedulers are what a function of its layer returns."""

    def __init__(self, build):
        super().__init__([1.0])
        self.build = build

    def configure_optimizers(self):
        return self.build(self.net)


def halved(optimizer, interval, **options):
    scheduler = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": interval, **options}
    return {"optimizer": optimizer, "lr_scheduler": scheduler}


def scheduled(interval):
    """A task whose rate is halved at each step or epoch, or never."""

    def build(net):
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        return halved(optimizer, interval) if interval else optimizer

    return Built(build)


@pytest.mark.parametrize(
    ("interval", "scheduler", "rows"),
    [
        (None, None, [(s, 1.0) for s in (0, 2, 4, 5, 6, 8, 10)]),
        (None, "epoch", [(0, 1.0), (5, 0.5)]),
        (None, "step", [(s, 0.5 ** (s - 1)) for s in (2, 4, 6, 8, 10)]),
        ("step", "epoch", [(2, 1.0), (4, 1.0), (6, 0.5), (8, 0.5), (10, 0.5)]),
        ("epoch", "step", [(0, 1.0), (5, 0.5**5)]),
        ("epoch", None, [(0, 1.0), (5, 1.0)]),
    ],
)
def test_the_rate_a_step_is_taken_with(tmp_path, interval, scheduler, rows):
    logger, monitor = Rows(), LearningRateMonitor(interval)
    made = fit(tmp_path, monitor, task=scheduled(scheduler), logger=logger, log_every_n_steps=2)
    assert logger.of("lr-SGD") == rows
    assert monitor.lrs == {"lr-SGD": [rate for _, rate in rows]}
    assert made.callback_metrics["lr-SGD"].item() == rows[-1][1]


def test_callback_metrics_have_the_rate_of_the_step_that_was_taken(tmp_path):
    seen, logger = [], Rows()

    def see(trainer, *_):
        seen.append(trainer.callback_metrics["lr-SGD"].item())

    hooks = LambdaCallback(on_train_batch_end=see, on_validation_end=see)
    monitor = LearningRateMonitor("step")
    fit(
        tmp_path,
        monitor,
        hooks,
        task=scheduled("step"),
        logger=logger,
        max_steps=3,
        val_check_interval=2,
        log_every_n_steps=1,
    )
    assert seen == [1.0, 0.5, 0.5, 0.25]
    assert logger.of("lr-SGD") == [(1, 1.0), (2, 0.5), (3, 0.25)]


def test_groups_names_momentum_and_weight_decay(tmp_path):
    def groups(net):
        parts = [{"params": [net.weight], "lr": 0.5}, {"params": [net.bias], "name": "bias"}]
        return halved(torch.optim.SGD(parts, lr=1.0, momentum=0.9, weight_decay=0.25), "epoch", name="rate")

    logger, monitor = Rows(), LearningRateMonitor("epoch", log_momentum=True, log_weight_decay=True)
    fit(tmp_path, monitor, task=Built(groups), logger=logger, max_epochs=1)
    row = {name: value for name, value in logger.rows[0][1].items() if name != "epoch"}
    assert row == {
        "rate/pg1": 0.5,
        "rate/pg1-momentum": 0.9,
        "rate/pg1-weight_decay": 0.25,
        "rate/bias": 1.0,
        "rate/bias-momentum": 0.9,
        "rate/bias-weight_decay": 0.25,
    }
    assert list(monitor.lrs) == ["rate/pg1", "rate/bias"]


def test_two_schedulers_of_one_optimizer(tmp_path):
    def build(net):
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        schedulers = [halved(optimizer, "step"), halved(optimizer, "epoch", name="both")]
        return [optimizer], [each["lr_scheduler"] for each in schedulers]

    logger = Rows()
    fit(tmp_path, LearningRateMonitor(), task=Built(build), logger=logger, log_every_n_steps=5)
    assert [step for step, _ in logger.of("both")] == [0, 5]
    assert [step for step, _ in logger.of("lr-SGD")] == [5, 10]


def test_rates_without_a_logger(tmp_path):
    with pytest.raises(ValueError, match="needs a logger"):
        fit(tmp_path, LearningRateMonitor())
    with pytest.raises(ValueError, match="Did you mean 'epoch'"):
        LearningRateMonitor("epochs")


def test_rates_of_steps_where_no_step_is_logged(tmp_path):
    for scheduler, interval in ((None, None), ("step", None), ("epoch", "step")):
        with pytest.raises(ValueError, match=r"log_every_n_steps=0 .* logs lr-SGD at that interval"):
            fit(tmp_path, LearningRateMonitor(interval), task=scheduled(scheduler), logger=Rows(), log_every_n_steps=0)
    for scheduler, interval in (("epoch", None), (None, "epoch")):
        monitor = LearningRateMonitor(interval)
        fit(tmp_path, monitor, task=scheduled(scheduler), logger=Rows(), log_every_n_steps=0)
        assert len(monitor.lrs["lr-SGD"]) == 2


class Several(Tiny):
    """Two networks, two optimizers, stepped by hand."""

    def __init__(self, build):
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Linear(2, 1)
        self.build = build

    def configure_optimizers(self):
        return self.build(self.net.parameters(), self.other.parameters())

    def training_step(self, batch, batch_idx):
        for number, (optimizer, part) in enumerate(zip(self.optimizers(), (self.net, self.other), strict=True)):
            if number and batch_idx % 2 == 0:
                continue  # the second one only every other batch
            loss = part(batch[0]).pow(2).mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            optimizer.param_groups[0]["lr"] /= 2


def adams(first, second):
    return [torch.optim.Adam(first, lr=1.0), torch.optim.Adam(second, lr=8.0)]


def one_scheduled(first, second):
    made = adams(first, second)
    return made, [torch.optim.lr_scheduler.StepLR(made[1], 100)]


def one_named(first, second):
    made = adams(first, second)
    return made, [{"scheduler": torch.optim.lr_scheduler.StepLR(made[0], 100), "name": "mine"}]


def groups(first, second):
    (weight, bias), both = first, list(second)
    return [
        torch.optim.SGD([{"params": [weight]}, {"params": [bias], "name": "bias"}], lr=1.0),
        torch.optim.SGD([{"params": both, "name": "all"}], lr=8.0),
    ]


@pytest.mark.parametrize(
    ("build", "names"),
    [
        (adams, {"lr-Adam": 1.0, "lr-Adam-1": 8.0}),
        (one_scheduled, {"lr-Adam": 8.0, "lr-Adam-1": 1.0}),
        (one_named, {"mine": 1.0, "lr-Adam": 8.0}),
        (groups, {"lr-SGD/pg1": 1.0, "lr-SGD/bias": 1.0, "lr-SGD-1/all": 8.0}),
    ],
)
def test_names_of_several_optimizers(tmp_path, build, names):
    rows = Rows()
    fit(tmp_path, LearningRateMonitor("step"), task=Several(build), logger=rows, log_every_n_steps=1, max_epochs=1)
    found = [
        (step, {k: v for k, v in row.items() if k != "epoch"}) for step, row in rows.rows if "train_loss" not in row
    ]
    assert found[0] == (1, names)
    assert [step for step, _ in found] == [1, 2, 3, 4, 5]
    scale = [1, 2, 4, 8, 16]  # what each of the first one's steps was taken with; of the second's 1, 1, 2, 2, 4
    first, second = [next(name for name, value in names.items() if value == start) for start in (1.0, 8.0)]
    assert [row[first] for _, row in found] == [1 / by for by in scale]
    assert [row[second] for _, row in found] == [8.0, 8.0, 4.0, 4.0, 2.0]


def test_groups_with_one_name_are_an_error(tmp_path):
    def twice(first, second):
        return [torch.optim.SGD([{"params": list(p), "name": "a"} for p in (first, second)], lr=1.0)]

    with pytest.raises(ValueError, match="several parameter groups with the name 'a'"):
        fit(tmp_path, LearningRateMonitor(), task=Several(twice), logger=Rows())


@pytest.mark.parametrize(("kind", "momentum"), [("Adam", 0.9), ("Adagrad", 0.0)])
def test_a_beta_is_a_momentum_and_none_at_all_is_said(tmp_path, kind, momentum):
    task = Built(lambda net: getattr(torch.optim, kind)(net.parameters(), lr=0.5, weight_decay=0.25))
    monitor = LearningRateMonitor("epoch", log_momentum=True, log_weight_decay=True)
    with nullcontext() if momentum else pytest.warns(UserWarning, match="Adagrad has no momentum"):
        fit(tmp_path, monitor, task=task, logger=Rows(), max_epochs=1)
    assert monitor.last_momentum_values == {f"lr-{kind}-momentum": momentum}
    assert monitor.last_weight_decay_values == {f"lr-{kind}-weight_decay": 0.25}


def test_groups_that_are_added_later(tmp_path):
    class Grows(Tiny):
        def configure_optimizers(self):
            return torch.optim.SGD([self.net.weight], lr=1.0)

        def on_train_epoch_start(self):
            if self.current_epoch == 1:
                self.trainer.optimizers[0].add_param_group({"params": [self.net.bias], "lr": 0.5})

    monitor = LearningRateMonitor("step")
    fit(tmp_path, monitor, task=Grows(), logger=Rows(), log_every_n_steps=5)
    assert monitor.lrs == {"lr-SGD/pg1": [1.0, 1.0], "lr-SGD/pg2": [0.5]}


def test_a_skipped_step_has_no_rate(tmp_path):
    class Spoiled(Tiny):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss.float() * 1e35 if batch_idx in (1, 3) else loss  # finite, but not with the loss scale

    monitor, rows = LearningRateMonitor("step"), Rows()
    flags = {"precision": "16-mixed", "log_every_n_steps": 1, "max_epochs": 1}
    run = fit(tmp_path, monitor, task=Spoiled(), logger=rows, **flags)
    assert run.global_step < 5
    assert [len(rates) for rates in monitor.lrs.values()] == [run.global_step]
