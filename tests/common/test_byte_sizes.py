"""Sizes as users write them, and the errors for what is not a size."""

import pytest
from treadle.common.byte_sizes import parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [(0, 0), (12, 12), ("7", 7), ("1.5 KiB", 1536), (" 2GB ", 2 * 10**9), ("1PB", 10**15), ("10GiB", 10 * 2**30)],
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", [-1, True, None, 1.5, "x", "GB", "-1GB", "2tb", "1 KB more"])
def test_what_is_not_a_size(text):
    with pytest.raises(ValueError, match=r"max_memory=.* is not a size\. Pass"):
        parse_bytes(text, "max_memory")


def test_a_lowercase_b_is_a_byte_where_that_is_allowed():
    assert parse_bytes("2gb", lowercase_b=True) == 2 * 10**9
    with pytest.raises(ValueError, match="size='2gx'"):
        parse_bytes("2gx", lowercase_b=True)


@pytest.mark.parametrize("text", [0, "0", "0.4"])
def test_a_size_below_the_minimum(text):
    with pytest.raises(ValueError, match=r"max_shard_size=.* is not a size of at least 1 B\."):
        parse_bytes(text, "max_shard_size", minimum=1)
