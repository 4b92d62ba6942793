"""Accelerate's small helpers; expected values are what accelerate 1.15 returns for the same calls."""

import os

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from treadle.data_loader import (
    DataLoaderDispatcher,
    DataLoaderShard,
    DataLoaderStateMixin,
)
from treadle.state import AcceleratorState, GradientState, PartialState, is_initialized
from treadle.utils.dataclasses import (
    ComputeEnvironment,
    DynamoBackend,
    LoggerType,
    PrecisionType,
    RNGType,
)
from treadle.utils.environment import (
    get_int_from_env,
    parse_flag_from_env,
    str_to_bool,
)
from treadle.utils.launch import PrepareForLaunch
from treadle.utils.memory import should_reduce_batch_size
from treadle.utils.operations import ConvertOutputsToFp32
from treadle.utils.other import (
    clean_state_dict_for_safetensors,
    compile_regions,
    convert_bytes,
    get_free_port,
    get_module_children_bottom_up,
    get_pretty_name,
    is_port_in_use,
    load,
    merge_dicts,
    recursive_getattr,
    save,
)

import treadle


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_enums():
    assert ("bf16" in PrecisionType, "int3" in PrecisionType) == (True, False)
    assert PrecisionType.list() == ["no", "fp8", "fp16", "bf16"]
    assert (str(LoggerType.COMETML), str(DynamoBackend.INDUCTOR)) == ("comet_ml", "INDUCTOR")
    assert ComputeEnvironment.LOCAL_MACHINE == "LOCAL_MACHINE"
    accelerator = treadle.Accelerator(
        cpu=True, mixed_precision=PrecisionType.BF16, rng_types=[RNGType.GENERATOR], dynamo_backend=DynamoBackend.NO
    )
    assert accelerator.mixed_precision == "bf16"
    treadle.utils.synchronize_rng_states([RNGType.TORCH])


def test_states_without_and_with_an_accelerator(monkeypatch):
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    assert not is_initialized()
    assert (PartialState().num_processes, PartialState().debug, PartialState().fork_launched) == (1, False, False)
    assert AcceleratorState().mixed_precision == "no"
    state = GradientState(treadle.utils.GradientAccumulationPlugin(num_steps=3))
    assert (state.sync_gradients, state.num_steps, state.in_dataloader, GradientState().num_steps) == (
        True,
        3,
        False,
        3,
    )
    state._set_sync_gradients(False)
    assert not GradientState().sync_gradients
    accelerator = treadle.Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    assert is_initialized()
    assert (AcceleratorState().mixed_precision, GradientState().num_steps) == ("bf16", 2)
    assert GradientState().sync_gradients
    GradientState()._set_sync_gradients(False)
    assert not accelerator.sync_gradients


def test_what_prepare_returns():
    from treadle.compat.optimizer import AcceleratedOptimizer
    from treadle.compat.scheduler import AcceleratedScheduler

    accelerator, model = treadle.Accelerator(cpu=True), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    assert isinstance(optimizer, AcceleratedOptimizer)
    assert isinstance(scheduler, AcceleratedScheduler)


class Stream(IterableDataset):
    def __iter__(self):
        yield from range(4)


@pytest.mark.parametrize("dispatches", [None, False, True])
def test_the_kind_of_a_prepared_dataloader(dispatches):
    kinds = (DataLoaderShard, DataLoaderDispatcher, DataLoaderStateMixin)
    config = treadle.utils.DataLoaderConfiguration(dispatch_batches=dispatches)
    accelerator = treadle.Accelerator(cpu=True, dataloader_config=config)
    for dataset in (range(4), Stream()):
        prepared = accelerator.prepare(DataLoader(dataset, 2))
        # Accelerate's answers. By default it dispatches streams only.
        dispatched = isinstance(dataset, Stream) if dispatches is None else dispatches
        expected = [not dispatched, dispatched, True]
        assert [isinstance(prepared, kind) for kind in kinds] == expected
        assert [isinstance(treadle.skip_first_batches(prepared, 1), kind) for kind in kinds] == expected
        assert not any(isinstance(DataLoader(dataset, 2), kind) for kind in kinds)


def test_compilation_settings_of_the_environment(monkeypatch):
    plain = treadle.utils.TorchDynamoPlugin(backend="eager", mode="default", fullgraph=False)
    assert (treadle.utils.TorchDynamoPlugin().to_kwargs(), plain.to_kwargs()) == ({}, {"backend": "eager"})
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "AOT_EAGER")
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "reduce-overhead")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_FULLGRAPH", "true")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_DYNAMIC", "0")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "1")
    plugin = treadle.Accelerator(cpu=True).dynamo_plugin
    assert plugin.use_regional_compilation is True
    environment = {"mode": "reduce-overhead", "fullgraph": True, "dynamic": False}
    assert plugin.to_kwargs() == {"backend": "aot_eager", **environment}
    assert treadle.utils.TorchDynamoPlugin(backend="no").to_kwargs() == environment
    explicit = treadle.utils.TorchDynamoPlugin(mode="default", fullgraph=False, dynamic=True)
    assert explicit.to_kwargs() == {"backend": "aot_eager", "dynamic": True}
    assert treadle.Trainer(accelerator="cpu", logger=False).accelerator.dynamo_plugin.backend == "no"
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_DYNAMIC", "maybe")
    with pytest.raises(ValueError, match="ACCELERATE_DYNAMO_USE_DYNAMIC='maybe' must be one of y"):
        treadle.utils.TorchDynamoPlugin()


def test_reading_the_environment(monkeypatch):
    monkeypatch.setenv("ACCELERATE_A", "yes")
    monkeypatch.setenv("B", "7")
    assert (str_to_bool("On"), str_to_bool("f", to_bool=True)) == (1, False)
    assert (parse_flag_from_env("ACCELERATE_A"), parse_flag_from_env("NOT_SET", True)) == (True, True)
    assert (get_int_from_env(["NOT_SET", "B"], 1), get_int_from_env(["NOT_SET"], 1)) == (7, 1)
    with pytest.raises(ValueError, match="'maybe' must be one of y, yes"):
        str_to_bool("maybe")


def test_small_helpers():
    assert [convert_bytes(n) for n in (12, 2048, 5 * 1024**3)] == ["12 bytes", "2.0 KB", "5.0 GB"]
    assert merge_dicts({"a": {"b": 1}, "c": 2}, {"a": {"d": 3}}) == {"a": {"d": 3, "b": 1}, "c": 2}
    assert recursive_getattr(Blocks(), "head.weight").shape == (1, 4)
    assert (get_pretty_name(Blocks), get_pretty_name(nn.Linear(1, 1))) == ("Blocks", "Linear")
    assert not is_port_in_use(get_free_port())
    assert should_reduce_batch_size(RuntimeError("CUDA out of memory. Tried to allocate"))
    assert not should_reduce_batch_size(RuntimeError("shapes differ"))


def test_outputs_become_whole_floats():
    assert ConvertOutputsToFp32(lambda: torch.ones(1, dtype=torch.bfloat16))().dtype == torch.float32


def test_files(tmp_path):
    weight = torch.randn(2, 2)
    state = {"a": weight, "tied": weight, "row": weight[0], "other": torch.ones(2, 2).T}
    with pytest.warns(UserWarning, match="tied"):
        cleaned = clean_state_dict_for_safetensors(state)
    assert list(cleaned) == ["a", "row", "other"]
    torch.testing.assert_close(cleaned["row"], weight[0])
    save({"a": weight, "n": np.float64(2.5), "array": np.arange(3)}, tmp_path / "state.pt")
    loaded = load(tmp_path / "state.pt")
    torch.testing.assert_close(loaded["a"], weight)
    assert loaded["array"].tolist() == [0, 1, 2]
    with pytest.warns(UserWarning, match="tied"):
        save(state, tmp_path / "state.safetensors", safe_serialization=True)
    from safetensors.torch import load_file

    assert sorted(load_file(tmp_path / "state.safetensors")) == ["a", "other", "row"]


def test_compiled_regions():
    model = Blocks()
    compiled = compile_regions(model, backend="eager")
    assert compiled.head._orig_mod is model.head
    assert compiled.layers[0]._orig_mod is model.layers[0]
    x = torch.randn(2, 4)
    torch.testing.assert_close(compiled(x), model(x))
    names = [name for name, _ in get_module_children_bottom_up(model, return_fqns=True)]
    assert names == ["layers.0", "layers.1", "layers", "head", ""]


def test_a_launched_function_knows_its_rank(monkeypatch):
    for name in ("LOCAL_RANK", "RANK", "FORK_LAUNCHED"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("NPROC", "2")
    monkeypatch.setenv("NODE_RANK", "1")
    seen = []

    def note(*args):
        seen.append((args, os.environ["RANK"], os.environ["LOCAL_RANK"]))

    PrepareForLaunch(note, "MULTI_CPU")(1, "x")
    assert seen == [(("x",), "3", "1")]
