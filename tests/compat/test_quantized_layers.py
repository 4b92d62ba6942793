"""Questions about layers of libraries that need not be there. Expected values were seen with accelerate 1.15.0."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from treadle.compat.utils.ao import (
    filter_first_and_last_linear_layers,
    filter_linear_layers,
    find_first_last_linear_layers,
    has_ao_layers,
)
from treadle.compat.utils.bnb import get_keys_to_not_convert, get_parameter_device, has_4bit_bnb_layers
from treadle.compat.utils.transformer_engine import has_transformer_engine_layers


@pytest.fixture
def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.Linear(16, 10))


def test_first_and_last_layer(model: nn.Sequential) -> None:
    assert find_first_last_linear_layers(model) == ("0", "3")
    assert find_first_last_linear_layers(nn.ReLU()) == (None, None)


def test_which_layers_are_converted(model: nn.Sequential) -> None:
    answers = [filter_linear_layers(module, name, ["0"]) for name, module in model.named_children()]
    assert answers == [False, True, True, False]
    assert [filter_first_and_last_linear_layers(model, name) for name in "0123"] == [False, True, True, False]


@pytest.mark.parametrize(
    ("has_layers", "module", "name"),
    [
        (has_ao_layers, "torchao.float8.float8_linear", "Float8Linear"),
        (has_4bit_bnb_layers, "bitsandbytes.nn.modules", "Linear4bit"),
        (has_transformer_engine_layers, "transformer_engine.pytorch.module.linear", "Linear"),
    ],
)
def test_layers_of_other_libraries(model: nn.Sequential, has_layers: object, module: str, name: str) -> None:
    assert callable(has_layers)
    assert not has_layers(model)
    model.append(type(name, (nn.Linear,), {"__module__": module})(2, 2))
    assert has_layers(model)


def test_what_stays_as_it_is(model: nn.Sequential) -> None:
    assert get_keys_to_not_convert(model) == ["3"]
    tied = nn.ModuleDict({"e": nn.Embedding(4, 4), "x": nn.Linear(4, 4), "h": nn.Linear(4, 4, bias=False)})
    tied["h"].weight = tied["e"].weight
    assert sorted(get_keys_to_not_convert(tied)) == ["e", "h", "h"]
    model.base_model_prefix = "transformer"  # type: ignore[assignment]
    assert get_keys_to_not_convert(model) == []


def test_where_a_module_is(model: nn.Sequential) -> None:
    assert get_parameter_device(model.to("meta")) == torch.device("meta")
