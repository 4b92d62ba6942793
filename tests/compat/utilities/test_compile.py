"""Tasks that torch.compile has made."""

import pytest
import torch
from torch import nn
from treadle.compat.demos.boring_classes import BoringModel
from treadle.compat.utilities.compile import from_compiled, to_uncompiled


def test_compiled_tasks() -> None:
    task = BoringModel()
    compiled = torch.compile(task, backend="eager")
    assert from_compiled(compiled) is task
    assert to_uncompiled(task) is task
    with pytest.raises(ValueError, match="not compiled"):
        to_uncompiled(task)
    with pytest.raises(ValueError, match="the result of torch\\.compile"):
        from_compiled(nn.Linear(1, 1))
