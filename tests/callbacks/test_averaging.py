"""Averages of weights: means, functions of one's own, buffers, dtypes and ties."""

import copy

import pytest
import torch
from support.averaged_runs import Task, by_hand, fit, flat
from torch import nn
from treadle.callbacks import EMAWeightAveraging, LambdaCallback, ModelCheckpoint, WeightAveraging, averaged_weights


def test_the_mean_and_functions_of_ones_own(tmp_path):
    tasks = [
        fit(tmp_path, WeightAveraging(**arguments))[1]
        for arguments in (
            {},
            {"avg_fn": lambda averaged, current, count: averaged + (current - averaged) / (count + 1)},
            {"multi_avg_fn": lambda many, current, count: torch._foreach_lerp_(many, current, 1 / (int(count) + 1))},
        )
    ]
    mean = torch.stack(tasks[0].trained).mean(0)
    assert all(torch.allclose(flat(task), mean, atol=1e-6) for task in tasks)


@pytest.mark.parametrize("buffers", [True, False], ids=["buffers", "parameters"])
def test_buffers(tmp_path, buffers):
    seen = []
    notes = LambdaCallback(on_train_batch_end=lambda trainer, task, *_: seen.append(copy.deepcopy(task.net[1])))
    task = fit(tmp_path, EMAWeightAveraging(decay=0.8, use_buffers=buffers), notes)[1]
    means = [norm.running_mean for norm in seen]
    expected = by_hand(means, 0.8) if buffers else means[-1]
    assert torch.allclose(task.net[1].running_mean, expected)
    assert task.net[1].num_batches_tracked == seen[-1].num_batches_tracked  # a count isn't averaged


def test_averages_of_half_precision_move(tmp_path):
    averaging = EMAWeightAveraging(decay=0.999)
    task = fit(tmp_path, averaging, precision="bf16-true", max_epochs=6)[1]
    expected = by_hand([value.float() for value in task.trained], 0.999)
    assert torch.equal(flat(task), expected.bfloat16())
    assert not torch.equal(flat(task), task.trained[0])  # what an average in bfloat16 would still be


def test_tied_weights_are_averaged_under_each_of_their_names(tmp_path):
    class Tied(Task):
        def __init__(self):
            super().__init__()
            self.again = nn.Linear(2, 3)
            self.again.weight = self.net[0].weight
            self.norm = self.net[1]  # a whole part, with buffers

    made, task = fit(tmp_path, EMAWeightAveraging(decay=0.8), ModelCheckpoint(tmp_path / "c"), task=Tied())
    path = made.checkpoint_callback.best_model_path
    other = Tied()
    other.load_state_dict(averaged_weights(path))
    assert torch.allclose(flat(other), by_hand(task.trained, 0.8), atol=1e-6)
    assert torch.equal(other.norm.running_mean, task.norm.running_mean)
    resumed = fit(tmp_path, EMAWeightAveraging(decay=0.8), task=Tied(), ckpt_path=path, max_epochs=3)[1]
    whole_run = fit(tmp_path, EMAWeightAveraging(decay=0.8), task=Tied(), max_epochs=3)[1]
    assert torch.equal(flat(resumed), flat(whole_run))
