"""A prepared model is, to those who look at it, the user's model: its names, its attributes, its state."""

import itertools

import pytest
import torch
from support.processes import run
from torch import nn

import treadle


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(2, 3), nn.BatchNorm1d(3))
        self.seen = 0


def look(precision):
    accelerator = treadle.Accelerator(cpu=True, mixed_precision=precision)
    torch.manual_seed(accelerator.process_index)
    prepared = accelerator.prepare(Net())
    replicated = accelerator.num_processes > 1
    own = prepared.module if replicated else prepared
    own.seen = 5
    values = {name: torch.full_like(value, 2) for name, value in Net().state_dict().items()}
    own.load_state_dict(values)
    doubled = {name: 2 * value for name, value in prepared.state_dict().items()}
    prepared.load_state_dict(doubled)
    with pytest.raises(RuntimeError, match="Unexpected"):
        prepared.load_state_dict(doubled | {"other": torch.ones(1)})
    return {
        "state": sorted(own.state_dict()),
        "outer": sorted(prepared.state_dict()),
        "parameters": [name for name, _ in prepared.named_parameters()],
        "value": accelerator.unwrap_model(prepared)[0].weight.detach().tolist(),
        "own": isinstance(own, Net) or precision != "no",
        "attribute": accelerator.unwrap_model(prepared).seen if replicated else 5,
    }


def look_twice():
    return [look(precision) for precision in ("no", "bf16")]


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2])
def test_names_are_those_of_the_users_model(world):
    """On several processes with one `module.` before them, as torch's DDP has it."""
    names = list(Net().state_dict())
    parameters = [name for name, _ in Net().named_parameters()]
    before = "module." if world > 1 else ""
    for found in itertools.chain(*run(look_twice, world)):
        assert found["state"] == sorted(names)
        assert found["outer"] == sorted(before + name for name in names)
        assert found["parameters"] == [before + name for name in parameters]
        assert found["value"] == [[4.0, 4.0]] * 3
        assert found["own"]
        assert found["attribute"] == 5
