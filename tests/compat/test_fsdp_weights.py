"""Accelerate's functions for sharded models, on models that Treadle's FSDP shards."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.differences import whole
from support.processes import run
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from treadle.compat.utils import fsdp_utils

from treadle import Accelerator
from treadle.utils import FullyShardedDataParallelPlugin


def build(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def train(accelerator: Accelerator, seed: int) -> tuple[nn.Module, Any]:
    model = build(seed)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    loss = model(torch.ones(4, 4) * torch.arange(4)[:, None]).pow(2).mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def read(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    """The whole weights and the first optimizer moments, on every rank."""
    params = (p for group in optimizer.param_groups for p in group["params"])
    moments = {f"moment {n}": optimizer.optimizer.state[p]["exp_avg"] for n, p in enumerate(params)}
    state = accelerator.unwrap_model(model).state_dict() | moments
    return {name: whole(tensor).clone() for name, tensor in state.items()}


def save_and_load(folder: str, version: int) -> list[bool]:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version)
    accelerator = Accelerator(fsdp_plugin=plugin, cpu=True)
    model, optimizer = train(accelerator, seed=0)
    saved = read(accelerator, model, optimizer)
    fsdp_utils.save_fsdp_model(plugin, accelerator, model, folder)
    fsdp_utils.save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)
    model, optimizer = train(accelerator, seed=1)
    other = read(accelerator, model, optimizer)
    fsdp_utils.load_fsdp_model(plugin, accelerator, model, folder)
    fsdp_utils.load_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)
    loaded = read(accelerator, model, optimizer)
    if version == 2:
        fsdp_utils.merge_fsdp_weights(f"{folder}/pytorch_model_fsdp_0", f"{folder}/merged")
        merged = load_file(f"{folder}/merged/model.safetensors")
    else:
        merged = torch.load(f"{folder}/pytorch_model_fsdp.bin", weights_only=True)
    same = [torch.equal(loaded[name], saved[name]) for name in saved]
    assert len(merged) == 9
    same += [torch.equal(merged[name], saved[name]) for name in merged]
    return [*same, not torch.equal(other["0.weight"], saved["0.weight"])]


def list_saved_names(folder: str) -> list[list[str]]:
    """The entries of the files that a frozen layer's model writes, whole and in shards, as Accelerate names them."""
    found = []
    for version in (1, 2):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=version)
        accelerator = Accelerator(fsdp_plugin=plugin, cpu=True)
        model = build()
        model[0].requires_grad_(False)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(trained, lr=0.1, momentum=0.9))
        accelerator.backward(model(torch.ones(4, 4)).mean())
        optimizer.step()
        path = f"{folder}/{version}"
        fsdp_utils.save_fsdp_model(plugin, accelerator, model, path, adapter_only=True)
        fsdp_utils.save_fsdp_optimizer(plugin, accelerator, optimizer, model, path)
        if version == 1:
            state = torch.load(f"{path}/optimizer.bin", weights_only=True)
            found += [sorted(torch.load(f"{path}/pytorch_model_fsdp.bin", weights_only=True)), sorted(state["state"])]
            assert state["param_groups"][0]["params"] == ["1.weight", "1.bias", "2.weight", "2.bias"]
        else:
            for name in ("pytorch_model_fsdp_0", "optimizer_0"):
                entries = FileSystemReader(f"{path}/{name}").read_metadata().state_dict_metadata
                found.append(sorted(entry for entry in entries if "param_groups" not in entry))
    return found


@pytest.mark.long
def test_only_trainable_parameters(tmp_path: Path) -> None:
    parameters = ["1.bias", "1.weight", "2.bias", "2.weight"]
    buffers = ["1.num_batches_tracked", "1.running_mean", "1.running_var"]
    for model, optimizer, model_shards, optimizer_shards in run(list_saved_names, 2, str(tmp_path)):
        assert model == sorted([*parameters, *buffers])
        assert optimizer == parameters
        assert model_shards == [f"model.{name}" for name in model]
        assert optimizer_shards == [f"optimizer.state.{name}.momentum_buffer" for name in parameters]


@pytest.mark.long
@pytest.mark.parametrize(
    ("version", "files"),
    [(1, ["optimizer.bin", "pytorch_model_fsdp.bin"]), (2, ["merged", "optimizer_0", "pytorch_model_fsdp_0"])],
)
def test_what_is_saved_is_loaded(tmp_path: Path, version: int, files: list[str]) -> None:
    for rank in run(save_and_load, 2, str(tmp_path), version):
        assert all(rank), rank
    assert sorted(os.listdir(tmp_path)) == files
    if version == 2:
        with pytest.raises(ValueError, match="Pass the folder of a model's weights"):
            fsdp_utils.merge_fsdp_weights(tmp_path / "optimizer_0", tmp_path)


def load_without_a_weight(folder: str) -> list[str]:
    plugin = FullyShardedDataParallelPlugin()
    accelerator = Accelerator(fsdp_plugin=plugin, cpu=True)
    model, _ = train(accelerator, 0)
    fsdp_utils.save_fsdp_model(plugin, accelerator, model, folder)
    if accelerator.is_main_process:
        os.mkdir(f"{folder}/other")
        state = torch.load(path := f"{folder}/pytorch_model_fsdp.bin", weights_only=True)
        torch.save(state | {"0.weight": torch.ones(3)}, f"{folder}/other/pytorch_model_fsdp.bin")
        del state["2.weight"]
        torch.save(state, path)
    fsdp_utils.load_fsdp_model(plugin, accelerator, model, folder, adapter_only=True)
    errors = []
    for message, place in (
        (r"lack 2\.weight of", folder),
        ("No such file", f"{folder}/missing"),
        (r"0\.weight has the shape \(3,\) in the state, but \(8, 4\)", f"{folder}/other"),
    ):
        with pytest.raises(Exception, match=message) as error:
            fsdp_utils.load_fsdp_model(plugin, accelerator, model, place)
        errors.append(type(error.value).__name__)
    with pytest.raises(Exception, match="is not an existing folder") as error:
        fsdp_utils.merge_fsdp_weights(f"{folder}/missing", folder)
    return [*errors, type(error.value).__name__]


@pytest.mark.long
def test_an_error_of_rank_zero_ends_the_call_on_every_rank(tmp_path: Path) -> None:
    first, second = run(load_without_a_weight, 2, str(tmp_path))
    assert first == ["ValueError", "FileNotFoundError", "ValueError", "ValueError"]
    assert second == ["PeerFailed"] * 4


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not shard models"):
        fsdp_utils.fsdp2_prepare_model(Accelerator(cpu=True), build())
    plugin = SimpleNamespace(fsdp_version=2, state_dict_type=None)  # files for each rank
    with pytest.raises(ValueError, match=r"accelerator\.save_state"):
        fsdp_utils.save_fsdp_model(plugin, Accelerator(cpu=True), build(), tmp_path, use_dcp=False)


def test_merging_names_the_folder_that_is_meant(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model_fsdp_0").mkdir()
    with pytest.raises(ValueError, match=r"Pass .*pytorch_model_fsdp_0'"):
        fsdp_utils.merge_fsdp_weights(tmp_path, tmp_path / "out")
    (tmp_path / "pytorch_model_fsdp_0").rename(tmp_path / "optimizer_0")
    with pytest.raises(ValueError, match="contains only optimizer state"):
        fsdp_utils.merge_fsdp_weights(tmp_path, tmp_path / "out")


def test_merging_a_checkpoint_of_treadle(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(build())
    accelerator.save_state(str(tmp_path / "saved"))
    fsdp_utils.merge_fsdp_weights(tmp_path / "saved", tmp_path / "out", remove_checkpoint_dir=True)
    merged = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(merged[name], tensor) for name, tensor in build().state_dict().items())
    assert not (tmp_path / "saved").exists()


def test_weights_are_tied_again() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(3, 2), "head": nn.Linear(2, 3, bias=False)})
    model["head"].weight = model["embed"].weight
    model._tied_weights_keys = ["head.weight"]  # type: ignore[assignment]

    def renew_apart(module: nn.Module) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.zeros_like(parameter)))
        return module

    assert fsdp_utils.ensure_weights_retied(renew_apart, nn.Linear(2, 2), "cpu") is renew_apart
    initialize = fsdp_utils.ensure_weights_retied(renew_apart, model, "cpu")
    for module in model.modules():
        initialize(module)
    assert model["head"].weight is model["embed"].weight
    assert model["head"].weight.sum() == 0


def test_what_transformers_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_USE_FSDP", raising=False)
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "")
    fsdp_utils.enable_fsdp_ram_efficient_loading()
    assert (os.environ["ACCELERATE_USE_FSDP"], os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"]) == ("True", "True")
    fsdp_utils.disable_fsdp_ram_efficient_loading()
    assert (os.environ["ACCELERATE_USE_FSDP"], os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"]) == ("True", "False")
    monkeypatch.delenv("ACCELERATE_USE_FSDP")


def test_parameters_of_modules() -> None:
    model = build()
    assert fsdp_utils.get_parameters_from_modules(None, model, "cpu") == set()
    assert fsdp_utils.get_parameters_from_modules([model[0]], model, "cpu") == {model[0].weight, model[0].bias}
    found = fsdp_utils.get_parameters_from_modules("[12]", model, torch.float64)
    assert found == {*model[1].parameters(), *model[2].parameters()}
    assert [p.dtype for p in model.parameters()] == [torch.float32] * 2 + [torch.float64] * 4
