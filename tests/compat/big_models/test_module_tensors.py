"""Accelerate's functions on a module's tensors. The expected values were seen with accelerate 1.15.0."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from treadle.compat.utils import modeling


@pytest.fixture
def model() -> nn.ModuleDict:
    model = nn.ModuleDict({"linear1": nn.Linear(3, 4), "batchnorm": nn.BatchNorm1d(4), "linear2": nn.Linear(4, 5)})
    model["batchnorm"].register_buffer("tmp", torch.ones(2), persistent=False)
    return model


@pytest.fixture
def linear() -> nn.Linear:
    return nn.Linear(2, 3)


def test_sizes() -> None:
    """As `tests/common/test_byte_sizes.py` has them, and with another letter for a byte."""
    sizes = {"1GB": 10**9, "1.5MiB": 1572864, "8Gb": 10**9, "3Gib": 3 * 2**30, "8mb": 10**6, 7: 7}
    assert {size: modeling.convert_file_size_to_int(size) for size in sizes} == sizes
    with pytest.raises(ValueError, match="size='-1GB' is not a size"):
        modeling.convert_file_size_to_int("-1GB")


def test_bytes_of_dtypes() -> None:
    names = ("float32", "bfloat16", "bool", "int64", "float8_e4m3fn", "complex64")
    assert [modeling.dtype_byte_size(getattr(torch, name)) for name in names] == [4, 2, 1 / 8, 8, 1, 8]
    assert [modeling.dtype_byte_size(name) for name in ("fp8", "int4", "int2")] == [1, 1 / 2, 1 / 4]
    with pytest.raises(ValueError, match="is not a dtype"):
        modeling.dtype_byte_size("float33")


def test_names_of_tensors(model: nn.ModuleDict) -> None:
    names = [name for name, _ in modeling.named_module_tensors(model, recurse=True)]
    assert names == [*dict(model.named_parameters()), *dict(model.named_buffers())]
    # accelerate 1.15.0 leaves this one in: it compares its own name with the whole one
    saved = [name for name, _ in modeling.named_module_tensors(model, recurse=True, remove_non_persistent=True)]
    assert set(names) - set(saved) == {"batchnorm.tmp"}
    own = modeling.named_module_tensors(model["batchnorm"], include_buffers=False)
    assert [name for name, _ in own] == ["weight", "bias"]
    assert [*modeling.named_module_tensors(model)] == []
    assert modeling.get_non_persistent_buffers(model) == set()
    assert modeling.get_non_persistent_buffers(model, recurse=True) == {"tmp"}
    assert modeling.get_non_persistent_buffers(model, recurse=True, fqns=True) == {"batchnorm.tmp"}


def test_sizes_of_layers(model: nn.ModuleDict) -> None:
    assert modeling.calculate_maximum_sizes(model) == (244, (100, ["linear2"]))
    assert modeling.compute_module_total_buffer_size(model) == 48
    outer = nn.ModuleDict({"a": model, "b": nn.Linear(4, 5)})
    children, inside = [*outer.named_children()], modeling.compute_module_sizes(outer)
    assert modeling.get_max_layer_size(children, inside, []) == (100, ["a.linear2", "b"])
    assert modeling.get_max_layer_size(children, inside, ["ModuleDict"]) == (244, ["a"])


def test_tied_parameters() -> None:
    layers = {"e": nn.Embedding(4, 4), **{name: nn.Linear(4, 4, bias=False) for name in "hk"}}
    model = nn.ModuleDict(layers)
    model["h"].weight = model["k"].weight = model["e"].weight
    groups = modeling.find_tied_parameters(model)
    assert groups == [["e.weight", "h.weight", "k.weight"]]
    model["e"].weight = nn.Parameter(torch.zeros(4, 4, device="meta"))
    assert modeling.find_tied_parameters(model) == [["h.weight", "k.weight"]]
    modeling.retie_parameters(model, groups)
    assert modeling.find_tied_parameters(model) == groups
    assert not model["e"].weight.is_meta
    modeling.check_tied_parameters_on_same_device(groups, {"": "cpu"})
    with pytest.warns(UserWarning, match="tied parameters to different devices"):
        modeling.check_tied_parameters_on_same_device(groups, {"e": 0, "h": "cpu", "k": 0})
    with pytest.raises(ValueError, match=r"no device for 'h\.weight'"):
        modeling.check_tied_parameters_on_same_device(groups, {"e": 0})
    assert not modeling.check_tied_parameters_in_config(model)


def test_a_tensor_on_another_device(linear: nn.Linear) -> None:
    before = linear.weight
    modeling.set_module_tensor_to_device(linear, "weight", "cpu")
    assert linear.weight is before
    modeling.set_module_tensor_to_device(linear, "weight", "meta", dtype="bfloat16")
    assert (linear.weight.is_meta, linear.weight.dtype) == (True, torch.bfloat16)
    assert isinstance(linear.weight, nn.Parameter)
    assert linear.weight.requires_grad
    with pytest.raises(ValueError, match="has no values to move to cpu"):
        modeling.set_module_tensor_to_device(linear, "weight", "cpu")


def test_a_tensor_with_new_values(linear: nn.Linear) -> None:
    modeling.set_module_tensor_to_device(linear, "weight", "cpu", value=torch.ones(3, 2, dtype=torch.float64))
    assert (linear.weight.dtype, linear.weight.sum()) == (torch.float32, 6)
    modeling.set_module_tensor_to_device(linear, "weight", "cpu", value=torch.ones(3, 2), dtype=torch.float16)
    assert linear.weight.dtype == torch.float16
    norm = nn.Sequential(nn.BatchNorm1d(2))
    modeling.set_module_tensor_to_device(norm, "0.running_mean", "cpu", value=torch.tensor([1.0, 2.0]))
    assert norm[0].running_mean.tolist() == [1, 2]
    modeling.set_module_tensor_to_device(norm, "0.num_batches_tracked", "meta")
    assert norm[0].num_batches_tracked.is_meta


def test_tensors_that_do_not_fit(linear: nn.Linear) -> None:
    with pytest.raises(ValueError, match=r"no parameter or buffer 'weigth'. Did you mean 'weight'"):
        modeling.set_module_tensor_to_device(linear, "weigth", "cpu")
    with pytest.raises(ValueError, match=r"value has shape \[3, 3\], but 'weight' has shape \[3, 2\]"):
        modeling.set_module_tensor_to_device(linear, "weight", "cpu", value=torch.ones(3, 3))
    with pytest.raises(ValueError, match=r"Use module\.to"):
        modeling.set_module_tensor_to_device(linear, "weight", "cpu", fp16_statistics=torch.ones(1))


def test_tied_tensors_are_moved_once(linear: nn.Linear) -> None:
    other = nn.Linear(2, 3)
    other.weight = linear.weight
    shared: dict[int, dict[Any, torch.Tensor]] = {linear.weight.data_ptr(): {}}
    for module in (linear, other):
        modeling.set_module_tensor_to_device(module, "weight", "meta", tied_params_map=shared)
    assert other.weight is linear.weight
    assert other.weight.is_meta


def test_the_tensors_of_a_file(tmp_path: Path) -> None:
    state = {"a": torch.arange(3.0), "b": torch.tensor(2)}
    save_file(state, tmp_path / "s.safetensors")
    torch.save(state, tmp_path / "s.bin")
    for file in ("s.safetensors", "s.bin"):
        loaded = modeling.load_state_dict(str(tmp_path / file), device_map={"a": "cpu", "b": "disk"})
        assert {name: tensor.tolist() for name, tensor in loaded.items()} == {"a": [0, 1, 2], "b": 2}


def test_a_model_that_is_none_of_pefts(linear: nn.Linear) -> None:
    assert not modeling.is_peft_model(linear)
    assert not modeling.is_peft_model(nn.parallel.DataParallel(linear))
    kind = type("PeftModel", (nn.Module,), {"__module__": "peft.peft_model"})
    assert modeling.is_peft_model(nn.parallel.DataParallel(kind()))
