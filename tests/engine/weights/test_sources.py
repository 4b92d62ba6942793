"""Every kind of source of weights, and what has none."""

import io
import warnings

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.saved_nets import Extra
from support.weight_files import SOURCES, filled, net, pt, same, treadle_checkpoint
from torch import nn

import treadle


def test_a_checkpoint_with_more_than_tensors(tmp_path):
    saved, model = Extra({"kind": "saved"}), Extra()
    nn.init.zeros_(saved.parts["head"].weight)
    done = treadle.load_weights(model, treadle_checkpoint(saved, tmp_path))
    assert sorted(done.names) == sorted(saved.state_dict())
    assert model.extra == {"kind": "saved"}
    assert not model.parts["head"].weight.any()


@pytest.mark.parametrize("kind", SOURCES)
def test_every_kind_of_source(kind, tmp_path):
    saved = filled()
    state = {name: value.clone() for name, value in saved.state_dict().items()}
    model = net()
    done = treadle.load_weights(model, SOURCES[kind](saved, state, tmp_path))
    assert same(model, state)
    assert (sorted(done.names), done.missing, done.unexpected, done.reshaped) == (sorted(state), (), (), ())


@pytest.mark.parametrize("kind", ["opened", "in memory"])
def test_file_objects(kind, tmp_path):
    saved, model = filled(), net()
    path = pt(saved.state_dict(), tmp_path)
    with open(path, "rb") if kind == "opened" else io.BytesIO(path.read_bytes()) as file:
        treadle.load_weights(model, file)
        assert same(model, saved.state_dict())
        with pytest.raises(ValueError, match=r"has no bytes after its position. Call seek\(0\) first"):
            treadle.load_weights(model, file)
    with pytest.raises(TypeError, match="must be a path, a URL or a binary file, not a StringIO"):
        treadle.load_weights(model, io.StringIO("w"))
    with pytest.raises(ValueError, match="BytesIO has an unknown format"):
        treadle.load_weights(model, io.BytesIO(b"none"))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda d: (d / ".metadata").write_bytes(b"x") and d, "dcp_to_torch"),
        (lambda d: (d / "zero_to_fp32.py").write_text("x") and d, "DeepSpeed"),
        (lambda d: d, "no files"),
        (lambda d: pt(net(), d), "contains a (treadle_gone.*|torch.*.Sequential), not a dict of tensors"),
        (lambda d: pt({"model": net(), "epoch": 1}, d), "torch.nn.modules.container.Sequential"),
        (lambda d: pt({"epoch": 3, "net": {"weight": torch.ones(1)}}, d), "epoch, net"),
        (lambda d: pt({"weight": torch.ones(1), "epoch": 3}, d), "epoch is an int"),
        (lambda d: pt({"weight": torch.eye(2).to_sparse()}, d), "_rebuild_sparse_tensor"),
        (lambda d: np.savez(d / "x.npz", a=1) or d / "x.npz", "numpy arrays"),
        (lambda d: torch.jit.save(torch.jit.trace(nn.Linear(1, 1), torch.ones(1)), d / "x") or d / "x", "TorchScript"),
    ],
)  # fmt: skip
def test_what_has_no_weights_says_what_it_has(make, words, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = make(tmp_path)
    with pytest.raises(ValueError, match=words) as caught:
        treadle.load_weights(net(), path)
    assert str(path) in str(caught.value)


def test_a_header_of_any_length_is_told_from_a_pickle(tmp_path):
    """A safetensors file begins with its header's length, whose first byte may be the one a pickle begins with."""
    first, model = set(), filled()
    for size in range(0, 256, 8):
        save_file(model.state_dict(), tmp_path / "w", {"note": "x" * size})
        first.add((tmp_path / "w").read_bytes()[0])
        other = filled(1)
        treadle.load_weights(other, tmp_path / "w")
        assert same(other, model.state_dict())
    assert 0x80 in first
