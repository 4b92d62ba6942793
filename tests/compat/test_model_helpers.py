"""Accelerate's helpers for the regions and files of models; expected values are those of accelerate 1.15."""

import numpy as np
import pytest
import torch
from torch import nn

import treadle
from treadle.utils import other


def test_compilation_settings_of_the_environment(monkeypatch):
    plain = treadle.utils.TorchDynamoPlugin(backend="eager", mode="default", fullgraph=False)
    assert (treadle.utils.TorchDynamoPlugin().to_kwargs(), plain.to_kwargs()) == ({}, {"backend": "eager"})
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "AOT_EAGER")
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "reduce-overhead")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_FULLGRAPH", "true")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_DYNAMIC", "0")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "1")
    plugin = treadle.Accelerator(cpu=True).dynamo_plugin
    assert plugin.use_regional_compilation is True
    environment = {"mode": "reduce-overhead", "fullgraph": True, "dynamic": False}
    assert plugin.to_kwargs() == {"backend": "aot_eager", **environment}
    assert treadle.utils.TorchDynamoPlugin(backend="no").to_kwargs() == environment
    explicit = treadle.utils.TorchDynamoPlugin(mode="default", fullgraph=False, dynamic=True)
    assert explicit.to_kwargs() == {"backend": "aot_eager", "dynamic": True}
    assert treadle.Trainer(accelerator="cpu", logger=False).accelerator.dynamo_plugin.backend == "no"
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_DYNAMIC", "maybe")
    with pytest.raises(ValueError, match="ACCELERATE_DYNAMO_USE_DYNAMIC='maybe' must be one of y"):
        treadle.utils.TorchDynamoPlugin()


def test_files(tmp_path):
    weight = torch.randn(2, 2)
    state = {"a": weight, "tied": weight, "row": weight[0], "other": torch.ones(2, 2).T}
    with pytest.warns(UserWarning, match="tied"):
        cleaned = other.clean_state_dict_for_safetensors(state)
    assert list(cleaned) == ["a", "row", "other"]
    torch.testing.assert_close(cleaned["row"], weight[0])
    other.save({"n": np.float64(2.5), "array": np.arange(3)}, tmp_path / "state.pt")
    assert other.load(tmp_path / "state.pt")["array"].tolist() == [0, 1, 2]
    with pytest.warns(UserWarning, match="tied"):
        other.save(state, tmp_path / "state.safetensors", safe_serialization=True)
    from safetensors.torch import load_file

    assert sorted(load_file(tmp_path / "state.safetensors")) == ["a", "other", "row"]


def test_modules_follow_their_submodules():
    blocks = nn.ModuleDict({"layers": nn.Sequential(nn.ReLU(), nn.ReLU()), "head": nn.ReLU()})
    names = [name for name, _ in other.get_module_children_bottom_up(blocks, return_fqns=True)]
    assert names == ["layers.0", "layers.1", "layers", "head", ""]


def test_tensors_of_the_meta_device():
    from treadle.compat.fabric.utilities.init import _materialize_meta_tensors

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    _materialize_meta_tensors(model, torch.device("cpu"))
    assert [tensor.device.type for tensor in model.state_dict().values()] == ["cpu"] * 7
    assert model[1].weight.tolist() == [1, 1, 1]
    assert model[0].weight.abs().max() <= 0.5**0.5  # nn.Linear's bound for 2 features
    model.to("meta").own = nn.ParameterList([torch.empty(1, device="meta")])
    with pytest.raises(TypeError, match=r"own \(ParameterList\) has no method reset_parameters"):
        _materialize_meta_tensors(model, torch.device("cpu"))
