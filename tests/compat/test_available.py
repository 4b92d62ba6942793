"""Which packages and devices are there."""

import pytest

from treadle import utils as u


def test_what_is_there():
    assert u.is_torch_version(">=", "2.11")
    assert not u.is_torch_version("<", "2.11")
    assert u.compare_versions("torch", ">", "1.0")
    assert u.is_tensorboard_available()
    assert not u.is_tpu_available()
    with pytest.raises(ValueError, match="operation='=>'"):
        u.is_torch_version("=>", "2.6")
