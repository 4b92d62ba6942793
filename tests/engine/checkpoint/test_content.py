"""What goes into a checkpoint, by which name."""

import os
import warnings

import pytest
import torch
from support.models import Count
from support.processes import run
from support.stored import read_part
from torch import nn
from treadle.strategies import FSDP

import treadle


def sharded_part(folder):
    torch.manual_seed(0)
    accelerator = treadle.Accelerator(cpu=True, strategy=FSDP())
    model = accelerator.prepare(nn.Linear(4, 6))
    whole = accelerator.get_state_dict(model)
    accelerator.save_state(
        f"{folder}/c", parts={"average": accelerator.unwrap_model(model).state_dict(), "note": {"a": 1}}
    )
    return whole["weight"], whole["bias"]


def test_a_part_may_be_sharded(tmp_path):
    weight, bias = run(sharded_part, 2, str(tmp_path))[0]
    found = read_part(tmp_path / "c", "average")
    assert torch.equal(found["weight"], weight)
    assert torch.equal(found["bias"], bias)
    assert read_part(tmp_path / "c", "note") == {"a": 1}


@pytest.mark.parametrize(
    "name",
    ["model", "model-1", "Model", "optimizer", "optimizer-2", "extra-model", "state", "rank-00000", "unfinished"],
)
def test_names_of_the_checkpoints_own_files_are_no_names_of_parts(tmp_path, name):
    with pytest.raises(ValueError, match=f"the name '{name}' is reserved for"):
        treadle.Accelerator(cpu=True).save_state(tmp_path / "c", parts={name: {"a": torch.ones(1)}})
    assert os.listdir(tmp_path) == []


def test_what_is_registered_keeps_its_name():
    accelerator = treadle.Accelerator(cpu=True)
    one, two, three = Count(1), Count(2), Count(3)
    accelerator.register_for_checkpointing(one, Count_1=two)
    accelerator.register_for_checkpointing(three)
    assert accelerator.registered == {"Count_0": one, "Count_1": two, "Count_2": three}
    accelerator.register_for_checkpointing(Count_1=two)
    other = treadle.Accelerator(cpu=True)
    other.register_for_checkpointing(Count_1=two)
    other.register_for_checkpointing(one, three)
    assert other.registered == {"Count_1": two, "Count_2": one, "Count_3": three}
    with pytest.raises(ValueError, match=r"Count_1=\.\.\.\): another object is registered under this name"):
        other.register_for_checkpointing(Count_1=three)
    assert other.registered["Count_1"] is two


def test_parameters_of_no_prepared_model_are_named(tmp_path):
    accelerator = treadle.Accelerator(cpu=True)
    net, head = nn.Linear(2, 3), nn.Linear(3, 5)
    optimizer = torch.optim.SGD([*net.parameters(), *head.parameters()], lr=0.1)
    accelerator.prepare(net, optimizer)
    with pytest.warns(UserWarning, match=r"parameters that are not in a prepared model \(shapes: \(5, 3\), \(5,\)\)"):
        accelerator.save_state(tmp_path / "c")
    accelerator.register_for_checkpointing(head=head)
    with warnings.catch_warnings(action="error"):
        accelerator.save_state(tmp_path / "c")


def test_what_is_no_place_and_no_part(tmp_path):
    accelerator = treadle.Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 1))
    with pytest.raises(TypeError, match=r"save_state\(output_dir=5\) must be a path or a URL, not an int"):
        accelerator.save_state(5)
    with pytest.raises(TypeError, match=r"save_state\(also=None\) must be a path or a URL, not None"):
        accelerator.save_state(tmp_path / "a", also=[None])
    for also in (None, 5, "xyz", iter([tmp_path / "b"])):
        with pytest.raises(TypeError, match=r"also=.*must be a list of paths or URLs\. Pass (such a list|\['xyz'\])\."):
            accelerator.save_state(tmp_path / "a", also=also)
    with pytest.raises(TypeError, match=r"load_state\(input_dir=5\) must be a path"):
        accelerator.load_state(5)
    with pytest.raises(TypeError, match=r"save_state\(info=\[3\]\) must be a dict of values by name"):
        accelerator.save_state(tmp_path / "a", info=[3])
    for parts in ({3: 3}, [3]):
        with pytest.raises(TypeError, match=r"save_state\(parts=.*must be a dict of states by name"):
            accelerator.save_state(tmp_path / "a", parts=parts)
