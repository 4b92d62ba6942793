"""Suggestions of names, and types in words."""

import pytest
from treadle.common.messages import name_type, nearest


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


@pytest.mark.parametrize(
    ("value", "words"), [(1, "an int"), (1.0, "a float"), (None, "None"), ({}, "a dict"), (object(), "an object")]
)
def test_a_type_has_its_article(value, words):
    assert name_type(value) == words
