"""Suggestions of names, types in words, and the place of a warning."""

from concurrent.futures import ThreadPoolExecutor
from inspect import currentframe

import pytest
import torch
from treadle.common.messages import format_count, join_words, name_type, named_ranks, nearest, warn


@pytest.mark.parametrize(
    ("name", "valid", "hint"),
    [
        ("Trianer", ["trainer", "Trainer", "tuner"], " Did you mean 'Trainer'?"),
        ("trianer", ["trainer", "Trainer", "tuner"], " Did you mean 'trainer'?"),
        ("ADAMW", ["Adam", "AdamW", "SGD"], " Did you mean 'AdamW'?"),
        ("max_epoch", ["max_epochs", "min_epochs"], " Did you mean 'max_epochs'?"),
        ("epochs", ["min_epochs", "max_epochs"], " Did you mean 'min_epochs'?"),
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


@pytest.mark.parametrize(
    ("number", "noun", "words"),
    [
        (1, "process", "1 process"),
        (0, "batch", "0 batches"),
        (1024, "optimizer step", "1,024 optimizer steps"),
    ],
)
def test_a_count_agrees_with_its_noun(number, noun, words):
    assert format_count(number, noun) == words


def test_words_are_joined_as_in_a_sentence():
    assert [join_words(list(words)) for words in ("a", "ab", "abc")] == ["a", "a or b", "a, b or c"]
    assert join_words(["a", "b", "c"], "and") == "a, b and c"


def test_ranks_in_a_row_are_a_span():
    assert [named_ranks(ranks) for ranks in ([3], [0, 1], [0, 1, 2, 5])] == ["rank 3", "ranks 0-1", "ranks 0-2, 5"]


# As a function of the package would: its frames are not the user's.
warn_in_treadle = eval('lambda *_: warn("slow")', {"__name__": "treadle.trainer", "warn": warn})


def test_a_warning_is_at_the_line_of_the_users_program():
    module = torch.nn.Identity()
    module.register_forward_hook(warn_in_treadle)
    line = currentframe().f_lineno + 2
    with pytest.warns(UserWarning, match="slow") as caught:
        module(torch.zeros(1))
    assert (caught[0].filename, caught[0].lineno) == (__file__, line)


def test_a_thread_of_the_framework_warns_too():
    with pytest.warns(UserWarning, match="slow") as caught, ThreadPoolExecutor(1) as pool:
        pool.submit(warn_in_treadle).result()
    assert caught[0].filename == "<string>"  # no line of the user's led to it
