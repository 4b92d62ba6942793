"""Weights that other programs wrote: every kind of source, against what was saved; and what must be refused."""

import pytest
import torch
from safetensors.torch import save_file
from support.processes import run
from support.saved_nets import WithBank
from support.weight_files import SOURCES, Task, digest, filled, lightning_file, net, pt, same
from torch import nn
from treadle.engine.checkpoint.safetensors_file import read_tensor
from treadle.engine.weights.sources import open_source

import treadle


@pytest.mark.parametrize("new", [True, False])
def test_every_layout_and_dtype(new, tmp_path):
    x = torch.arange(48.0).reshape(6, 8)
    state = {
        "whole": x, "turned": x.t(), "inside": x[1:3, 2:5], "row": x[2], "wide": torch.ones(1, 2).expand(4, 2),
        "none": torch.empty(0, 3), "number": torch.tensor(3), "bool": torch.tensor([True, False]),
        "complex": torch.ones(2, dtype=torch.complex64) * 1j, "half": x.half(), "bf16": x.bfloat16(),
        "double": x.double(), "byte": x.byte(), "long": x.long(), "short": x.short(),
    }  # fmt: skip
    if new:
        state |= {"f8": x.to(torch.float8_e4m3fn), "u16": torch.arange(3).to(torch.uint16)}
        state["tagged"] = nn.Parameter(torch.ones(3))
        state["tagged"].tag = 1
    torch.save(state, tmp_path / "x.pt", _use_new_zipfile_serialization=new)
    with open_source(tmp_path / "x.pt") as found:
        assert found.weights.keys() == state.keys()
        for name, value in torch.load(tmp_path / "x.pt", weights_only=True).items():
            read = read_tensor(found.weights[name])
            assert (read.dtype, read.shape) == (value.dtype, value.shape)
            ours, theirs = (one.detach().contiguous().view(-1).view(torch.uint8) for one in (read, value))
            assert torch.equal(ours, theirs)


def test_names_that_differ(tmp_path):
    state = filled().state_dict()
    named = {f"model.{name}": value for name, value in state.items()} | {"loss.weight": torch.ones(1)}
    path = pt({"state_dict": named}, tmp_path)
    model, before = net(), net().state_dict()
    model.load_state_dict(before)
    with pytest.raises(ValueError, match=r"(?s)missing: 0.bias.*unexpected: model.0.bias.*prefix='model.'"):
        treadle.load_weights(model, path)
    assert same(model, before)
    treadle.load_weights(model, path, prefix="model.")
    assert same(model, state)
    model = net()
    treadle.load_weights(model, path, rename=lambda n: n.removeprefix("model.") if n.startswith("model.") else None)
    assert same(model, state)
    with pytest.raises(TypeError, match=r"rename=\{'model.': ''\} must be a function of a name, not a dict\. Pass"):
        treadle.load_weights(model, path, rename={"model.": ""})
    with pytest.raises(ValueError, match=r"no name begins with prefix='net\.'"):
        treadle.load_weights(model, path, prefix="net.")
    with pytest.raises(ValueError, match="maps two weights to the name 'a'"):
        treadle.load_weights(model, path, rename=lambda name: "a")
    holder = nn.ModuleDict({"encoder": net()})
    with pytest.raises(ValueError, match=r"rename=lambda name: 'encoder\.' \+ name makes 9 of"):
        treadle.load_weights(holder, pt(state, tmp_path, "bare.pt"))
    treadle.load_weights(holder, tmp_path / "bare.pt", rename=lambda name: "encoder." + name)
    assert same(holder.encoder, state)
    head = pt({**state, "head.weight": torch.ones(3)}, tmp_path, "head.pt")
    treadle.load_weights(model, head, rename=lambda name: None if name == "head.weight" else name)
    assert same(model, state)


def test_what_fits_and_no_more(tmp_path):
    state = filled().state_dict()
    changed = {**state, "0.weight": torch.ones(7, 4), "extra": torch.ones(1)}
    del changed["2.bias"]
    model = net()
    own = model.state_dict()["2.bias"].clone()
    words = r"(?s)missing: 2.bias.*unexpected: extra.*0.weight: \(7, 4\) in the checkpoint, \(5, 4\) in the model"
    with pytest.raises(ValueError, match=words):
        treadle.load_weights(model, pt(changed, tmp_path))
    with pytest.warns(UserWarning, match=r"2\.bias.*extra.*0\.weight"):
        done = treadle.load_weights(model, tmp_path / "weights.pt", strict=False)
    assert (done.missing, done.unexpected, done.reshaped) == (("2.bias",), ("extra",), ("0.weight",))
    assert torch.equal(model[2].bias, own)
    assert torch.equal(model[0].bias, state["0.bias"])
    with pytest.raises(ValueError, match="none of its weights fit"):
        treadle.load_weights(nn.Linear(1, 1), tmp_path / "weights.pt", strict=False)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("hooked", [True, False])
def test_modules_that_resize_as_they_load(tmp_path, strict, hooked):
    path, model = pt(WithBank(size=3).state_dict(), tmp_path), WithBank(resizes=not hooked)
    if hooked:
        model.bank.register_load_state_dict_pre_hook(lambda part, state, prefix, *_: part.rows.resize_(3))
    assert treadle.load_weights(model, path, strict=strict).reshaped == ()
    assert torch.equal(model.bank.rows, torch.arange(3.0))
    with pytest.raises(ValueError, match=r"(?s)does not fit the model.*size mismatch for bank\.rows"):
        treadle.load_weights(WithBank(resizes=False), path, strict=strict)


def test_tied_compiled_and_old_names(tmp_path):
    tied = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    tied["b"].weight = tied["a"].weight
    state = {name: torch.randn(value.shape) for name, value in tied.state_dict().items() if name != "b.weight"}
    treadle.load_weights(tied, save_file(state, tmp_path / "w.safetensors") or tmp_path / "w.safetensors")
    assert torch.equal(tied["b"].weight, state["a.weight"])
    model = net()
    compiled = nn.ModuleDict({"inner": torch.compile(model)})
    state = filled().state_dict()
    treadle.load_weights(compiled, pt({f"inner.{name}": value for name, value in state.items()}, tmp_path))
    assert same(model, state)
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
    old = {"weight_g": torch.rand(3, 1), "weight_v": torch.rand(3, 3), "bias": torch.rand(3)}
    treadle.load_weights(normed, pt(old, tmp_path, "old.pt"))
    assert torch.equal(normed.parametrizations.weight.original1, old["weight_v"])


def test_layers_whose_shape_is_not_known_yet(tmp_path):
    state = filled().state_dict()
    model = net()
    model[2] = nn.LazyLinear(model[2].out_features)
    treadle.load_weights(model, pt(state, tmp_path))
    assert same(model, state)


def test_models_without_memory_are_refused(tmp_path):
    path = pt(filled().state_dict(), tmp_path)
    with torch.device("meta"):
        empty = net()
    with pytest.raises(ValueError, match="load_checkpoint_and_dispatch"):
        treadle.load_weights(empty, path)
    with pytest.raises(TypeError, match="not a dict"):
        treadle.load_weights({}, path)
    with pytest.raises(TypeError, match="a path, a URL or a binary file"):
        treadle.load_weights(net(), 5)


# -- prepared models -------------------------------------------------------------------------------------------------


def load_prepared(strategy, path, expected):
    accelerator = treadle.Accelerator(cpu=True, **strategy)
    model = accelerator.prepare(net())
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=r"(?s)missing: 0.bias.*unexpected: x.0.bias.*prefix='x.'"):
        treadle.load_weights(model, path, rename=lambda name: f"x.{name}")
    assert all(map(torch.equal, model.parameters(), before))
    treadle.load_weights(model, path)
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        wanted = torch.load(expected, weights_only=True)
        assert state.keys() == wanted.keys()
        assert all(torch.equal(state[name], wanted[name]) for name in wanted)
    accelerator.wait_for_everyone()
    return sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in model.parameters())


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", [pytest.param("torch", marks=pytest.mark.slow), "treadle"])
def test_prepared_models(strategy, kind, tmp_path):
    saved = filled()
    state = {name: value.clone() for name, value in saved.state_dict().items()}
    path = SOURCES[kind](saved, state, tmp_path)
    expected = pt(state, tmp_path, "expected.pt")
    held = run(load_prepared, 2, {"strategy": strategy}, path, expected)
    whole = sum(p.numel() for p in saved.parameters())
    assert sum(held) == (whole if strategy == "fsdp" else 2 * whole)


# -- Lightning -------------------------------------------------------------------------------------------------------


def test_hyperparameters_of_a_file(tmp_path):
    torch.save(lightning_file(Task(7), {"width": 3}), tmp_path / "x.ckpt")
    (tmp_path / "hparams.yaml").write_text("width: 7\npath: null\nnumber: 1.5\nconfig: [1, {a: b}]\n")
    task = Task.load_from_checkpoint(tmp_path / "x.ckpt", hparams_file=tmp_path / "hparams.yaml")
    read = {"width": 7, "path": None, "number": 1.5, "config": [1, {"a": "b"}]}
    assert read.items() <= task.arguments.items()
    with pytest.raises(FileNotFoundError, match="does not exist"):
        Task.load_from_checkpoint(tmp_path / "x.ckpt", hparams_file=tmp_path / "none.yaml")
    with pytest.raises(ValueError, match=r"must be a \.yaml or \.yml file"):
        Task.load_from_checkpoint(tmp_path / "x.ckpt", hparams_file=tmp_path / "tags.csv")


def test_a_task_from_other_sources(server, tmp_path):
    task = Task(4)
    save_file({name: value.clone() for name, value in task.state_dict().items()}, tmp_path / "w.safetensors")
    assert same(Task.load_from_checkpoint(tmp_path / "w.safetensors"), task.state_dict())
    url = f"{server[0]}/w.safetensors"
    assert same(Task.load_from_checkpoint(url, sha256=digest(tmp_path / "w.safetensors")), task.state_dict())
    with pytest.warns(UserWarning, match="sha256="):
        assert same(Task.load_from_checkpoint(url), task.state_dict())
