"""Weights are loaded into a model in place: files of every form, dtypes, links, and checkpoints that do not fit."""

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.language_model import assert_same, empty, inputs, offloaded, write
from torch import nn
from treadle.engine.big_models import load_checkpoint_and_dispatch, load_checkpoint_in_model


@pytest.mark.parametrize("dtype", [torch.bfloat16, "float64"], ids=str)
def test_a_dtype_for_all_or_nearly_all(plain, tmp_path, dtype):
    path = write(plain, tmp_path, "file")
    kind, norm = (torch.float64, "norm") if dtype == "float64" else (dtype, ["norm"])
    wanted = copy.deepcopy(plain).to(kind)
    model = empty()
    model.mask = model.mask.to(kind)
    load_checkpoint_and_dispatch(model, path, {"": "disk", "layers.1": "cpu"}, dtype=dtype)
    words = inputs()[0][0]
    with torch.no_grad():
        assert torch.equal(model(words)["logits"], wanted(words)["logits"])
    model = empty()
    load_checkpoint_in_model(model, path, dtype=dtype, keep_in_fp32_modules=norm)
    assert {t.dtype for n, t in model.state_dict().items() if "norm" in n} == {torch.float32}
    assert {t.dtype for n, t in model.state_dict().items() if "norm" not in n} == {kind}


@pytest.mark.parametrize("start", range(8))
def test_bits_do_not_depend_on_the_place_in_the_file(tmp_path, start):
    """Kernels sum in another order where memory is aligned otherwise; one row shows it."""
    torch.manual_seed(0)
    plain, x = nn.Linear(333, 100), torch.randn(1, 333)
    save_file(plain.state_dict() | {"a": torch.zeros(start)}, tmp_path / "model.safetensors")
    model = load_checkpoint_and_dispatch(empty(lambda: nn.Linear(333, 100)), tmp_path, {"": "disk"})
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(("form", "name"), [("file", ""), ("torch", "model.pt"), ("sharded", ""), ("sharded", INDEX)])
def test_a_checkpoint_of_links(plain, tmp_path, form, name):
    """To blobs, as Hugging Face's cache lays files out."""
    folder, blobs = tmp_path / "snapshot", tmp_path / "blobs"
    folder.mkdir()
    write(plain, folder, form)
    blobs.mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / f"sha{number}")
        file.symlink_to(Path("..", "blobs", f"sha{number}"))
    assert_same(load_checkpoint_and_dispatch(empty(), folder / name, {"": "cpu"}), plain)


def place_positions_in(file):
    def damage(path, state):
        index = json.loads((path / INDEX).read_text())
        index["weight_map"]["positions"] = file
        (path / INDEX).write_text(json.dumps(index))

    return damage


def cut(path, state):
    data = (path / "model-1.safetensors").read_bytes()
    (path / "model-1.safetensors").write_bytes(data[:-10])


def link_outside(path, state):
    place_positions_in("../outside/model-1.safetensors")(path, state)
    (path / "outside").mkdir()
    (path / "model-1.safetensors").rename(path / "outside" / "model-1.safetensors")
    (path / INDEX).rename(path / "outside" / "index")
    (path / INDEX).symlink_to(path / "outside" / "index")


def leave_out_a_layer(path, state):
    save_file({name: tensor for name, tensor in state.items() if "layers.1.up" not in name}, path / "bad")
    return path / "bad"


def cut_positions(path, state):
    save_file(state | {"positions": state["positions"][:, :5].clone()}, path / "bad")
    return path / "bad"


WRONG = {  # what is done to a checkpoint in shards, and returns what is loaded instead of it; what the error says
    "file missing": (
        lambda path, state: (path / "model-2.safetensors").unlink(),
        r"lists model-2.safetensors for layers\.1\..*, but this file is missing from the folder",
    ),
    "file cut": (cut, "model-1.safetensors is not a complete safetensors file"),
    "path outside": (place_positions_in("../model-1.safetensors"), "'../model"),
    "link to a path outside": (link_outside, "'../outside"),
    "wrong file": (place_positions_in("model-2.safetensors"), "not in the listed files: positions"),
    "shape": (cut_positions, r"positions has shape \[16, 5\], but \[16, 32\] in the model"),
    "missing": (leave_out_a_layer, r"nor the model has values for layers\.1\.up\.weight, layers\.1\.up\.bias"),
    "pickle": (
        lambda path, state: torch.save({"positions": copy.deepcopy}, path / "bad") or path / "bad",
        "has no tensors at the top level",
    ),
    "nothing": (lambda path, state: path / "none", "none: it does not exist"),
}


@pytest.mark.parametrize("how", WRONG)
def test_a_wrong_checkpoint_is_named_and_changes_nothing(plain, tmp_path, how):
    damage, words = WRONG[how]
    path, model = write(plain, tmp_path, "sharded"), empty()
    wrong = damage(path, {name: tensor.clone() for name, tensor in plain.state_dict().items()}) or path
    with pytest.raises(ValueError, match=words):
        load_checkpoint_and_dispatch(model, wrong, {"": "cpu"})
    assert offloaded(model) == {name for name in model.state_dict() if not name.endswith("scale")}


def test_names_that_only_one_side_has(plain, tmp_path):
    state = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    del state["layers.0.scale"]
    save_file(state | {"surplus": torch.ones(1)}, tmp_path / "model.safetensors")
    words = r"does not have \(surplus\) and lacks tensors of the model \(layers\.0\.scale\)"
    with pytest.warns(UserWarning, match=words):
        model = load_checkpoint_and_dispatch(empty(), tmp_path, {"": "disk"}, offload_buffers=True)
    assert_same(model, plain)
    with pytest.raises(ValueError, match=words):
        load_checkpoint_in_model(empty(), tmp_path, strict=True)
    for name in ("full_state_dict", "broadcast_from_rank0"):
        with pytest.raises(ValueError, match=name):
            load_checkpoint_in_model(empty(), tmp_path, **{name: name != "full_state_dict"})
