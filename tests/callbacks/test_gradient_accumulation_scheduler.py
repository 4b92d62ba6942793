"""Accumulation that changes from epoch to epoch."""

import pytest
import torch
from support.callback_runs import Tiny, fit
from treadle.callbacks import GradientAccumulationScheduler, LambdaCallback, ModelCheckpoint

SCHEDULE = {1: 2, 3: 4}


def test_steps_of_each_epoch_and_in_all(tmp_path):
    epochs, estimated = [], []
    notes = LambdaCallback(
        on_fit_start=lambda trainer, _: estimated.append(trainer.estimated_stepping_batches),
        on_before_optimizer_step=lambda trainer, *_: epochs.append(trainer.current_epoch),
    )
    made = fit(tmp_path, GradientAccumulationScheduler(SCHEDULE), notes, max_epochs=4)
    assert [epochs.count(epoch) for epoch in range(4)] == [5, 3, 3, 2]
    assert estimated == [made.global_step] == [13]
    assert made.estimated_stepping_batches == 13
    assert made.accumulate_grad_batches == 1


def test_weights_as_by_hand(tmp_path):
    task = Tiny()
    fit(tmp_path, GradientAccumulationScheduler({1: 5}), task=task)
    by_hand = Tiny()
    optimizer = by_hand.configure_optimizers()
    inputs = torch.randn(10, 2, generator=torch.Generator().manual_seed(4))
    for part in (*inputs.split(2), inputs):
        optimizer.zero_grad()
        by_hand.net(part).pow(2).mean().backward()
        optimizer.step()
    assert torch.allclose(task.net.weight, by_hand.net.weight, atol=1e-6)


def test_a_run_that_goes_on_is_the_one_that_never_stopped(tmp_path, recwarn):
    whole, saver = Tiny(), ModelCheckpoint(tmp_path / "c", save_top_k=-1, every_n_train_steps=1)
    fit(tmp_path, GradientAccumulationScheduler(SCHEDULE), saver, task=whole, max_epochs=4)
    for path in sorted((tmp_path / "c").iterdir()):
        task = Tiny()
        made = fit(tmp_path, GradientAccumulationScheduler(SCHEDULE), task=task, max_epochs=4, ckpt_path=path)
        assert made.global_step == 13
        assert torch.equal(task.net.weight, whole.net.weight)
    assert not [w for w in recwarn if "global batch" in str(w.message)]


def test_what_is_refused(tmp_path):
    with pytest.raises(ValueError, match="Remove one"):
        fit(tmp_path, GradientAccumulationScheduler({0: 2}), accumulate_grad_batches=2)
    for wrong, error in (({}, ValueError), ([2], TypeError), ({-1: 2}, ValueError), ({0: 0}, ValueError)):
        with pytest.raises(error, match="scheduling"):
            GradientAccumulationScheduler(wrong)
