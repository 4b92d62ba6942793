"""The one "did you mean"."""

import pytest
from treadle.common.messages import nearest


@pytest.mark.parametrize(
    ("name", "valid", "hint"),
    [
        ("Trianer", ["trainer", "Trainer", "tuner"], " Did you mean 'Trainer'?"),
        ("trianer", ["trainer", "Trainer", "tuner"], " Did you mean 'trainer'?"),
        ("ADAMW", ["Adam", "AdamW", "SGD"], " Did you mean 'AdamW'?"),
        ("max_epoch", ["max_epochs", "min_epochs"], " Did you mean 'max_epochs'?"),
        ("x", ["max_epochs"], ""),
        ("", [], ""),
    ],
)
def test_the_nearest_name(name, valid, hint):
    assert nearest(name, valid) == hint
