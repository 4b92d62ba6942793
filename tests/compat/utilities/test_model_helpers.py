"""What a class overrides."""

import pytest
from treadle.compat.demos.boring_classes import BoringModel
from treadle.compat.utilities.model_helpers import is_overridden


def test_what_a_class_overrides() -> None:
    assert is_overridden("training_step", BoringModel())
    assert not is_overridden("on_fit_start", BoringModel())
    assert not is_overridden("setup", None)
    with pytest.raises(ValueError, match="is_overridden got an object"):
        is_overridden("setup", object())
