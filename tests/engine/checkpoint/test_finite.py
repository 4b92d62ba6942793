"""What is not finite is in no checkpoint: weights and optimizer states, of a loop of one's own too."""

import math

import pytest
import torch
from support.processes import run
from support.saved_nets import prepared
from torch import nn


def spoil(tensor, value):
    with torch.no_grad():
        getattr(tensor, "_local_tensor", tensor).flatten()[0] = value


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("what", ["weight", "exp_avg_sq of weight"])
def test_an_own_loop_saves_nothing_that_is_not_finite(tmp_path, what, value):
    accelerator, net, optimizer = prepared(lambda: nn.Linear(4, 2))
    accelerator.save_state(tmp_path / "good")
    spoil(net.weight if what == "weight" else optimizer.state[net.weight]["exp_avg_sq"], value)
    with pytest.raises(ValueError, match=f"^{what} contains? NaN or infinity after optimizer step 1, so .*bad "):
        accelerator.save_state(tmp_path / "bad")
    assert [path.name for path in tmp_path.iterdir()] == ["good"]
    accelerator.load_state(tmp_path / "good")
    assert torch.isfinite(net.weight).all()
    assert torch.isfinite(optimizer.state[net.weight]["exp_avg_sq"]).all()


class Threshold(nn.Sequential):
    """Has a buffer that is not computed yet, and running statistics."""

    def __init__(self):
        super().__init__(nn.Linear(4, 2), nn.BatchNorm1d(2))
        self.register_buffer("threshold", torch.tensor(math.nan))


def test_a_buffer_that_is_nan_before_the_run_is_saved(tmp_path):
    accelerator, net, _ = prepared(Threshold)
    accelerator.save_state(tmp_path / "good")
    spoil(net.threshold, 0.5)
    accelerator.load_state(tmp_path / "good")
    assert net.threshold.isnan()
    spoil(net[1].running_mean, math.nan)
    with pytest.raises(ValueError, match=r"^1\.running_mean contains NaN or infinity after optimizer step 1, so "):
        accelerator.save_state(tmp_path / "bad")


def test_weights_alone_are_saved_without_the_optimizer(tmp_path):
    accelerator, net, optimizer = prepared(lambda: nn.Linear(4, 2))
    spoil(optimizer.state[net.weight]["exp_avg_sq"], math.inf)
    accelerator.save_state(tmp_path / "weights", weights_only=True)
    assert [path.name for path in tmp_path.iterdir()] == ["weights"]


def save_on_two(root, strategy):
    accelerator, model, optimizer = prepared(lambda: nn.Linear(4, 2), strategy=strategy)
    if accelerator.process_index == 1:
        spoil(optimizer.state[accelerator.unwrap_model(model).weight]["exp_avg"], math.nan)
    with pytest.raises((ValueError, RuntimeError), match="exp_avg of weight contains NaN or infinity"):
        accelerator.save_state(root / "bad")
    return (root / "bad").exists()


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.exhaustive)])
def test_one_rank_is_enough(tmp_path, strategy):
    assert run(save_on_two, 2, tmp_path, strategy) == [False, False]
