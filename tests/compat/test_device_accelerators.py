"""Kinds of devices as objects, and devices parsed without a Trainer; expected values are those of lightning 2.6.6."""

import pytest
import torch
from support.trainers import make_trainer
from treadle.compat.accelerators import (
    Accelerator,
    CPUAccelerator,
    CUDAAccelerator,
    XLAAccelerator,
    find_usable_cuda_devices,
)
from treadle.compat.fabric.accelerators import TPUAccelerator
from treadle.compat.trainer.connectors.accelerator_connector import _AcceleratorConnector


def test_kinds_of_devices_as_objects() -> None:
    trainer = make_trainer(accelerator=CPUAccelerator(), devices=1)
    assert trainer.accelerator.device.type == "cpu"
    kinds = (CPUAccelerator, Accelerator, CUDAAccelerator, XLAAccelerator)
    assert [isinstance(trainer.accelerator, kind) for kind in kinds] == [True, True, False, False]
    assert CPUAccelerator.auto_device_count() == 1
    assert CPUAccelerator.parse_devices(2) == 2
    assert CPUAccelerator.get_parallel_devices("3") == [torch.device("cpu")] * 3
    assert "cpu_percent" in CPUAccelerator().get_device_stats("cpu")
    with pytest.raises(ValueError, match="device='cuda:0' must be of type 'cpu' for CPUAccelerator"):
        CPUAccelerator().setup_device(torch.device("cuda", 0))
    # imported by test helpers that many projects copy, to skip tests on TPUs
    assert TPUAccelerator is XLAAccelerator
    assert (XLAAccelerator.is_available(), XLAAccelerator.auto_device_count()) == (False, 0)
    with pytest.raises(ValueError, match="accelerator='tpu' is not one of"):
        make_trainer(accelerator=XLAAccelerator())
    assert find_usable_cuda_devices(0) == []
    with pytest.raises(ValueError, match="num_devices=99"):
        find_usable_cuda_devices(99)


def test_the_name_of_a_subclass_may_be_a_property_or_a_method() -> None:
    class Property(Accelerator):
        @property
        def name(self) -> str:
            return "mine"

    class Method(Accelerator):
        @staticmethod
        def name() -> str:
            return "mine"

    assert [Property(), Property().name, Method(), Method().name()] == ["mine"] * 4
    assert not isinstance(make_trainer(accelerator="cpu").accelerator, Property | Method)


def test_devices_are_parsed_without_a_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    def parse(**arguments: object) -> tuple[object, object, list[str]]:
        found = _AcceleratorConnector(**arguments)
        assert found.accelerator == found._accelerator_flag
        return found._accelerator_flag, found._devices_flag, [str(device) for device in found._parallel_devices]

    assert parse(accelerator="cpu", devices="auto") == ("cpu", 1, ["cpu"])
    assert parse(accelerator=CPUAccelerator(), devices=2) == ("cpu", 2, ["cpu", "cpu"])
    assert parse(accelerator="cpu", devices="3") == ("cpu", 3, ["cpu"] * 3)
    with pytest.raises(ValueError, match="accelerator='cup' is not one of"):
        parse(accelerator="cup")
    with pytest.raises(ValueError, match="devices=0 must be"):
        parse(accelerator="cpu", devices=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert parse(devices=-1) == ("cuda", [0, 1, 2, 3], ["cuda:0", "cuda:1", "cuda:2", "cuda:3"])
    assert parse(accelerator="gpu", devices=[1, 3]) == ("cuda", [1, 3], ["cuda:1", "cuda:3"])
    assert parse(accelerator="gpu", devices="2,") == ("cuda", [2], ["cuda:2"])
    # "auto" is what the Trainer would use: all devices only where further processes can be started
    for has_script, expected in ((True, [0, 1, 2, 3]), (False, [0])):
        monkeypatch.setattr("treadle.strategies.launch.supervisor.has_script", lambda found=has_script: found)
        assert parse()[1] == expected
