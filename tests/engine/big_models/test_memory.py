"""The memory that a plan may use."""

import pytest
from support.language_model import LanguageModel
from treadle.engine.big_models import get_max_memory, infer_auto_device_map


def test_devices_that_are_not_there_are_an_error():
    free = get_max_memory()
    assert free["cpu"] > 2**20
    for device in (99, "cuda:99", "meta:x", "gpu"):
        with pytest.raises(ValueError, match=str(device)):
            infer_auto_device_map(LanguageModel(), {device: "1GB"})
    assert list(get_max_memory({"disk": 1, "cpu": 2, "meta:1": 3, "meta:0": 4})) == ["meta:1", "meta:0", "cpu", "disk"]
