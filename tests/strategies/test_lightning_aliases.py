"""What a strategy reports in Lightning's names before a run, and which of them it refuses to a subclass."""

import warnings

import pytest
import torch
from support.trainers import make_trainer
from treadle.compat.fabric import Fabric
from treadle.compat.plugins import MixedPrecision
from treadle.strategies import DDP, SingleDevice

import treadle


def test_before_and_in_a_run():
    for device in ("cpu", torch.device("cuda", 3), "meta"):
        assert SingleDevice(device).root_device == torch.device(device)
    for strategy in (SingleDevice(), DDP()):
        assert strategy.root_device == torch.device("cpu")
        assert (strategy.world_size, strategy.global_rank, strategy.local_rank) == (1, 0, 0)
        assert strategy.is_global_zero
        assert treadle.Accelerator(strategy=strategy, cpu=True).world is strategy.world


@pytest.mark.parametrize("make", [make_trainer, Fabric])
@pytest.mark.parametrize(("base", "name", "text"), [
    (SingleDevice, "optimizer_step", "override the task's method of this name, or do this in your own loop"),
    (SingleDevice, "save_checkpoint", "change the checkpoint in on_save_checkpoint and on_load_checkpoint of the task"),
    (SingleDevice, "load_model_state_dict", "set strict_loading=False in the task, or override its load_state_dict"),
    (SingleDevice, "setup_optimizers", "change the optimizers before they are prepared"),
    (MixedPrecision, "forward_context", r"override context\(device\)"),
    (MixedPrecision, "convert_module", r"override cast_module\(module\)"),
])  # fmt: skip
def test_methods_of_lightnings_plugins_without_which_a_run_would_differ(make, base, name, text):
    kind = type("Own", (base,), {name: lambda self, *args: None})
    flags = {"strategy": kind("cpu")} if base is SingleDevice else {"plugins": kind("bf16-mixed", "cpu")}
    with pytest.raises(ValueError, match=rf"Own\.{name} overrides a method of Lightning's .*{text}"):
        make(accelerator="cpu", devices=1, **flags)


def test_other_methods_of_lightnings_plugins_are_said():
    kind = type("Own", (SingleDevice,), {"model_to_device": lambda self: None, "helper": lambda self: None})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Fabric(accelerator="cpu", devices=1, strategy=kind("cpu"))
    assert [str(warning.message) for warning in caught if "Own." in str(warning.message)] == [
        "Own.model_to_device is never called. Override a method of treadle.strategies.Strategy."
    ]
