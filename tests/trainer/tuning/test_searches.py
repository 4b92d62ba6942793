"""What searches refuse, and when they are not made."""

import threading

import pytest
import torch
from support.processes import run
from support.searched_runs import Plain, Task, check, dataset, trace
from support.trainers import make_trainer
from torch.utils.data import DataLoader
from treadle.callbacks import BatchSizeFinder, GradientAccumulationScheduler, LearningRateFinder
from treadle.engine.process_state import get_latest_accelerator
from treadle.trainer.watched import locate

import treadle
from treadle.tuner import Tuner


def fixed():
    return DataLoader(dataset(), 4)


def task_with(name, value):
    task = Task()
    setattr(task, name, value)
    return task


def accumulating():
    return [BatchSizeFinder(keep_global_batch=True), GradientAccumulationScheduler({1: 2})]


class Manual(Plain):
    """Steps its optimizer and a schedule that ends long before a search does, as NeuralProphet's model."""

    automatic_optimization = False

    def training_step(self, batch):
        loss = super().training_step(batch)
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()
        self.lr_schedulers().step()
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.learning_rate)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4, cycle_momentum=False)
        return [optimizer], [schedule]


class TwoOptimizers(Manual):
    def configure_optimizers(self):
        return [torch.optim.SGD([parameter], 0.1) for parameter in self.parameters()]


class NoLoss(Manual):
    def training_step(self, batch):
        super().training_step(batch)


def search_rates(kind):
    torch.manual_seed(0)
    finder = LearningRateFinder(num_training_steps=20, early_stop_threshold=None, update_attr=False)
    task = kind()
    make_trainer(max_steps=1, callbacks=finder).fit(task, fixed())
    return finder.optimal_lr.results, task.seen


def test_a_search_with_manual_optimization():
    by_hand, seen = search_rates(Manual)
    assert by_hand == search_rates(Plain)[0]
    assert len(by_hand["lr"]) == 20
    assert seen == [[pytest.approx(0.1 / 25)]]  # the run has the task's own schedule


@pytest.mark.parametrize(
    ("task", "finder", "loader", "text"),
    [
        (Task, BatchSizeFinder, fixed, "but a dataloader was passed to fit"),
        (
            lambda: task_with("train_dataloader", fixed),
            BatchSizeFinder,
            None,
            "size of the dataloader stayed ",
        ),
        (Task, lambda: BatchSizeFinder(batch_arg_name="batch_sise"), None, "Did you mean 'batch_size'"),
        (TwoOptimizers, LearningRateFinder, lambda: [dataset()[:4]], "automatic_optimization=False and 2 optimizers"),
        (NoLoss, LearningRateFinder, lambda: [dataset()[:4]], "NoLoss.training_step returned no loss"),
        (Plain, lambda: LearningRateFinder(attr_name="learning_rat"), None, "Did you mean 'learning_rate'"),
        (Plain, LearningRateFinder, lambda: iter([dataset()[:4]]), "can be read only once"),
        (lambda: task_with("lock", threading.Lock()), LearningRateFinder, None, "Task cannot be copied"),
        (Task, accumulating, None, "and GradientAccumulationScheduler both set the number of micro-batches"),
    ],
)
def test_what_is_refused_before_the_first_step(task, finder, loader, text):
    task = task()
    trainer = make_trainer(callbacks=finder())
    with pytest.raises(ValueError, match=text):
        trainer.fit(task, loader and loader())
    assert getattr(task, "calls", 0) == 0


def tuner(**flags):
    return Tuner(make_trainer(**flags))


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
        (lambda: tuner().lr_find(Plain(), method="test"), "must be 'fit'"),
        (lambda: tuner().scale_batch_size(Plain(), method="tets"), "Did you mean 'test'"),
        (lambda: tuner().scale_batch_size(Plain(), dataloaders=[1]), "dataloaders=... does not apply"),
        (lambda: tuner(callbacks=[LearningRateFinder()]).lr_find(Plain()), "already has a"),
    ],
)
def test_arguments_that_can_not_be(make, text):
    with pytest.raises(ValueError, match=text):
        make()


def test_no_search_with_fast_dev_run():
    finders = [LearningRateFinder(), BatchSizeFinder(batch_arg_name="learning_rate")]
    make_trainer(fast_dev_run=True, callbacks=finders).fit(Plain(), fixed())
    assert [finders[0].optimal_lr, finders[1].optimal_batch_size] == [None, None]


# -- within a run ----------------------------------------------------------------------------------------------------


class LaterRate(LearningRateFinder):
    """Searches at the beginning of the second epoch, as in Lightning's documentation."""

    def on_fit_start(self, trainer, task):
        self.at_start = self.optimal_lr

    def on_train_epoch_start(self, trainer, task):
        if trainer.current_epoch == 1:
            self.lr_find(trainer, task)
            assert get_latest_accelerator() is trainer.accelerator
            if (watchdog := trainer.accelerator.watchdog) is not None:  # of several processes
                assert watchdog.clock.locate() == locate(trainer)


class LaterSize(BatchSizeFinder):
    def on_fit_start(self, *args):
        pass

    def on_train_epoch_start(self, trainer, task):
        if trainer.current_epoch == 1:
            self.scale_batch_size(trainer, task)


def without_the_result(flags):
    found = trace([LaterRate(num_training_steps=20, update_attr=False)], **flags)
    check(trace([], **flags), found)
    return found["weights"]


@pytest.mark.parametrize("flags", [{}, {"accumulate_grad_batches": 3, "precision": "bf16-mixed"}])
def test_a_search_within_a_run_leaves_nothing_else(flags):
    without_the_result(flags)


def test_a_search_within_a_run_on_two_processes():
    first, second = run(without_the_result, 2, {"devices": 2, "strategy": "ddp"})
    check(first, second)


class Rates(Plain):
    """Has a rate for each of two groups, and a scheduler that multiplies the current rate."""

    def configure_optimizers(self):
        groups = [{"params": [self.net.weight]}, {"params": [self.net.bias], "lr": self.learning_rate / 10}]
        optimizer = torch.optim.SGD(groups, lr=self.learning_rate)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 30)]


@pytest.mark.parametrize("stop", [2, 4, 6, 9])  # of 4 steps per epoch: before, at, after and long after the search
def test_a_rate_found_within_a_run_is_used_and_resumed(tmp_path, stop):
    def fit(max_steps, **options):
        treadle.seed_everything(0)
        task, own = Rates(), LaterRate(1e-4, 10.0, 60)
        trainer = make_trainer(max_epochs=3, max_steps=max_steps, callbacks=[own])
        trainer.fit(task, DataLoader(dataset(), 8, shuffle=True), **options)
        trainer.save_checkpoint(tmp_path / "c.ckpt")
        rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        return {"rates": rates, "attribute": task.learning_rate, "weights": task.state_dict()}, own

    expected, finder = fit(-1)
    assert finder.at_start is None
    fit(stop)
    check(expected, fit(-1, ckpt_path=tmp_path / "c.ckpt")[0])
    assert expected["rates"] == pytest.approx([expected["attribute"], expected["attribute"] / 10])
    assert expected["attribute"] == finder.optimal_lr.suggestion() != 0.1


def test_a_subclass_that_calls_the_hook_searches_when_fit_starts():
    class Own(LearningRateFinder):
        def on_fit_start(self, trainer, task):
            super().on_fit_start(trainer, task)
            assert task.learning_rate == trainer.optimizers[0].param_groups[0]["lr"] == self.optimal_lr.suggestion()

    trainer = make_trainer(callbacks=[Own(1e-4, 10.0, 60)])
    trainer.fit(Plain(), fixed())
    assert trainer.callbacks[0].optimal_lr is not None


class Sizes(Plain):
    def __init__(self):
        super().__init__()
        self.batch_size, self.sizes = 4, []

    def training_step(self, batch):
        self.sizes.append(len(batch[0]))
        return super().training_step(batch)

    def train_dataloader(self):
        return DataLoader(dataset(), self.batch_size, shuffle=True)


@pytest.mark.parametrize("stop", [7, 8, 9])  # before, at and after the search
def test_a_batch_size_found_within_a_run(tmp_path, stop):
    def fit(max_steps, **options):
        treadle.seed_everything(0)
        task = Sizes()
        finder = LaterSize(init_val=4, max_trials=2)
        trainer = make_trainer(max_epochs=2, max_steps=max_steps, callbacks=[finder])
        trainer.fit(task, **options)
        trainer.save_checkpoint(tmp_path / "c.ckpt")
        return {"weights": task.state_dict(), "size": task.batch_size}, task.sizes

    expected, sizes = fit(-1)
    assert sizes == [4] * 8 + [8] * 4
    assert expected["size"] == 8
    fit(stop)
    check(expected, fit(-1, ckpt_path=tmp_path / "c.ckpt")[0])


def search_size_on_two():
    with pytest.raises(ValueError, match="scale_batch_size within a run needs a single process, not 2"):
        trace([LaterSize()], devices=2, strategy="ddp")


def test_a_batch_size_on_two_processes_is_found_before_the_run():
    run(search_size_on_two, 2)


def test_no_trial_and_one_rate():
    task, own = Task(), tuner()
    assert own.scale_batch_size(task, init_val=6, max_trials=0) == task.batch_size == 6
    assert task.calls == 0
    with pytest.warns(UserWarning, match="at least 2 points are needed"):
        found = own.lr_find(Plain(), DataLoader(dataset(), 8), None, None, None, "fit", 1e-3, 0.1, 1)
    assert found.results["lr"] == [1e-3]
