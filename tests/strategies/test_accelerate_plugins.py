"""Accelerate's plugins become strategies, or say why not."""

import os

import pytest
import torch
from support.processes import run
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, ShardingStrategy, StateDictType
from treadle.compat.fabric import Fabric

import treadle
from treadle import utils

Plugin = utils.FullyShardedDataParallelPlugin
OWN = {
    "DeepSpeedPlugin": (lambda: utils.DeepSpeedPlugin(zero_stage=3), "strategy='fsdp'"),
    "FP8": (lambda: utils.TERecipeKwargs(), "Set only mixed_precision='fp8'"),
    "context": (lambda: utils.ParallelismConfig(cp_size=2), "cp_size=2"),
    "init": (lambda: utils.InitProcessGroupKwargs(init_method="tcp://x"), "init_method"),
    "limit": (lambda: utils.ProjectConfiguration(total_limit=0), "total_limit=0"),
    "format": (lambda: Plugin(state_dict_type="SHARD_STATE_DICT"), "'SHARDED_STATE_DICT'"),
    "ignored": (lambda: Plugin(ignored_modules=[1]), "ignored_modules"),
    "two shardings": (
        lambda: Plugin(sharding_strategy="FULL_SHARD", reshard_after_forward="SHARD_GRAD_OP"),
        "contradicts sharding_strategy='FULL_SHARD'",
    ),
    "sharding": (lambda: Plugin(sharding_strategy="FULL_SHRAD"), "FULL_SHARD"),
    "wrapping": (lambda: Plugin(auto_wrap_policy="size_based_wrap"), "min_num_params"),
}


@pytest.mark.parametrize("case", OWN)
def test_what_a_plugin_can_not_mean(case):
    make, words = OWN[case]
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("spell", [str.lower, str.upper])  # Accelerate's own constants are upper case
def test_a_wrap_policy_in_any_case(spell):
    def policy(name, **options):
        return Plugin(auto_wrap_policy=spell(name), **options).strategy().auto_wrap_policy

    assert policy("no_wrap")(torch.nn.Linear(1, 1)) is False
    assert policy("size_based_wrap", min_num_params=7) == 7
    assert policy("transformer_based_wrap", transformer_cls_names_to_wrap="A, B") == {"A", "B"}


NOT_OF_REPLICAS = {"cpu_offload": True, "activation_checkpointing": True, "mixed_precision_policy": object()}


@pytest.mark.parametrize("name", NOT_OF_REPLICAS)
def test_no_shard_means_replicas_and_drops_no_setting(name):
    def strategy(parallelism=None, **options):
        return Plugin(sharding_strategy="NO_SHARD", **options).strategy(parallelism)

    assert strategy(cpu_offload=False, transformer_cls_names_to_wrap="Block").name == "ddp"
    assert strategy(utils.ParallelismConfig(dp_replicate_size=2)).name == "ddp"
    with pytest.raises(ValueError, match=f"{name}=.* has no effect with sharding_strategy='NO_SHARD'"):
        strategy(**{name: NOT_OF_REPLICAS[name]})
    with pytest.raises(ValueError, match="'NO_SHARD' contradicts parallelism_config with dp_shard_size=1"):
        strategy(utils.ParallelismConfig(tp_size=2))


@pytest.mark.parametrize(("policy", "offloads"), [("OffloadPolicy", False), ("CPUOffloadPolicy", True)])
def test_torchs_offload_policies(policy, offloads):
    assert Plugin(cpu_offload=getattr(torch.distributed.fsdp, policy)()).strategy().cpu_offload is offloads


def mesh_ranks():
    shards = utils.ParallelismConfig(dp_replicate_size=1, dp_shard_size=2)
    treadle.Accelerator(cpu=True, parallelism_config=shards)
    mesh = shards.get_device_mesh("cpu")
    assert shards.get_device_mesh() is mesh
    with pytest.raises(ValueError, match="device_type='cuda' must be 'cpu'"):
        shards.get_device_mesh("cuda")
    return [(mesh[name].size(), mesh[name].get_local_rank()) for name in ("dp_shard", "dp", "dp_shard_cp", "dp_cp")]


def test_ranks_within_a_grid():
    assert run(mesh_ranks, 2) == [[(2, rank)] * 4 for rank in range(2)]


def test_a_grid_from_accelerates_variables(monkeypatch):
    for name, size in (("DP_REPLICATE", 2), ("DP_SHARD", 4), ("TP", 3), ("CP", 1)):
        monkeypatch.setenv(f"PARALLELISM_CONFIG_{name}_SIZE", str(size))
    grid = utils.ParallelismConfig()
    assert (grid.total_size, grid.data_parallel_size, grid.non_data_parallel_size) == (24, 8, 3)
    assert grid.active_mesh_dims == ["dp_replicate", "dp_shard", "tp"]
    assert (grid.dp_dim_names, grid.non_dp_dim_names) == (["dp_replicate", "dp_shard"], ["tp"])
    assert (grid.tp_enabled, grid.cp_enabled, grid.sp_backend) == (True, False, "deepspeed")
    assert utils.ParallelismConfig(dp_shard_size=1, tp_size=1).total_size == 2  # an argument counts before a variable
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "two")
    with pytest.raises(ValueError, match="PARALLELISM_CONFIG_TP_SIZE=two must be an integer"):
        utils.ParallelismConfig()
    assert utils.ParallelismConfig(1, 1, 1).build_device_mesh("cpu") is None


def test_settings_that_change_no_result_are_accepted():
    plugin = Plugin(
        state_dict_config=FullStateDictConfig(offload_to_cpu=True, rank0_only=False),
        optim_state_dict_config=FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=False),
        **{"backward_prefetch": "BACKWARD_POST", "forward_prefetch": True, "limit_all_gathers": False},
        **{"use_orig_params": False, "sync_module_states": False},
    )
    assert plugin.strategy().reshard_after_forward is True
    assert plugin.state_dict_type is StateDictType.FULL_STATE_DICT
    plugin.set_state_dict_type("sharded_state_dict")
    assert plugin.state_dict_type.name == "SHARDED_STATE_DICT"
    assert Plugin(fsdp_version=2).state_dict_type is StateDictType.SHARDED_STATE_DICT
    for second in (2, "2", "shard_grad_op", ShardingStrategy.SHARD_GRAD_OP):
        assert Plugin(sharding_strategy=second).strategy().reshard_after_forward is False


LAUNCHED = {
    **{"ACCELERATE_USE_FSDP": "true", "ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_USE_CPU": "True"},
    **{"FSDP_VERSION": "1", "FSDP_SHARDING_STRATEGY": "2", "FSDP_RESHARD_AFTER_FORWARD": "true"},
    **{"FSDP_OFFLOAD_PARAMS": "false", "FSDP_MIN_NUM_PARAMS": "100000000", "FSDP_BACKWARD_PREFETCH": "BACKWARD_PRE"},
    **{"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_TRANSFORMER_CLS_TO_WRAP": "Linear"},
    **{"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT", "FSDP_ACTIVATION_CHECKPOINTING": "true"},
    **{"FSDP_USE_ORIG_PARAMS": "true", "FSDP_SYNC_MODULE_STATES": "true", "FSDP_FORWARD_PREFETCH": "false"},
}


def launched(variables):
    os.environ |= variables
    accelerator = treadle.Accelerator()
    strategy, plugin = accelerator.strategy, accelerator.state.fsdp_plugin
    explicit = treadle.Accelerator(strategy="ddp", mixed_precision="no")
    assert treadle.Trainer(logger=False).strategy.name == "ddp"
    return (
        *(accelerator.mixed_precision, strategy.name, accelerator.device.type, explicit.mixed_precision),
        *(explicit.strategy.name, explicit.state.fsdp_plugin, plugin.state_dict_type.name),
        *(strategy.reshard_after_forward, strategy.auto_wrap_policy, plugin.activation_checkpointing),
    )


def test_variables_of_accelerate_launch_shard_the_model():
    seen = ("bf16", "fsdp", "cpu", "no", "ddp", None, "SHARDED_STATE_DICT", False, {"Linear"}, True)
    assert run(launched, 2, LAUNCHED) == [seen] * 2


def test_variables_of_accelerate_launch_in_one_process(monkeypatch):
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    assert treadle.Accelerator().strategy.name == "single"  # nothing to shard over
    monkeypatch.setenv("FSDP_IGNORED_MODULES", "head.*")
    with pytest.raises(ValueError, match="ignored_modules='head"):
        Plugin()
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ValueError, match=r"USE_DEEPSPEED=true is not supported\. .*strategy='fsdp'"):
        treadle.Accelerator()
    for of_lightning in (treadle.Trainer(logger=False), Fabric()):  # Lightning reads none of them
        assert (of_lightning.strategy.name, of_lightning.strategy.precision.compute) == ("single", None)


def grid_and_replica_settings():
    os.environ |= {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}
    replicas = utils.DistributedDataParallelKwargs(find_unused_parameters=True)
    accelerator = treadle.Accelerator(cpu=True, kwargs_handlers=[replicas])
    return accelerator.strategy.name, accelerator.parallelism_config.dp_shard_size


def test_settings_of_replicas_form_no_group_of_one_process():
    accelerator = treadle.Accelerator(cpu=True, kwargs_handlers=[utils.DistributedDataParallelKwargs()])
    assert (accelerator.strategy.name, torch.distributed.is_initialized()) == ("single", False)


def test_a_grid_of_accelerate_launch():
    assert run(grid_and_replica_settings, 2) == [("fsdp", 2)] * 2
