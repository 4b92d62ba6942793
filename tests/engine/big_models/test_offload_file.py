"""Weights offloaded to files: written, taken from files of before, and exported."""

import copy
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.language_model import LanguageModel, assert_same, empty, inputs, offloaded
from treadle.compat.big_models.offload_files import offload_state_dict
from treadle.engine.big_models import (
    cpu_offload,
    disk_offload,
    dispatch_model,
    load_checkpoint_in_model,
    remove_hook_from_submodules,
)

import treadle


def test_memory_to_disk(plain, tmp_path):
    disk_offload(copy.deepcopy(plain), tmp_path / "new" / "folder")
    assert load_file(tmp_path / "new/folder/offload.safetensors").keys() == dict(plain.named_parameters()).keys()
    half = dispatch_model(copy.deepcopy(plain), {"": "cpu", "layers.1": "disk"}, offload_dir=tmp_path / "half")
    assert_same(half, plain)
    shutil.copy(tmp_path / "half" / "offload.safetensors", tmp_path / "again")
    shutil.move(tmp_path / "again", tmp_path / "half" / "offload.safetensors")
    with pytest.raises(ValueError, match=r"offload.safetensors was changed"):
        half(inputs()[0][0])


OFFLOADS = {
    "disk": lambda model, folder: disk_offload(model, folder),
    "memory": lambda model, _: cpu_offload(model, "cpu"),
    "layers": lambda model, folder: dispatch_model(model, {"": "cpu", "layers.1": "disk"}, offload_dir=folder),
    "tied": lambda model, to: dispatch_model(model, {"": "cpu", "embed": "disk", "head": "disk"}, offload_dir=to),
}


@pytest.mark.parametrize(
    ("how", "safe", "limit"),
    [*((how, True, "10GB") for how in OFFLOADS), ("disk", False, "10KB"), ("tied", True, "10KB")],
)
def test_weights_of_an_offloaded_model_are_exported(plain, tmp_path, how, safe, limit):
    accelerator = treadle.Accelerator(cpu=True)
    model = OFFLOADS[how](copy.deepcopy(plain), tmp_path / "offloaded")
    assert offloaded(model)
    accelerator.save_model(plain, tmp_path / "plain", limit, safe)
    accelerator.save_model(model, tmp_path / "saved", limit, safe)
    files = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert len(files) > 1 or limit == "10GB"
    if how == "disk":  # otherwise files are filled in another order
        assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == files
    loaded = LanguageModel().eval()
    before = dict(loaded.named_parameters())
    load_checkpoint_in_model(loaded, tmp_path / "saved", strict=True)
    assert all(parameter is before[name] for name, parameter in loaded.named_parameters())
    assert_same(loaded, plain)
    state = accelerator.get_state_dict(model)
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    assert [*state] == [*plain.state_dict()]
    assert state["head.weight"] is state["embed.weight"] or how == "layers"
    assert_same(model, plain)


@pytest.mark.parametrize("is_empty", [True, False])
def test_weights_that_were_offloaded_before(plain, tmp_path, capsys, is_empty):
    """Accelerate's folder of raw bytes: its values count, not those of the model that is dispatched onto it."""
    state = plain.state_dict()
    offload_state_dict(tmp_path / "all", state)

    torch.manual_seed(12)
    model = empty() if is_empty else LanguageModel()
    assert_same(disk_offload(model, tmp_path / "all", torch.device("cpu")), plain)
    assert sorted(path.suffix for path in (tmp_path / "all").iterdir()) == [".dat"] * len(state) + [".json"]
    if not is_empty:
        assert "offloaded earlier" in capsys.readouterr().err

    save_file({"x." + name: state[name].clone() for name in state if name.startswith("layers.1")}, tmp_path / "file")
    layer = {name: value for name, value in state.items() if name.startswith("layers.0")}
    offload_state_dict(tmp_path / "some", layer)
    index = json.loads((tmp_path / "some" / "index.json").read_text()) | {
        name: {"safetensors_file": str(tmp_path / "file"), "weight_name": "x." + name, "dtype": "float32"}
        for name in state
        if name.startswith("layers.1")
    }
    model = copy.deepcopy(plain)
    with torch.no_grad():
        for parameter in model.layers[:2].parameters():
            parameter.zero_()
    device_map = {"": "cpu", "layers.0": "disk", "layers.1": "disk"}
    assert_same(dispatch_model(model, device_map, None, None, tmp_path / "some", index), plain)

    with pytest.raises(ValueError, match="neither the model nor the offloaded weights have values for positions"):
        dispatch_model(empty(), {"": "disk"}, offload_dir=tmp_path / "some")
    remove_hook_from_submodules(model)
    misnamed = {name: entry | {"weight_name": "y." + name} for name, entry in index.items() if "weight_name" in entry}
    with pytest.raises(ValueError, match=r"to 'y.layers.1.scale' in .* Did you mean 'x.layers.1.scale'"):
        dispatch_model(model, device_map, None, None, tmp_path / "some", index | misnamed)
    with pytest.raises(ValueError, match=r"the index has no 'safetensors_file' for 'layers.0"):
        dispatch_model(model, device_map, offload_index=index)
    (tmp_path / "some" / "layers.0.up.weight.dat").write_bytes(b"short")
    with pytest.raises(ValueError, match=r"layers.0.up.weight.dat has 5 bytes"):
        dispatch_model(model, device_map, offload_dir=tmp_path / "some")
