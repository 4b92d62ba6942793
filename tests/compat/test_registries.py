"""Lightning's registries, to which programs add device types and strategies when they are imported."""

from unittest import mock

import pytest
import torch
from support.trainers import make_trainer
from treadle.compat.accelerators import Accelerator, AcceleratorRegistry, CPUAccelerator
from treadle.compat.demos.boring_classes import BoringModel
from treadle.compat.strategies import DDPStrategy, SingleDeviceStrategy, StrategyRegistry
from treadle.strategies import registry

import treadle


@pytest.fixture(autouse=True)
def registered_before(monkeypatch):
    monkeypatch.setattr(registry, "_FACTORIES", dict(registry._FACTORIES))
    with mock.patch.dict(AcceleratorRegistry), mock.patch.dict(StrategyRegistry):
        yield


def test_device_types():
    assert AcceleratorRegistry.available_accelerators() == {"cpu", "cuda", "mps"}
    assert "cpu" in [name for name, entry in AcceleratorRegistry.items() if entry["accelerator"].is_available()]
    assert isinstance(AcceleratorRegistry.get("cpu"), CPUAccelerator)
    assert AcceleratorRegistry.get("xpu", "none") == "none"
    with pytest.raises(KeyError, match=r"'xpu' is not a registered accelerator\. Registered are: cpu, cuda, mps"):
        AcceleratorRegistry.get("xpu")

    @AcceleratorRegistry.register("xpu", description="Intel's GPUs")
    class XPU(Accelerator):
        accelerator_name = "xpu"

    assert AcceleratorRegistry["xpu"]["accelerator"] is XPU
    with pytest.raises(ValueError, match=r"accelerator 'xpu' is already registered\. Pass override=True"):
        AcceleratorRegistry.register("xpu", XPU)
    AcceleratorRegistry.register("xpu", accelerator=XPU, override=True)
    with pytest.raises(ValueError, match="accelerator='xpu' is not one of"):
        make_trainer(accelerator="xpu")


def test_strategies():
    class Own(SingleDeviceStrategy):
        pass

    assert StrategyRegistry.register("own", Own, device=torch.device("cpu")) is Own
    StrategyRegistry.register("ddp-no-buffers", strategy=DDPStrategy, broadcast_buffers=False)
    assert {"own", "ddp-no-buffers", "ddp"} <= set(StrategyRegistry.available_strategies())
    trainer = make_trainer(strategy="own", max_steps=2)
    trainer.fit(BoringModel())
    assert isinstance(trainer.strategy, Own)
    assert isinstance(treadle.Accelerator(cpu=True, strategy="ddp-no-buffers").strategy, DDPStrategy)
    StrategyRegistry.register("own", DDPStrategy, override=True)
    assert isinstance(make_trainer(strategy="own").strategy, DDPStrategy)
    with pytest.raises(ValueError, match="a strategy named 'ddp' is already registered"):
        StrategyRegistry.register("ddp", DDPStrategy, override=True)
