"""One Trainer for several stages."""

import pytest
from support.fit_runs import Line, Watched, fit, ones
from support.trainers import make_trainer

import treadle

pytestmark = pytest.mark.filterwarnings("ignore:.*nothing is validated")


def test_one_trainer_for_many_stages():
    class Task(Line):
        def validation_step(self, batch, batch_idx):
            self.log("val", self.w.sum())

        def test_step(self, batch, batch_idx):
            self.log("test", self.w.sum())

        def predict_step(self, batch, batch_idx):
            return self.w.item()

    task = Task()
    own = fit(task, ones(4), ones(1))
    assert own.test(task, ones(1), verbose=False) == [{"test": -4.0}]
    assert own.predict(task, ones(1)) == [-4.0]
    assert own.validate(task, ones(1), verbose=False) == [{"val": -4.0}]
    own.fit(task, ones(4), ones(1))  # all its epochs are done
    assert (own.global_step, task.w.item()) == (4, -4.0)
    own.max_epochs = 2
    own.fit(task, ones(4), ones(1))
    assert (own.global_step, own.current_epoch, task.w.item()) == (8, 2, -8.0)


def test_fit_again_after_a_run_that_ended_within_an_epoch():
    task, indices = Watched(), []
    task.on_train_batch_start = lambda batch, batch_idx: indices.append(batch_idx)
    own = fit(task, ones(5), ones(1), max_steps=3)
    own.max_steps, own.max_epochs = -1, 2
    own.fit(task, ones(5), ones(1))
    assert (own.global_step, own.current_epoch) == (13, 2)  # without a checkpoint to go on from, an epoch starts anew
    assert task.when == [(0, 5), (1, 5)]
    assert indices == [*range(3), *range(5), *range(5)]


def test_configure_callbacks():
    class Mine(treadle.Callback):
        starts = 0

        def __init__(self, name):
            self.name = name

        def on_train_start(self, trainer, task):
            self.starts += 1

    class Other(Mine):
        pass

    class Task(Line):
        def configure_callbacks(self):
            return [Mine("task's")]

    given, other = Mine("given"), Other("other")
    own = make_trainer(callbacks=[given, other])
    for _ in range(2):
        own.fit(Task(), ones(1))
    assert [callback.name for callback in own.callbacks] == ["other", "task's"]
    assert (given.starts, other.starts) == (0, 2)
