"""The folder of offloaded weights: the same bytes as accelerate 1.15.0 writes."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from treadle.compat.utils import offload
from treadle.compat.utils.modeling import load_offloaded_weights

STATE = {
    "a": torch.tensor([[0.0, 1.0], [2.0, 3.0]]),
    "scalar": torch.tensor(3),
    "b.half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "b.flags": torch.tensor([True, False]),
    "eight": torch.ones(2).to(torch.float8_e4m3fn),
    "empty": torch.ones(0, 3),
}
# What accelerate 1.15.0 wrote of these.
BYTES = {
    "a": "000000000000803f0000004000004040",
    "scalar": "0300000000000000",
    "b.half": "c03f00c0",
    "b.flags": "0100",
    "eight": "3838",
    "empty": "",
}
INDEX = {name: {"dtype": str(t.dtype).removeprefix("torch."), "shape": [*t.shape]} for name, t in STATE.items()}


def test_what_is_written(tmp_path: Path) -> None:
    offload.offload_state_dict(tmp_path / "new", STATE)
    assert json.loads((tmp_path / "new" / "index.json").read_text()) == INDEX
    assert {name: (tmp_path / "new" / f"{name}.dat").read_bytes().hex() for name in STATE} == BYTES


def test_what_is_read(tmp_path: Path) -> None:
    for name, text in BYTES.items():
        (tmp_path / f"{name}.dat").write_bytes(bytes.fromhex(text))
    (tmp_path / "index.json").write_text(json.dumps(INDEX))
    loader = offload.OffloadedWeightsLoader({"memory": torch.ones(1)}, tmp_path)
    assert [*loader] == ["memory", *STATE]
    assert len(loader) == 7
    for name, tensor in STATE.items():
        assert (loader[name].dtype, loader[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(loader[name].float(), tensor.float())
    inside = offload.PrefixedDataset(loader, "b.")
    assert inside["flags"].tolist() == [True, False]
    assert [*inside] == ["b.half", "b.flags"]
    assert "half" in inside
    assert "a" not in inside
    with pytest.raises(KeyError, match="Did you mean 'eight'"):
        loader["eigth"]


def test_a_view_is_written_as_it_looks(tmp_path: Path) -> None:
    index: dict[str, object] = {}
    assert offload.offload_weight(STATE["a"].t(), "t", tmp_path, index) is index
    assert torch.equal(offload.load_offloaded_weight(tmp_path / "t.dat", index["t"]), STATE["a"].t())  # type: ignore[arg-type]
    assert offload.offload_weight(STATE["a"], "t", tmp_path) is None


def test_a_file_of_another_size(tmp_path: Path) -> None:
    (tmp_path / "a.dat").write_bytes(b"1234")
    with pytest.raises(ValueError, match=r"has 4 bytes, but a tensor of shape \[2, 2\] and dtype float32 needs 16"):
        offload.load_offloaded_weight(tmp_path / "a.dat", INDEX["a"])


def test_an_index_grows(tmp_path: Path) -> None:
    for index in ({}, None):
        offload.save_offload_index(index, tmp_path)
    assert not (tmp_path / "index.json").exists()
    offload.save_offload_index({"a": 1, "b": 2}, tmp_path)
    offload.save_offload_index({"b": 3}, tmp_path)
    assert json.loads((tmp_path / "index.json").read_text()) == {"a": 1, "b": 3}


def test_weights_in_a_safetensors_file(tmp_path: Path) -> None:
    save_file({"w": torch.arange(3.0)}, tmp_path / "m.safetensors")
    entry = {"safetensors_file": str(tmp_path / "m.safetensors"), "weight_name": "w", "dtype": "float16"}
    loader = offload.OffloadedWeightsLoader(index={"q": entry, "dat": INDEX["a"]})
    assert torch.equal(loader["q"], torch.arange(3, dtype=torch.float16))
    with pytest.raises(ValueError, match=r"Pass the folder that contains dat\.dat"):
        loader["dat"]
    with pytest.raises(ValueError, match="Pass state_dict"):
        offload.OffloadedWeightsLoader()


def test_a_model_gets_its_weights(tmp_path: Path) -> None:
    offload.offload_state_dict(tmp_path, {"weight": torch.ones(2, 2)})
    linear = nn.Linear(2, 2, device="meta")
    load_offloaded_weights(linear, json.loads((tmp_path / "index.json").read_text()), tmp_path)
    load_offloaded_weights(linear, None, tmp_path)
    assert linear.weight.tolist() == [[1, 1], [1, 1]]
    assert linear.bias.is_meta


def test_the_state_of_some_modules() -> None:
    state = {"a.b": 1, "ab": 2, "a": 3, "a.c.d": 4, "x.y": 5}
    assert offload.extract_submodules_state_dict(state, ["a", "x"]) == {"a.b": 1, "a": 3, "a.c.d": 4, "x.y": 5}  # type: ignore[arg-type]
