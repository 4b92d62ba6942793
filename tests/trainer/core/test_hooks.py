"""The order of hooks."""

import pytest
from support.fit_runs import Line, Recorder, Staged, fit, ones

import treadle

pytestmark = pytest.mark.filterwarnings("ignore:.*nothing is validated")


def test_hook_order_of_one_step():
    told = []
    fit(Staged(), ones(2), callbacks=Recorder(None, told), accumulate_grad_batches=2)
    begin = ["setup", "on_fit_start", "on_train_start", "on_train_epoch_start"]
    batch = ["on_train_batch_start", "on_before_backward", "on_after_backward"]
    step = ["on_before_optimizer_step", "on_before_zero_grad", "on_train_batch_end", "on_step_end"]
    end = ["on_train_epoch_end", "on_train_end", "on_fit_end", "teardown"]
    assert told == [*begin, *batch, "on_train_batch_end", *batch, *step, *end]


@pytest.mark.parametrize("clip", [None, 10.0])
def test_hooks_before_the_step_see_gradients_without_the_loss_scale(clip):
    task = Line()
    fit(task, ones(4), precision="16-mixed", accumulate_grad_batches=2, gradient_clip_val=clip)
    assert task.trainer.scaler.get_scale() > 1
    assert task.gradients == [1.0, 1.0]


def test_the_loop_is_described_with_every_hook():
    text = treadle.trainer.loop.fit_loop.__doc__
    assert [name for name in treadle.callbacks.callback.HOOKS if name not in text] == []
