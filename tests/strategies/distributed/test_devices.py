"""Devices as flags name them."""

import pytest
import torch
from support.launches import WHOLE
from treadle.strategies import LaunchEnvironment, open_world

pytestmark = pytest.mark.usefixtures("no_launcher")


@pytest.mark.guarantee
@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("RANK", "abc", "must be an integer"),
        ("RANK", "4", "from 0 to 3"),
        ("WORLD_SIZE", "0", "at least 1"),
        ("WORLD_SIZE", "", "must be an integer"),
        ("LOCAL_RANK", "2", "below LOCAL_WORLD_SIZE=2"),
        ("LOCAL_WORLD_SIZE", "9", "from 1 to 4"),
        ("GROUP_RANK", "x", "must be an integer"),
    ],
)
def test_bad_numbers(name, value, says):
    with pytest.raises(ValueError, match=f"{name}.*{says}"):
        LaunchEnvironment.read({**WHOLE, name: value})


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"accelerator": "gpuu"}, "Did you mean 'gpu'"),
        ({"accelerator": None}, "accelerator=None"),
        ({"devices": ""}, "at least 1"),
        ({"devices": []}, "at least one device"),
        ({"devices": [-1]}, r"devices=\[-1\]"),
        ({"devices": [True]}, r"devices=\[True\]"),
    ],
)
def test_wrong_flags(options, says):
    with pytest.raises(ValueError, match=says):
        open_world(**{"accelerator": "cpu", **options})


@pytest.mark.parametrize("devices", [True, 1.5, None])
def test_devices_of_a_wrong_type(devices):
    with pytest.raises(TypeError, match="devices="):
        open_world("cpu", devices)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_device_that_is_not_there():
    with pytest.raises(ValueError, match="no CUDA device"):
        open_world("cuda")
