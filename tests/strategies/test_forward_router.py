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
    own = prepared.module if accelerator.num_processes > 1 else prepared
    assert isinstance(own, Net) or precision != "no"
    own.load_state_dict({name: torch.full_like(value, 2) for name, value in Net().state_dict().items()})
    doubled = {name: 2 * value for name, value in prepared.state_dict().items()}
    prepared.load_state_dict(doubled)
    with pytest.raises(RuntimeError, match="Unexpected"):
        prepared.load_state_dict(doubled | {"other": torch.ones(1)})
    unwrapped = accelerator.unwrap_model(prepared)
    own.seen = 5
    assert accelerator.num_processes == 1 or unwrapped.seen == 5
    assert unwrapped[0].weight.tolist() == [[4.0, 4.0]] * 3
    return sorted(own.state_dict()), sorted(prepared.state_dict()), [name for name, _ in prepared.named_parameters()]


def look_twice():
    return [look(precision) for precision in ("no", "bf16")]


@pytest.mark.long
@pytest.mark.parametrize("world", [1, 2])
def test_names_are_those_of_the_users_model(world):
    """On several processes with one `module.` before them, as torch's DDP has it."""
    names = list(Net().state_dict())
    parameters = [name for name, _ in Net().named_parameters()]
    before = "module." if world > 1 else ""
    for inner, outer, found in itertools.chain(*run(look_twice, world)):
        assert inner == sorted(names)
        assert outer == sorted(before + name for name in names)
        assert found == [before + name for name in parameters]
