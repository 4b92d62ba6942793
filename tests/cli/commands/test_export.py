"""treadle export writes weights for other tools, and destroys nothing."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from support.saved_nets import Extra, prepared, same
from treadle.cli.commands.export import export, main

import treadle


@pytest.fixture
def saved(tmp_path):
    accelerator, model, _ = prepared(steps=2)
    accelerator.save_state(tmp_path / "saved")
    return tmp_path / "saved", model


def test_export_to_a_file_and_to_a_folder(saved, capsys):
    path, model = saved
    out = path.parent / "new" / "m.safetensors"
    assert main([str(path), str(out)]) == 0
    same(load_file(out), dict(model.state_dict()))
    assert "4 tensors, 232 bytes" in capsys.readouterr().out
    assert main([str(path), str(path.parent / "folder"), "--dtype", "bf16", "--max-shard-size", "40B"]) == 0
    index = json.loads((path.parent / "folder" / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    found = {name: value for file in files for name, value in load_file(path.parent / "folder" / file).items()}
    same(found, {name: value.bfloat16() for name, value in model.state_dict().items()})
    assert len(files) > 1


@pytest.mark.parametrize("name", ["Qwen2.5-7B", "weights.bin/", "there.ckpt", "w.safetensors/"])
def test_names_of_folders(saved, name):
    path, model = saved
    (path.parent / "there.ckpt").mkdir()
    export(path, f"{path.parent}/{name}")
    same(load_file(path.parent / name / "model.safetensors"), dict(model.state_dict()))


def contents(folder):
    return {str(file): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.guarantee
@pytest.mark.parametrize("output", ["saved", "saved/model.safetensors", "other/new.safetensors"])
def test_export_destroys_no_checkpoint(saved, output, capsys):
    path, _ = saved
    shutil.copytree(path, path.parent / "other")
    before = contents(path.parent)
    assert main([str(path), str(path.parent / output)]) == 2
    assert "is a checkpoint" in capsys.readouterr().err
    assert contents(path.parent) == before


def test_export_names_what_it_leaves_out(tmp_path, capsys):
    prepared(Extra)[0].save_state(tmp_path / "x")
    assert main([str(tmp_path / "x"), str(tmp_path / "m.safetensors")]) == 0
    assert "4 tensors, 232 bytes, without values that are not tensors: _extra_state" in capsys.readouterr().out


def test_export_writes_tied_weights_once(tmp_path):
    accelerator = treadle.Accelerator(cpu=True)
    tied = torch.nn.ModuleDict({name: torch.nn.Linear(3, 3, bias=False) for name in "abc"})
    tied.b.weight = tied.a.weight
    accelerator.prepare(tied)
    accelerator.save_state(tmp_path / "x")
    with pytest.raises(ValueError, match=r"dtype=torch\.int8 must be a floating-point dtype"):
        export(tmp_path / "x", tmp_path / "m.safetensors", torch.int8)
    export(tmp_path / "x", tmp_path / "m.safetensors")
    with safe_open(tmp_path / "m.safetensors", framework="pt") as file:
        assert sorted(file.keys()) == ["a.weight", "c.weight"]
        assert file.metadata()["b.weight"] == "a.weight"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere", "x.safetensors"], "does not exist"),
        (["saved", "x.bin"], "must end in .safetensors"),
        (["saved", "x.safetensors", "--dtype", "bfloat"], "Did you mean 'bfloat16'"),
        (["saved", "x", "--max-shard-size", "many"], "many"),
        (["saved", "x.safetensors", "--model", "3"], "has no part 'model-3'"),
        (["saved"], "required: output"),
    ],
)
def test_export_says_what_is_wrong(saved, arguments, words, capsys, monkeypatch):
    monkeypatch.chdir(saved[0].parent)
    assert main(arguments) == 2
    assert words in capsys.readouterr().err
    assert [path.name for path in Path().iterdir()] == ["saved"]
