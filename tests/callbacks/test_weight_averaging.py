"""Averaged weights, against loops by hand; resumed, sharded, swapped, saved."""

import pickle

import pytest
import torch
from support.averaged_runs import Task, by_hand, fit, flat
from support.callback_runs import loader, trainer
from support.failing_runs import Fails
from support.models import SaveIn
from support.processes import run
from treadle.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
    averaged_weights,
)

import treadle


def test_an_exponential_average_as_by_hand(tmp_path):
    averaging = pickle.loads(pickle.dumps(EMAWeightAveraging(decay=0.8)))  # as where a launch spawns processes
    _, task = fit(tmp_path, averaging)
    assert torch.allclose(task.validated[0], by_hand(task.trained[:4], 0.8), atol=1e-6)
    assert torch.allclose(flat(task), by_hand(task.trained, 0.8), atol=1e-6)
    plain = Task()
    fit(tmp_path, task=plain)
    assert torch.equal(torch.stack(plain.trained), torch.stack(task.trained))  # training itself is unchanged


def test_when_to_average(tmp_path):
    task = fit(tmp_path, EMAWeightAveraging(decay=0.5, update_every_n_steps=2, update_starting_at_step=3))[1]
    assert torch.allclose(flat(task), by_hand([task.trained[n] for n in (4, 6)], 0.5), atol=1e-6)
    task = fit(tmp_path, EMAWeightAveraging(decay=0.5, update_starting_at_epoch=1))[1]
    assert torch.equal(task.validated[0], task.trained[3])  # no average yet: the weights themselves
    assert torch.allclose(flat(task), by_hand(task.trained[4:], 0.5), atol=1e-6)
    task = fit(tmp_path, EMAWeightAveraging(decay=0.5, update_every_n_steps=0))[1]
    assert torch.allclose(flat(task), by_hand([task.trained[3], task.trained[7]], 0.5), atol=1e-6)
    task = fit(tmp_path, EMAWeightAveraging(update_starting_at_step=100))[1]
    assert torch.equal(flat(task), task.trained[-1])


def test_a_checkpoint_has_the_weights_and_the_averages(tmp_path):
    made, task = fit(tmp_path, EMAWeightAveraging(decay=0.8), ModelCheckpoint(tmp_path / "c"))
    path = made.checkpoint_callback.best_model_path
    assert torch.equal(flat(Task.load_from_checkpoint(path)), task.trained[-1])
    other = Task()
    other.load_state_dict(averaged_weights(path))
    assert torch.equal(flat(other), flat(task))
    assert torch.equal(other.net[1].running_var, task.net[1].running_var)
    light = tmp_path / "light"
    made.save_checkpoint(light, weights_only=True)
    assert torch.equal(averaged_weights(light)["net.0.weight"], task.net[0].weight)
    fresh = Task()
    again = trainer(tmp_path, EMAWeightAveraging())
    again.test(fresh, loader(2), ckpt_path=path, verbose=False)
    assert torch.equal(fresh.tested[0], flat(task))
    assert torch.equal(flat(fresh), task.trained[-1])
    trainer(tmp_path).test(fresh, loader(2), ckpt_path=path, verbose=False)
    assert torch.equal(fresh.tested[-1], task.trained[-1])
    fit(tmp_path, ModelCheckpoint(tmp_path / "d"), max_epochs=1)
    with pytest.raises(ValueError, match="no averaged weights"):
        averaged_weights(next((tmp_path / "d").iterdir()))


@pytest.mark.parametrize("step", [3, *(pytest.param(step, marks=pytest.mark.exhaustive) for step in (4, 6))])
def test_a_run_that_goes_on_is_the_one_that_never_stopped(tmp_path, step):
    saver = ModelCheckpoint(tmp_path / "c", every_n_train_steps=step, save_top_k=-1)
    _, whole_run = fit(tmp_path, EMAWeightAveraging(decay=0.8), saver, max_epochs=3)
    path = next(p for p in (tmp_path / "c").iterdir() if p.name.endswith(f"step={step}.ckpt"))
    _, task = fit(tmp_path, EMAWeightAveraging(decay=0.8), ckpt_path=path, max_epochs=3)
    assert torch.equal(flat(task), flat(whole_run))
    assert torch.equal(task.net[1].running_mean, whole_run.net[1].running_mean)
    assert torch.equal(task.validated[-1], whole_run.validated[-1])


def test_it_is_taken_out_when_validation_fails_and_what_is_saved_goes_on(tmp_path):
    whole_run = fit(tmp_path, EMAWeightAveraging(decay=0.8))[1]
    task, saver = Task(fails=4), OnExceptionCheckpoint(tmp_path / "c")
    with pytest.raises(RuntimeError, match="planned"):
        fit(tmp_path, EMAWeightAveraging(decay=0.8), saver, task=task)
    assert torch.equal(flat(task), task.trained[-1])
    resumed = fit(tmp_path, EMAWeightAveraging(decay=0.8), ckpt_path=saver.ckpt_path)[1]
    assert torch.equal(resumed.validated[0], whole_run.validated[0])
    assert torch.equal(flat(resumed), flat(whole_run))


def test_what_is_refused(tmp_path):
    with pytest.raises(ValueError, match="list EMAWeightAveraging before the callback that saves"):
        fit(tmp_path, EMAWeightAveraging(), SaveIn("on_validation_epoch_end", 4, tmp_path / "x"))
    with pytest.raises(ValueError, match=r"2 callbacks that average .* \(EMAWeightAveraging, Stoch"):
        fit(tmp_path, EMAWeightAveraging(), StochasticWeightAveraging(0.1))
    with pytest.raises(TypeError, match=r"no argument 'avg_fun'.*avg_fn"):
        WeightAveraging(avg_fun=None)
    with pytest.raises(TypeError, match="'avg_fn'"):
        EMAWeightAveraging(avg_fn=print)
    with pytest.raises(ValueError, match="at most 1"):
        EMAWeightAveraging(decay=1.5)


# -- several processes ---------------------------------------------------------------------------------------------


def in_a_world(root, strategy):
    """What a run comes to, and then the one that is resumed from its third step."""

    def train(*callbacks, ckpt_path=None):
        treadle.seed_everything(1)
        task, callbacks = Task(), [EMAWeightAveraging(decay=0.8), *callbacks]
        trainer(root, *callbacks, strategy=strategy).fit(task, loader(12, 3), loader(2), ckpt_path=ckpt_path)
        return flat(task), task

    saver = ModelCheckpoint(root, "{step}", every_n_train_steps=3, save_top_k=-1)
    average, task = train(saver)
    return average, task.trained, task.validated[-1], train(ckpt_path=root / "step=3.ckpt")[0]


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.exhaustive)])
def test_two_processes_average_what_each_holds(tmp_path, strategy):
    (average, trained, validated, resumed), second = run(in_a_world, 2, tmp_path, strategy)
    assert torch.equal(average, second[0])
    assert torch.allclose(average, by_hand(trained, 0.8), atol=1e-6)
    assert torch.allclose(validated, average, atol=1e-6)
    assert torch.equal(resumed, average)
    path = tmp_path / "step=3.ckpt"
    alone = Task()
    alone.load_state_dict(averaged_weights(path))
    assert torch.allclose(flat(alone), by_hand(trained[:3], 0.8), atol=1e-6)
    # Alone, without sharding: the same averages to begin with, then its own steps.
    own = Task()
    trainer(tmp_path, EMAWeightAveraging(decay=0.8)).fit(own, loader(12, 6), loader(2), ckpt_path=path)
    assert torch.allclose(flat(own), by_hand([*trained[:3], *own.trained], 0.8), atol=1e-6)


def test_an_error_just_before_it_was_told_of_a_step(tmp_path):
    whole_run = fit(tmp_path, EMAWeightAveraging(decay=0.8))[1]
    saver = OnExceptionCheckpoint(tmp_path / "c")
    with pytest.raises(RuntimeError, match="planned"):
        fit(tmp_path, Fails("batch_end", 3), EMAWeightAveraging(decay=0.8), saver)
    resumed = fit(tmp_path, EMAWeightAveraging(decay=0.8), ckpt_path=saver.ckpt_path)[1]
    assert torch.equal(flat(resumed), flat(whole_run))
