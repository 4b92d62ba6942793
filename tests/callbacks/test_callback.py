"""The base class: hooks, their order, and states by name; and callbacks made of functions."""

import inspect
import os

import pytest
from support.callback_runs import Rows, Tiny, fit
from support.models import Count
from treadle.callbacks import HOOKS, BatchSizeFinder, Callback, LambdaCallback, LearningRateFinder, ModelCheckpoint


def test_order(tmp_path):
    seen, callbacks = [], []

    class Says(Tiny):
        def on_train_epoch_end(self):
            seen.append("task")

    for name, after_task in (("late", 2), ("a", 0), ("soon", 1), ("b", 0)):
        callbacks.append(LambdaCallback(on_train_epoch_end=lambda *_, name=name: seen.append(name)))
        callbacks[-1].after_task = after_task
    fit(tmp_path, *callbacks, task=Says(), max_epochs=1)
    assert seen == ["a", "b", "task", "soon", "late"]


def test_a_misspelled_argument_of_a_built_in_callback():
    class Saver(ModelCheckpoint):
        def __init__(self, **options):
            super().__init__(**options)

    for kind in (ModelCheckpoint, Saver):
        message = rf"{kind.__name__}\(\) has no argument 'save_topk'\. Did you mean 'save_top_k'\?"
        with pytest.raises(TypeError, match=message):
            kind(save_topk=1)
    assert "save_top_k" in inspect.signature(ModelCheckpoint).parameters
    assert not hasattr(Saver.__init__, "__wrapped__")  # a user's class stays as it was written


class Stateful(Count, Callback):
    def __init__(self, name=None):
        super().__init__()
        self.name = name

    @property
    def state_key(self):
        return self.name or super().state_key

    def on_step_end(self, trainer, pl_module):
        self.value += 1


def test_states_by_name(tmp_path):
    path = tmp_path / "x.ckpt"
    made = fit(tmp_path, Stateful("one"), Stateful(), max_epochs=1)
    made.save_checkpoint(path)
    one, other = Stateful("one"), Stateful()
    fit(tmp_path, other, one, ckpt_path=path)
    assert (one.value, other.value) == (10, 10)


def test_loggers_are_told_of_checkpoints(tmp_path):
    rows = Rows()
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1)
    fit(tmp_path, saver, logger=rows, max_epochs=2)
    assert [os.path.basename(path) for path in rows.saved] == ["epoch=0-step=4.ckpt", "epoch=1-step=8.ckpt"]


def test_the_list_of_hooks():
    named = {name for name in vars(Callback) if name.startswith("on_")} | {"setup", "teardown"}
    assert set(HOOKS) == named
    assert all(getattr(Callback, name).__doc__ for name in HOOKS)


def test_the_result_of_no_search_is_none():
    for finder in (LearningRateFinder(), BatchSizeFinder()):
        finder.load_state_dict(finder.state_dict())
        assert finder.state_dict() == {}


def test_lightnings_helper_for_the_key_of_a_state():
    class Own(Callback):
        @property
        def state_key(self):
            return self._generate_state_key(monitor="loss", every=2)

    assert Own().state_key.endswith("Own{'monitor': 'loss', 'every': 2}")
