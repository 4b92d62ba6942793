"""Lightning's queries about a module: norms of gradients, what a class overrides, the parameters of a hook."""

import pytest
import torch
from support.processes import run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from treadle.compat.demos.boring_classes import BoringModel
from treadle.compat.inspection import grad_norm
from treadle.compat.utilities.model_helpers import is_overridden
from treadle.compat.utilities.signature_utils import is_param_in_hook_signature


def measure(sharded: bool, order: float | str) -> dict[str, float]:
    """The norms of a model whose first layer is sharded, if any."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    if sharded:
        torch.distributed.init_process_group("gloo")
        fully_shard(net[0], mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    net(torch.arange(8.0).view(2, 4) / 8).pow(2).sum().backward()
    norms = grad_norm(net, order)
    assert all(type(norm) is torch.Tensor for norm in norms.values())
    return {name: norm.item() for name, norm in norms.items()}


@pytest.mark.long
@pytest.mark.parametrize("order", [2, "inf"])
def test_sharded_gradients_beside_whole_ones(order: float | str) -> None:
    expected = measure(False, order)
    assert len(expected) == 5
    for norms in run(measure, 2, True, order):
        assert norms == pytest.approx(expected)


@pytest.mark.parametrize("order", [0, -1, "nan"])
def test_an_order_that_is_not_above_zero(order: float | str) -> None:
    with pytest.raises(ValueError, match=f"norm_type={order!r} must be a number above 0"):
        grad_norm(nn.Linear(1, 1), order)


def test_what_a_class_overrides() -> None:
    assert is_overridden("training_step", BoringModel())
    assert not is_overridden("on_fit_start", BoringModel())
    assert not is_overridden("setup", None)
    with pytest.raises(ValueError, match="is_overridden got an object"):
        is_overridden("setup", object())


def test_the_parameters_of_a_hook() -> None:
    assert is_param_in_hook_signature(BoringModel().training_step, "batch")
    assert not is_param_in_hook_signature(BoringModel().training_step, "dataloader_idx")
    assert is_param_in_hook_signature(BoringModel().training_step, "other", min_args=2)
