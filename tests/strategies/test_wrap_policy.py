"""Policies say which blocks are sharded by themselves."""

import copy
import functools

import pytest
from support.sharded_models import Block, Net, names
from torch import nn
from torch.distributed.fsdp import wrap
from treadle.strategies.wrap_policy import chosen_blocks


def test_policies():
    net = Net()
    blocks = ["blocks.0", "blocks.1", "blocks.2"]
    assert names(net, "auto") == blocks
    assert names(net, {Block}) == names(net, Block) == names(net, "Block") == names(net, ["Block"]) == blocks
    assert names(net, wrap.ModuleWrapPolicy({Block})) == blocks
    assert names(net, lambda module: isinstance(module, Block)) == blocks
    assert names(net, 200) == blocks
    linear = [f"{block}.{part}" for block in blocks for part in ("down", "up")]
    assert names(net, {nn.Linear}) == [*linear, "head"]
    assert names(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "auto") == []
    nested = nn.ModuleDict({"a": nn.Sequential(Net(), Net()), "b": nn.Linear(2, 2)})
    assert names(nested, "auto") == ["a.0", "a.1"]


class Wrapped(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module


def names_of_torch(net, policy):
    """Names of the modules that torch's FSDP would wrap, but the root."""
    net = copy.deepcopy(net)
    known = {module: name for name, module in net.named_modules()}
    wrap._recursive_wrap(net, policy, Wrapped, set(), set(), only_wrap_children=True)
    return sorted(known[module.module] for module in net.modules() if isinstance(module, Wrapped))


NESTED = nn.Sequential(Net(), nn.ModuleDict({"a": nn.Sequential(Net(), Block()), "b": nn.Linear(2, 2)}), nn.GELU())


@pytest.mark.parametrize(
    "policy",
    [
        functools.partial(wrap.size_based_auto_wrap_policy, min_num_params=200),
        functools.partial(wrap.size_based_auto_wrap_policy, min_num_params=50),
        wrap.size_based_auto_wrap_policy,
        functools.partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        functools.partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls={Net, nn.Linear}),
        functools.partial(wrap.lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, Block)),
        functools.partial(
            wrap._or_policy,
            policies=[
                functools.partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block}),
                functools.partial(wrap.lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, Net)),
            ],
        ),
    ],
)
def test_policies_of_torch_select_what_they_do_there(policy):
    selected = names_of_torch(NESTED, policy)
    assert names(NESTED, policy) == selected
    if "min_num_params" in getattr(policy, "keywords", {}):
        assert names(NESTED, policy.keywords["min_num_params"]) == selected
    assert bool(selected) == (policy is not wrap.size_based_auto_wrap_policy)


def test_a_custom_policy():
    assert names(NESTED, wrap.CustomPolicy(lambda module: isinstance(module, Block))) == names(NESTED, {Block})
    with pytest.raises(ValueError, match="returned the options backward_prefetch for a Linear"):
        names(NESTED, wrap.CustomPolicy(lambda module: {"backward_prefetch": None}))


@pytest.mark.parametrize(
    ("policy", "error", "says"),
    [
        ({nn.Conv2d}, ValueError, "names Conv2d, but Net has no module of this class"),
        ("Blok", ValueError, "Did you mean 'Block'"),
        (0, ValueError, "at least 1"),
        (1.5, TypeError, "must be 'auto'"),
    ],
)
def test_policies_that_fit_nothing(policy, error, says):
    with pytest.raises(error, match=says):
        chosen_blocks(Net(), policy, "auto_wrap_policy")
