"""Programs that configure Lightning's FSDPStrategy: what their arguments mean, and that results stay the same."""

from functools import partial

import pytest
import torch
from support.models import Line
from support.processes import run
from support.sharded_models import Block
from support.trainers import make_trainer
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader, TensorDataset
from treadle.compat.strategies import FSDPStrategy, ModelParallelStrategy
from treadle.strategies import FSDP

# As public programs call it.
PROGRAMS = {
    "litgpt": {
        **{"auto_wrap_policy": {Block}, "activation_checkpointing_policy": None, "state_dict_type": "full"},
        **{"limit_all_gathers": True, "cpu_offload": False},
    },
    "torch's classes": {
        **{"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "backward_prefetch": BackwardPrefetch.BACKWARD_PRE},
        **{"auto_wrap_policy": partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})},
        **{"activation_checkpointing": [Block], "forward_prefetch": True, "cpu_offload": CPUOffload(False)},
    },
    "hybrid": {"sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 1), "state_dict_type": "sharded"},
    "replicas": {"sharding_strategy": "HYBRID_SHARD", "data_parallel_replicate": 2},
    "machines": {"sharding_strategy": "HYBRID_SHARD", "use_orig_params": True, "sync_module_states": True},
}


def fit(options, processes):
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(16, 4, dtype=torch.float64))
    torch.manual_seed(0)
    task = Line()
    task.net = nn.Sequential(Block(4), Block(4), nn.Linear(4, 1))
    strategy = "auto" if options is None else FSDPStrategy(**options)
    trainer = make_trainer(max_epochs=2, precision="64-true", devices=processes, strategy=strategy)
    trainer.fit(task, DataLoader(data, 4 // processes))
    assert options is None or isinstance(trainer.strategy, FSDPStrategy)
    if options in (PROGRAMS["hybrid"], PROGRAMS["replicas"]):
        assert trainer.strategy.layout.replicate == 2
    return [getattr(p, "full_tensor", lambda p=p: p)().detach() for p in task.parameters()]


def fit_all():
    return {name: fit(options, 2) for name, options in PROGRAMS.items()}


@pytest.mark.long
def test_two_processes_train_as_one():
    expected = fit(None, 1)
    for found in run(fit_all, 2):
        for weights in found.values():
            torch.testing.assert_close(weights, expected, rtol=1e-12, atol=1e-12)


def test_what_the_arguments_mean():
    strategy = FSDPStrategy(**PROGRAMS["torch's classes"])
    assert strategy.reshard_after_forward is False
    assert strategy.activation_checkpointing_policy == {Block}
    assert FSDPStrategy().auto_wrap_policy == "auto"
    assert FSDPStrategy(cpu_offload=True).cpu_offload
    resharded = FSDPStrategy(sharding_strategy="HYBRID_SHARD_ZERO2", reshard_after_forward=True)
    assert resharded.reshard_after_forward is True
    policy = FSDPStrategy(mixed_precision=MixedPrecision(torch.bfloat16, torch.float32)).mixed_precision
    assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
    layout = FSDPStrategy(sharding_strategy="HYBRID_SHARD", device_mesh=(2, 4)).layout
    assert layout.sizes(8) == {"data_replicate": 2, "data_parallel": 4}
    assert ModelParallelStrategy(tensor_parallel_size=2, save_distributed_checkpoint=False).layout.tensor == 2
    assert isinstance(FSDP(), FSDPStrategy)
    assert isinstance(FSDPStrategy(), FSDP)


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"sharding_stategy": "FULL_SHARD"}, TypeError, "Did you mean 'sharding_strategy'"),
        ({"sharding_strategy": "FULL_SHRAD"}, ValueError, "Did you mean 'FULL_SHARD'"),
        ({"sharding_strategy": "NO_SHARD"}, ValueError, "Use strategy='ddp'"),
        ({"state_dict_type": "local"}, ValueError, "full, sharded"),
        ({"activation_checkpointing": Block, "activation_checkpointing_policy": {Block}}, ValueError, "former name"),
    ],
)
def test_what_is_refused(options, kind, words):
    with pytest.raises(kind, match=words):
        FSDPStrategy(**options)
