"""Accelerate's helpers that read and set the environment; expected values are those of accelerate 1.15."""

import os

import pytest
from torch import nn
from treadle.utils.environment import parse_flag_from_env, str_to_bool
from treadle.utils.launch import PrepareForLaunch
from treadle.utils.memory import should_reduce_batch_size

from treadle.utils import other


def test_reading_the_environment(monkeypatch):
    monkeypatch.setenv("ACCELERATE_A", "yes")
    assert (str_to_bool("On"), str_to_bool("f", to_bool=True)) == (1, False)
    assert (parse_flag_from_env("ACCELERATE_A"), parse_flag_from_env("NOT_SET", True)) == (True, True)
    with pytest.raises(ValueError, match="'maybe' must be one of y, yes"):
        str_to_bool("maybe")


def test_small_helpers():
    assert [other.convert_bytes(n) for n in (12, 2048, 5 * 1024**3)] == ["12 bytes", "2.0 KB", "5.0 GB"]
    assert other.recursive_getattr(nn.ModuleDict({"head": nn.Linear(4, 1)}), "head.weight").shape == (1, 4)
    assert not other.is_port_in_use(other.get_free_port())
    assert should_reduce_batch_size(RuntimeError("CUDA out of memory. Tried to allocate"))
    assert not should_reduce_batch_size(RuntimeError("shapes differ"))


def test_a_launched_function_knows_its_rank(monkeypatch):
    for name in ("LOCAL_RANK", "RANK", "FORK_LAUNCHED"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("NPROC", "2")
    monkeypatch.setenv("NODE_RANK", "1")
    seen = []

    def note(*args):
        seen.append((args, os.environ["RANK"], os.environ["LOCAL_RANK"]))

    PrepareForLaunch(note, "MULTI_CPU")(1, "x")
    assert seen == [(("x",), "3", "1")]
