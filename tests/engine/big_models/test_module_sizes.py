"""The sizes of a model and of its modules."""

import pytest
import torch
from support.language_model import EMBED, LAYER, MASK, POSITIONS, LanguageModel, empty
from treadle.engine.big_models import compute_module_sizes


def test_module_sizes():
    sizes = compute_module_sizes(empty())
    assert sizes[""] == EMBED + POSITIONS + MASK + 3 * LAYER
    assert sizes["layers"] == 3 * LAYER
    assert sizes["layers.1.norm"] == sizes["layers.1.norm.weight"] + sizes["layers.1.norm.bias"] == 256
    assert sizes["head"] == sizes["embed"] == EMBED
    assert compute_module_sizes(LanguageModel(), buffers_only=True)[""] == MASK + 3 * 128
    halves = compute_module_sizes(LanguageModel(), dtype="float16", special_dtypes={"positions": torch.float32})
    assert halves[""] == (EMBED + MASK + 3 * LAYER) // 2 + POSITIONS
    with pytest.raises(ValueError, match="Did you mean 'positions'"):
        compute_module_sizes(LanguageModel(), special_dtypes={"position": "float32"})
    with pytest.raises(ValueError, match="'float23'"):
        compute_module_sizes(LanguageModel(), dtype="float23")
