"""What searches refuse, and when they are not made."""

import threading

import pytest
from support.searched_runs import QUIET_ON_CPU, Plain, Task, dataset
from torch.utils.data import DataLoader
from treadle.callbacks import BatchSizeFinder, GradientAccumulationScheduler, LearningRateFinder

import treadle
from treadle.tuner import Tuner


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
        (Task, BatchSizeFinder, lambda: DataLoader(dataset(), 4), "but a dataloader was passed to fit"),
        (lambda_task, BatchSizeFinder, None, "the batch size of the dataloader stayed "),
        (Task, lambda: BatchSizeFinder(batch_arg_name="batch_sise"), None, "Did you mean 'batch_size'"),
        (lambda: Plain(manual=True), LearningRateFinder, lambda: [dataset()[:4]], "automatic_optimization=False"),
        (Plain, lambda: LearningRateFinder(attr_name="learning_rat"), None, "Did you mean 'learning_rate'"),
        (Plain, LearningRateFinder, lambda: iter([dataset()[:4]]), "can be read only once"),
        (locked_task, LearningRateFinder, None, "Task cannot be copied"),
        (
            Task,
            lambda: [BatchSizeFinder(keep_global_batch=True), GradientAccumulationScheduler({1: 2})],
            None,
            "and GradientAccumulationScheduler both set the number of micro-batches per optimizer step",
        ),
    ],
)
def test_what_is_refused_before_the_first_step(task, finder, loader, text):
    task = task()
    trainer = treadle.Trainer(**QUIET_ON_CPU, max_epochs=1, callbacks=finder())
    with pytest.raises(ValueError, match=text):
        trainer.fit(task, loader and loader())
    assert getattr(task, "calls", 0) == 0


def tuner(**flags):
    return Tuner(treadle.Trainer(**QUIET_ON_CPU, **flags))


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


def test_no_search_within_a_run_and_none_with_fast_dev_run():
    class Later(LearningRateFinder):
        def on_train_epoch_start(self, trainer, task):
            self.lr_find(trainer, task)

    loader = DataLoader(dataset(), 8)
    with pytest.raises(RuntimeError, match="before the first step of fit"):
        treadle.Trainer(**QUIET_ON_CPU, max_epochs=1, callbacks=[Later(num_training_steps=12)]).fit(Plain(), loader)
    finders = [LearningRateFinder(), BatchSizeFinder(batch_arg_name="learning_rate")]
    trainer = treadle.Trainer(**QUIET_ON_CPU, fast_dev_run=True, callbacks=finders)
    trainer.fit(Plain(), loader)
    assert [finders[0].optimal_lr, finders[1].optimal_batch_size] == [None, None]


def test_no_trial_and_one_rate():
    task, own = Task(), tuner(max_epochs=1)
    assert own.scale_batch_size(task, init_val=6, max_trials=0) == task.batch_size == 6
    assert task.calls == 0
    with pytest.warns(UserWarning, match="at least 2 points are needed"):
        found = own.lr_find(Plain(), DataLoader(dataset(), 8), None, None, None, "fit", 1e-3, 0.1, 1)
    assert found.results["lr"] == [1e-3]
