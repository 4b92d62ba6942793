"""Models that are compiled, in place or by the user."""

from collections import OrderedDict

import pytest
import torch
from torch import nn
from treadle.engine import list_compiled_names

import treadle
from treadle import utils


def cpu(**options):
    return treadle.Accelerator(cpu=True, **options)


@pytest.mark.long
def test_compiled_in_place():
    seen = []

    def backend(graph, _):
        seen.append(graph)
        return graph.forward

    net = nn.Sequential(nn.Linear(1, 1))
    accelerator = cpu(dynamo_plugin=utils.TorchDynamoPlugin(backend=backend))
    model = accelerator.prepare(net)
    model(torch.ones(1, 1))
    assert len(seen) == 1
    assert list(accelerator.get_state_dict(model)) == ["0.weight", "0.bias"]
    plugin = utils.TorchDynamoPlugin(backend=backend, use_regional_compilation=True)
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(1, 1), nn.Tanh()) for _ in range(3)))
    net, graphs = nn.Sequential(OrderedDict(stem=nn.Linear(1, 1), blocks=layers, head=nn.Linear(1, 1))), len(seen)
    expected = net(torch.ones(1, 1))
    blocks = cpu(dynamo_plugin=plugin).prepare(net)
    assert torch.equal(blocks(torch.ones(1, 1)), expected)
    assert len(seen) == graphs + 3  # one for all blocks
    assert set(list_compiled_names(net)) == {"stem", "head", "blocks.0", "blocks.1", "blocks.2"}
    assert blocks._compiled_call_impl is None


@pytest.mark.parametrize("when", ["before", "after"])
def test_compiled_by_the_user(when, tmp_path):
    net, accelerator = nn.Linear(1, 1), cpu(mixed_precision="bf16")
    if when == "before":
        compiled = torch.compile(net, backend="eager")
        model = accelerator.prepare(compiled)
        assert accelerator.unwrap_model(model) is compiled
    else:
        model = torch.compile(accelerator.prepare(net), backend="eager")
        assert accelerator.unwrap_model(model) is net
    assert accelerator.unwrap_model(model, keep_torch_compile=False) is net
    assert sorted(accelerator.get_state_dict(model)) == ["bias", "weight"]
    accelerator.save_state(tmp_path / "c")
    plain = cpu()
    other = plain.prepare(nn.Linear(1, 1))
    plain.load_state(tmp_path / "c")
    assert torch.equal(other.weight, net.weight)


def test_a_part_that_is_compiled(tmp_path):
    accelerator = cpu()
    net = nn.Sequential(nn.Linear(1, 1))
    net[0] = torch.compile(net[0], backend="eager")
    model = accelerator.prepare(net)
    assert sorted(accelerator.get_state_dict(model)) == ["0.bias", "0.weight"]
    accelerator.save_state(tmp_path / "c")
    with torch.no_grad():
        before, _ = net[0].weight.clone(), net[0].weight.zero_()
    accelerator.load_state(tmp_path / "c")
    assert torch.equal(net[0].weight, before)
