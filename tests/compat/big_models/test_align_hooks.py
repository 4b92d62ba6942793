"""Hooks of Accelerate's form. The expected values were seen with accelerate 1.15.0 on the same models."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.models import Normed
from torch import nn
from treadle.compat import hooks
from treadle.compat.big_modeling import cpu_offload
from treadle.compat.utils import modeling

INPUT = torch.arange(6.0).reshape(2, 3)
NAMES = ("linear1", "batchnorm", "linear2")


@pytest.fixture
def model() -> Normed:
    return Normed().eval()


def devices(model: nn.Module) -> dict[str, str]:
    return {name: tensor.device.type for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


@pytest.mark.parametrize("buffers", [False, True])
def test_weights_are_away_between_forwards(model: Normed, buffers: bool) -> None:
    plain = model(INPUT)
    for module in model.children():
        hooks.add_hook_to_module(module, hooks.AlignDevicesHook("cpu", offload=True, offload_buffers=buffers))
    away = {name: "meta" if buffers or name.endswith(("weight", "bias")) else "cpu" for name in devices(model)}
    assert devices(model) == away
    assert torch.equal(model(INPUT), plain)
    assert devices(model) == away
    assert modeling.has_offloaded_params(model.linear1)
    assert not modeling.has_offloaded_params(model)
    hooks.remove_hook_from_submodules(model)
    assert set(devices(model).values()) == {"cpu"}
    assert torch.equal(model(INPUT), plain)


def test_a_gradient_of_an_offloaded_weight_is_refused(model: Normed) -> None:
    hooks.attach_align_device_hook(model, "cpu", offload=True)
    with pytest.raises(ValueError, match="offloaded weight got a gradient"):
        model(INPUT).sum().backward()


def test_weights_without_values_are_named(model: Normed) -> None:
    with pytest.raises(ValueError, match=r"weights_map has no values for 'weight'"):
        hooks.attach_align_device_hook(model, "cpu", offload=True, weights_map={"batchnorm.weight": torch.ones(4)})


def test_tied_weights_stay_tied() -> None:
    for offload in (False, True):
        model = nn.ModuleDict({"embed": nn.Embedding(3, 2), "head": nn.Linear(2, 3, bias=False)})
        model["head"].weight = model["embed"].weight
        hooks.add_hook_to_module(model, hooks.AlignDevicesHook("cpu", offload=offload, place_submodules=True))
        assert model["head"].weight is model["embed"].weight
        assert model["head"].weight.is_meta == offload
        hooks.remove_hook_from_module(model)
        assert model["head"].weight is model["embed"].weight
        assert not model["head"].weight.is_meta


def name_hooks(model: nn.Module) -> dict[str, str]:
    """What is set of each hook, by module."""
    flags = ("offload", "io_same_device", "offload_buffers", "place_submodules")
    return {
        name: " ".join(flag for flag in flags if getattr(module._hf_hook, flag))
        for name, module in model.named_modules()
        if hasattr(module, "_hf_hook")
    }


def attach_map(model: nn.Module, **options: Any) -> None:
    hooks.attach_align_device_hook(model, weights_map=Normed().state_dict(), **options)


EACH, BLOCKS = hooks.attach_align_device_hook, hooks.attach_align_device_hook_on_blocks
# What attaches, its options, and what is set of the hooks.
ATTACHED: dict[str, tuple[Callable[..., None], dict[str, Any], dict[str, str]]] = {
    "weights": (EACH, {}, dict.fromkeys(NAMES, "")),
    "offload": (EACH, {"offload": True}, dict.fromkeys(NAMES, "offload")),
    "preload": (EACH, {"offload": True, "preload_module_classes": ["Normed"]}, {"": "offload place_submodules"}),
    "map": (attach_map, {"offload": True, "offload_buffers": True}, dict.fromkeys(NAMES, "offload offload_buffers")),
    "one block": (BLOCKS, {}, {"": "io_same_device place_submodules"}),
    "one block offloaded": (BLOCKS, {"offload": True}, dict.fromkeys(NAMES, "offload")),
    "blocks": (
        BLOCKS,
        {"execution_device": dict.fromkeys(NAMES, "cpu"), "offload": dict.fromkeys(NAMES, True) | {"batchnorm": False}},
        {"": "io_same_device", "linear1": "offload", "batchnorm": "place_submodules", "linear2": "offload"},
    ),
    "all by map": (BLOCKS, {"offload": {"": True}}, {"": "io_same_device", **dict.fromkeys(NAMES, "offload")}),
    "nested blocks": (
        BLOCKS,
        {"execution_device": {"": "cpu", "linear1": "cpu"}},
        {"": "io_same_device place_submodules", "linear1": "place_submodules", "batchnorm": "", "linear2": ""},
    ),
    "execution": (hooks.attach_execution_device_hook, {}, dict.fromkeys(("", *NAMES), "")),
}


@pytest.mark.parametrize("case", ATTACHED)
def test_where_hooks_are_attached(model: Normed, case: str) -> None:
    attach, options, expected = ATTACHED[case]
    plain = model(INPUT)
    attach(model, **{"execution_device": "cpu", **options})
    assert name_hooks(model) == expected
    assert torch.equal(model(INPUT), plain)
    hooks.remove_hook_from_submodules(model)
    assert set(devices(model).values()) == {"cpu"}
    assert torch.equal(model(INPUT), plain)


@pytest.mark.parametrize("offload", [cpu_offload, lambda m: hooks.attach_align_device_hook(m, "cpu", offload=True)])
def test_the_state_of_an_offloaded_model(model: Normed, offload: Callable[[nn.Module], Any]) -> None:
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    offload(model)
    assert modeling.has_offloaded_params(model.linear1)
    with modeling.align_module_device(model.linear1, "cpu"):
        assert torch.equal(model.linear1.weight, whole["linear1.weight"])
    assert model.linear1.weight.is_meta
    state = modeling.get_state_dict_offloaded_model(model)
    assert [*state] == [*whole]
    assert all(torch.equal(state[name], tensor) for name, tensor in whole.items())
    for name in ("linear1.weight", "weight"):
        part = modeling.get_state_dict_from_offload(model.linear1, name, {name: None})
        assert torch.equal(part[name], whole["linear1.weight"])


def test_parameters_come_back_from_another_device(model: Normed) -> None:
    before = model.linear1.weight
    with modeling.align_module_device(model.linear1):
        assert model.linear1.weight is before
    with pytest.raises(ValueError, match="is on the meta device"), modeling.align_module_device(model.linear1, "meta"):
        assert model.linear1.weight.is_meta
