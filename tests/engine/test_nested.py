"""Tensors nested in collections, environment variables, and what is installed."""

import collections
import os

import pytest
import torch
from torch import nn

import treadle
from treadle import utils as u

Point = collections.namedtuple("Point", "x y")
DATA = {"a": torch.arange(4), "b": [torch.ones(4, 2), Point(torch.zeros(4), "word")]}


def test_nested():
    assert u.find_batch_size({"loss": torch.tensor(1.0), **DATA}) == 4
    assert u.find_batch_size([torch.tensor(1.0)]) is None
    with pytest.raises(TypeError, match="without tensors"):
        u.find_batch_size({"a": 1})
    assert u.find_device(DATA) == torch.device("cpu")
    assert u.find_device(["x"]) is None
    cut = u.slice_tensors(DATA, slice(1, 3))
    assert cut["a"].tolist() == [1, 2]
    assert (type(cut["b"][1]), cut["b"][1].y) == (Point, "word")
    assert u.concatenate([{"a": "x", "b": [1]}]) == {"a": "x", "b": [1]}
    with pytest.raises(TypeError, match="does not support a str"):
        u.concatenate(["x", "y"])
    whole = u.concatenate([{"a": torch.ones(1, 2), "b": (torch.ones(1),)}] * 2)
    assert (whole["a"].shape, whole["b"][0].shape) == ((2, 2), (2,))
    assert u.listify({"a": torch.arange(2), "n": 3}) == {"a": [0, 1], "n": 3}
    assert u.convert_to_fp32([torch.ones(1).bfloat16(), torch.arange(1)])[0].dtype == torch.float32
    assert u.convert_outputs_to_fp32(lambda x: {"y": x.half()})(torch.ones(1))["y"].dtype == torch.float32
    assert u.honor_type(Point(1, 2), iter([3, 4])) == Point(3, 4)
    moved = u.send_to_device({"a": torch.ones(1), "kept": torch.ones(1), "n": 1}, "meta", skip_keys="kept")
    assert (moved["a"].device.type, moved["kept"].device.type, moved["n"]) == ("meta", "cpu", 1)
    doubled = u.recursively_apply(lambda n, by: n * by, [1, {"a": 2}], 3, test_type=lambda v: isinstance(v, int))
    assert doubled == [3, {"a": 6}]
    with pytest.raises(TypeError, match="does not support a str"):
        u.recursively_apply(len, ["x"], error_on_other_type=True)


@pytest.mark.long
def test_the_users_own_module():
    model = nn.Linear(2, 2)
    accelerator = treadle.Accelerator(cpu=True, mixed_precision="bf16")
    prepared = accelerator.prepare(model)
    assert prepared is not model
    assert u.extract_model_from_parallel(prepared) is model
    compiled = torch.compile(model)
    assert u.is_compiled_module(compiled)
    assert u.extract_model_from_parallel(compiled) is compiled
    assert u.extract_model_from_parallel(compiled, keep_torch_compile=False) is model
    assert u.extract_model_from_parallel(torch.compile(prepared)) is model
    parallel = torch.nn.DataParallel(model)
    for wrapped in (parallel, torch.compile(parallel), torch.nn.DataParallel(prepared)):
        assert u.extract_model_from_parallel(wrapped) is model
        assert accelerator.unwrap_model(wrapped) is model


def test_environment_comes_back():
    before = dict(os.environ)
    with u.patch_environment(treadle_test_a=1, home="elsewhere"):
        assert (os.environ["TREADLE_TEST_A"], os.environ["HOME"]) == ("1", "elsewhere")
    with pytest.raises(KeyError), u.patch_environment(treadle_test_a=1):
        raise KeyError
    assert dict(os.environ) == before
    assert u.release_memory(1, 2) == [None, None]
    assert u.write_basic_config() is False
    for options in ({"mixed_precision": "fp16"}, {"save_location": "config.yaml"}):
        with pytest.raises(RuntimeError, match=r"=.* is not supported: .* no machine-wide configuration file"):
            u.write_basic_config(**options)


def test_the_bar_is_shown_on_one_process(monkeypatch, capsys):
    assert list(u.tqdm(range(3))) == [0, 1, 2]
    assert "3/3" in capsys.readouterr().err
    launched = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**launched, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert list(u.tqdm(range(3))) == [0, 1, 2]
    assert capsys.readouterr().err == ""
    list(u.tqdm(range(3), main_process_only=False))
    assert "3/3" in capsys.readouterr().err
