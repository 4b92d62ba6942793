"""Weights that other programs wrote: every kind of source, against what was saved; and what must be refused."""

import argparse
import enum
import hashlib
import http.server
import json
import pathlib
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.processes import run
from torch import nn
from treadle.engine.checkpoint.safetensors_file import read_tensor
from treadle.engine.weights.sources import open_source

import treadle

BENCH = Path(__file__).parents[3] / ".venv-bench" / "bin" / "python"


def net(width=5):
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 2))


def filled(seed=0, **kwargs):
    torch.manual_seed(seed)
    model = net(**kwargs)
    for value in model.state_dict().values():
        value.copy_(torch.randn(value.shape) * 10)
    return model


def same(model, state):
    own = model.state_dict()
    return own.keys() == state.keys() and all(torch.equal(own[name], state[name]) for name in own)


def digest(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


class AttributeDict(dict):
    pass


@pytest.fixture
def elsewhere(monkeypatch):
    """A way to save objects of classes whose modules are gone when the file is read."""

    def save(value, path, modules):
        with monkeypatch.context() as patch:
            for module, kinds in modules.items():
                parts = module.split(".")
                for n in range(1, len(parts) + 1):
                    name = ".".join(parts[:n])
                    patch.setitem(sys.modules, name, ModuleType(name))
                for kind in kinds:
                    patch.setattr(kind, "__module__", module)
                    setattr(sys.modules[module], kind.__name__, kind)
            torch.save(value, path)

    return save


def shards(state, folder, ending, write):
    names = list(state)
    files = {f"part-{n}.{ending}": names[n::2] for n in range(2)}
    for file, held in files.items():
        write({name: state[name] for name in held}, folder / file)
    stem = "model.safetensors" if ending == "safetensors" else "pytorch_model.bin"
    places = {name: file for file, held in files.items() for name in held}
    (folder / f"{stem}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def keep_map_alone(folder):
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps(json.loads(index.read_text())["weight_map"]))
    return index


def treadle_checkpoint(model, folder):
    accelerator = treadle.Accelerator(cpu=True)
    accelerator.prepare(model)
    return accelerator.save_state(folder / "step-1")


def linked(state, folder):
    """As Hugging Face's cache lays files out: links to blobs."""
    (folder / "blobs").mkdir()
    (folder / "snapshot").mkdir()
    save_file(state, folder / "blobs" / "abc")
    (folder / "snapshot" / "model.safetensors").symlink_to(folder / "blobs" / "abc")
    return folder / "snapshot"


def pt(state, folder, name="weights.pt", **options):
    torch.save(state, folder / name, **options)
    return folder / name


SOURCES = {
    "treadle": lambda m, s, d: treadle_checkpoint(m, d),
    "safetensors": lambda m, s, d: save_file(s, d / "w.safetensors") or d / "w.safetensors",
    "safetensors of another name": lambda m, s, d: save_file(s, d / "w.bin") or d / "w.bin",
    "folder": lambda m, s, d: save_file(s, d / "model.safetensors") or d,
    "folder of links": lambda m, s, d: linked(s, d),
    "shards": lambda m, s, d: shards(s, d, "safetensors", save_file) or d,
    "index": lambda m, s, d: shards(s, d, "safetensors", save_file) or d / "model.safetensors.index.json",
    "index without metadata": lambda m, s, d: shards(s, d, "bin", torch.save) or keep_map_alone(d),
    "bin": lambda m, s, d: pt(s, d, "pytorch_model.bin").parent,
    "bin shards": lambda m, s, d: shards(s, d, "bin", torch.save) or d,
    "torch": lambda m, s, d: pt(s, d),
    "torch under another name": lambda m, s, d: pt(s, d, "weights.safetensors"),
    "torch before 1.6": lambda m, s, d: pt(s, d, _use_new_zipfile_serialization=False),
    "parameters": lambda m, s, d: pt({**s, **dict(m.named_parameters())}, d),
    "state_dict": lambda m, s, d: pt({"epoch": 3, "state_dict": s, "lr": 0.1}, d, "x.ckpt"),
    "model_state_dict": lambda m, s, d: pt({"model_state_dict": s, "optimizer": {}}, d, "x.pth"),
    "model": lambda m, s, d: pt({"model": s, "loss": torch.ones(1)}, d),
    "of DDP": lambda m, s, d: pt({f"module.{name}": value for name, value in s.items()}, d),
    "of a compiled one in Fabric": lambda m, s, d: pt({f"_forward_module._orig_mod.{n}": v for n, v in s.items()}, d),
    "of FSDP1": lambda m, s, d: pt({n.replace(".", "._fsdp_wrapped_module.", 1): v for n, v in s.items()}, d),
    "protocol 4": lambda m, s, d: pt(s, d, pickle_protocol=4),
}


def test_a_checkpoint_with_more_than_tensors(tmp_path):
    class Extra(nn.Linear):
        note = "new"

        def get_extra_state(self):
            return {"note": self.note}

        def set_extra_state(self, state):
            self.note = state["note"]

    saved, model = Extra(2, 2), Extra(2, 2)
    saved.note = "saved"
    done = treadle.load_weights(model, treadle_checkpoint(saved, tmp_path))
    assert sorted(done.names) == ["_extra_state", "bias", "weight"]
    assert model.note == "saved"
    assert torch.equal(model.weight, saved.weight)


@pytest.mark.parametrize("kind", SOURCES)
def test_every_kind_of_source(kind, tmp_path):
    saved = filled()
    state = {name: value.clone() for name, value in saved.state_dict().items()}
    model = net()
    done = treadle.load_weights(model, SOURCES[kind](saved, state, tmp_path))
    assert same(model, state)
    assert (sorted(done.names), done.missing, done.unexpected, done.reshaped) == (sorted(state), (), (), ())


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
            assert torch.equal(
                read.contiguous().view(-1).view(torch.uint8), value.detach().contiguous().view(-1).view(torch.uint8)
            )


def test_names_that_differ(tmp_path):
    state = filled().state_dict()
    path = pt(
        {"state_dict": {f"model.{name}": value for name, value in state.items()} | {"loss.weight": torch.ones(1)}},
        tmp_path,
    )
    model, before = net(), net().state_dict()
    model.load_state_dict(before)
    with pytest.raises(ValueError, match=r"(?s)x|missing: 0.bias.*unexpected: model.0.bias.*prefix='model.'"):
        treadle.load_weights(model, path)
    assert same(model, before)
    treadle.load_weights(model, path, prefix="model.")
    assert same(model, state)
    for rename in (
        {"model.": "", "loss.": "gone."},
        {"model.": "", "loss.weight": "other"},
        lambda name: name.removeprefix("model.") if name.startswith("model.") else None,
    ):
        model = net()
        treadle.load_weights(model, path, rename=rename, strict=callable(rename))
        assert same(model, state)
    with pytest.raises(ValueError, match=r"no name begins with prefix='net\.'"):
        treadle.load_weights(model, path, prefix="net.")
    with pytest.raises(ValueError, match="maps two weights to the name 'a'"):
        treadle.load_weights(model, path, rename=lambda name: "a")
    holder = nn.ModuleDict({"encoder": net()})
    with pytest.raises(ValueError, match=r"rename=\{'': 'encoder.'\}"):
        treadle.load_weights(holder, pt(state, tmp_path, "bare.pt"))
    treadle.load_weights(holder, tmp_path / "bare.pt", rename={"": "encoder."})
    assert same(holder.encoder, state)
    head = pt({**state, "head.weight": torch.ones(3)}, tmp_path, "head.pt")
    treadle.load_weights(model, head, rename={"head.": None})  # skips the weights with this prefix
    assert same(model, state)


def test_what_fits_and_no_more(tmp_path):
    state = filled().state_dict()
    changed = {**state, "0.weight": torch.ones(7, 4), "extra": torch.ones(1)}
    del changed["2.bias"]
    model = net()
    own = model.state_dict()["2.bias"].clone()
    with pytest.raises(
        ValueError,
        match=r"(?s)missing: 2.bias.*unexpected: extra.*0.weight: \(7, 4\) in the source, \(5, 4\) in the model",
    ):
        treadle.load_weights(model, pt(changed, tmp_path))
    with pytest.warns(UserWarning, match=r"2\.bias.*extra.*0\.weight"):
        done = treadle.load_weights(model, tmp_path / "weights.pt", strict=False)
    assert (done.missing, done.unexpected, done.reshaped) == (("2.bias",), ("extra",), ("0.weight",))
    assert torch.equal(model[2].bias, own)
    assert torch.equal(model[0].bias, state["0.bias"])
    with pytest.raises(ValueError, match="none of its weights fit"):
        treadle.load_weights(nn.Linear(1, 1), tmp_path / "weights.pt", strict=False)


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


def test_models_without_memory_are_refused(tmp_path):
    path = pt(filled().state_dict(), tmp_path)
    with torch.device("meta"):
        empty = net()
    with pytest.raises(ValueError, match="load_checkpoint_and_dispatch"):
        treadle.load_weights(empty, path)
    with pytest.raises(TypeError, match="not a dict"):
        treadle.load_weights({}, path)
    with pytest.raises(TypeError, match="a path or a URL"):
        treadle.load_weights(net(), path.open("rb"))


def scripted(path):
    torch.jit.save(torch.jit.trace(nn.Linear(1, 1), torch.ones(1)), path)
    return path


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda d: (d / ".metadata").write_bytes(b"x") and d, "dcp_to_torch"),
        (lambda d: (d / "zero_to_fp32.py").write_text("x") and d, "DeepSpeed"),
        (lambda d: d, "no files"),
        (lambda d: pt(net(), d), "contains a (treadle_gone.*|torch.*.Sequential), not a dict of tensors"),
        (lambda d: pt({"model": net(), "epoch": 1}, d), "torch.nn.modules.container.Sequential"),
        (lambda d: pt({"epoch": 3, "net": {"weight": torch.ones(1)}}, d), "epoch, net"),
        (lambda d: pt({"weight": torch.ones(1), "epoch": 3}, d), "epoch is an int"),
        (lambda d: pt({"weight": torch.eye(2).to_sparse()}, d), "_rebuild_sparse_tensor"),
        (lambda d: np.savez(d / "x.npz", a=1) or d / "x.npz", "numpy arrays"),
        (lambda d: scripted(d / "x.pt"), "TorchScript"),
    ],
)  # fmt: skip
def test_what_has_no_weights_says_what_it_has(make, words, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = make(tmp_path)
    with pytest.raises(ValueError, match=words) as caught:
        treadle.load_weights(net(), path)
    assert str(path) in str(caught.value)


# -- URLs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path):
    asked = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(tmp_path))

        def do_GET(self):
            asked.append(self.path)
            if self.path.startswith("/to-"):
                self.send_response(302)
                self.send_header("Location", {"/to-file": f"file://{tmp_path}/w.pt", "/to-w": "/w.pt"}[self.path])
                self.end_headers()
            elif self.path == "/large":
                self.send_response(200)
                self.send_header("Content-Length", str(2**60))
                self.end_headers()
            else:
                super().do_GET()

        def log_message(self, *args):
            pass

    served = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=served.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{served.server_port}", asked
    served.shutdown()
    served.server_close()


def test_urls(server, tmp_path):
    url, asked = server
    state = filled().state_dict()
    right = digest(pt(state, tmp_path, "w.pt"))
    for source in (f"{url}/w.pt", f"{url}/to-w", f"file://{tmp_path}/w.pt", tmp_path / "w.pt"):
        model = net()
        treadle.load_weights(model, source, sha256=right)
        assert same(model, state)
    asked.clear()
    with pytest.raises(ValueError, match=r"Pass sha256="):
        treadle.load_weights(net(), f"{url}/w.pt")
    with pytest.raises(ValueError, match="64 hexadecimal digits"):
        treadle.load_weights(net(), f"{url}/w.pt", sha256="abc")
    with pytest.raises(ValueError, match=r"not a protocol that fsspec supports\. Did you mean 's3'"):
        treadle.load_weights(net(), "s4://bucket/w.pt", sha256=right)
    assert asked == []
    for source in (f"{url}/w.pt", f"file://{tmp_path}/w.pt", tmp_path / "w.pt"):
        with pytest.raises(ValueError, match="nothing in it was read"):
            treadle.load_weights(net(), source, sha256="0" * 64)
    with pytest.raises(OSError, match="file"):
        treadle.load_weights(net(), f"{url}/to-file", sha256=right)
    with pytest.raises(ValueError, match="bytes, the limit for downloads"):
        treadle.load_weights(net(), f"{url}/large", sha256=right)
    with pytest.raises(OSError, match="404"):
        treadle.load_weights(net(), f"{url}/none", sha256=right)


# -- prepared models -------------------------------------------------------------------------------------------------


def load_prepared(strategy, path, expected):
    accelerator = treadle.Accelerator(cpu=True, **strategy)
    model = accelerator.prepare(net())
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=r"(?s)missing: 0.bias.*unexpected: x.0.bias.*prefix='x.'"):
        treadle.load_weights(model, path, rename={"": "x."})
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    treadle.load_weights(model, path)
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        wanted = torch.load(expected, weights_only=True)
        assert state.keys() == wanted.keys()
        assert all(torch.equal(state[name], wanted[name]) for name in wanted)
    accelerator.wait_for_everyone()
    return sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in model.parameters())


NO_SHARDS = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="this torch can not shard on CPU (2.6)"
)


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=NO_SHARDS)])
@pytest.mark.parametrize(
    "kind", [pytest.param("torch", marks=pytest.mark.slow), pytest.param("shards", marks=pytest.mark.slow), "treadle"]
)
def test_prepared_models(strategy, kind, tmp_path):
    saved = filled()
    state = {name: value.clone() for name, value in saved.state_dict().items()}
    path = SOURCES[kind](saved, state, tmp_path)
    expected = pt(state, tmp_path, "expected.pt")
    held = run(load_prepared, 2, {"strategy": strategy}, path, expected)
    whole = sum(p.numel() for p in saved.parameters())
    assert sum(held) == (whole if strategy == "fsdp" else 2 * whole)


# -- Lightning -------------------------------------------------------------------------------------------------------


class Task(treadle.TaskModule):
    def __init__(self, width=4, path=None, given="default", namespace=None, config=None, number=None):
        super().__init__()
        self.arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        self.net = net(width)
        self.seen = None

    def on_load_checkpoint(self, checkpoint):
        self.seen = checkpoint


class Whole(Task):
    def __init__(self, hparams):
        super().__init__(hparams.width)
        self.hp = hparams


class Color(enum.Enum):
    RED = "r"


class Config:
    def __init__(self):
        self.lr = 0.1


def lightning_file(task, hyper_parameters, **more):
    state = {name: (torch.randn(value.shape) * 9).to(value.dtype) for name, value in task.state_dict().items()}
    optimizer = {
        "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(2, 3).t()}},
        "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99)}],
    }
    callbacks = {
        "ModelCheckpoint{'monitor': 'loss'}": {
            "best_model_score": torch.tensor(1.5),
            "best_k_models": {"a": torch.tensor(1.0)},
        }
    }
    return {
        "epoch": 3, "global_step": 12, "pytorch-lightning_version": "2.6.6", "state_dict": state,
        "loops": {"fit_loop": {}}, "callbacks": callbacks, "optimizer_states": [optimizer], "lr_schedulers": [],
        "hparams_name": "kwargs",
        "hyper_parameters": hyper_parameters, **more,
    }  # fmt: skip


def test_a_lightning_checkpoint_becomes_a_task(elsewhere, tmp_path):
    arguments = AttributeDict(
        width=5, path=Path("a/b"), namespace=argparse.Namespace(x=1), number=np.float64(2.5),
        config={"a": [1, {"b": "c"}]}, given=Color.RED, optimizer=Config(), gone=3,
    )  # fmt: skip
    content = lightning_file(Task(5), arguments, hparams_type=AttributeDict)
    path = tmp_path / "x.ckpt"
    elsewhere(content, path, {"somebody.configs": (Color, Config), "lightning.fabric.utilities.data": (AttributeDict,)})
    with pytest.warns(UserWarning, match="somebody") as said:
        task = Task.load_from_checkpoint(path)
    words = "\n".join(str(one.message) for one in said)
    assert "hyper_parameters.given (somebody.configs.Color)" in words
    assert "hyper_parameters.optimizer (somebody.configs.Config)" in words
    assert "the saved hyperparameter gone is ignored" in words
    assert "somebody" not in sys.modules
    assert task.arguments == {
        "width": 5, "path": pathlib.Path("a/b"), "given": "default", "namespace": argparse.Namespace(x=1),
        "number": 2.5, "config": {"a": [1, {"b": "c"}]},
    }  # fmt: skip
    assert same(task, content["state_dict"])
    assert (task.seen["epoch"], task.seen["global_step"]) == (3, 12)
    assert torch.equal(task.seen["optimizer_states"][0]["state"][0]["exp_avg"], torch.ones(3, 2))
    assert task.seen["optimizer_states"][0]["param_groups"] == [{"lr": 0.1, "betas": (0.9, 0.99)}]
    assert task.seen["callbacks"] == content["callbacks"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert Task.load_from_checkpoint(path, given=7, map_location="cpu").arguments["given"] == 7
        with pytest.raises(ValueError, match="a different model"):
            Task.load_from_checkpoint(path, width=6)
        with pytest.warns(UserWarning, match="weights_only=False has no effect"):
            Task.load_from_checkpoint(path, weights_only=False)
        nowhere = torch.UntypedStorage(device="meta")
        for place in ("meta", {"cuda:0": "meta", "cpu": "meta"}, lambda storage, location: nowhere):
            assert all(parameter.is_meta for parameter in Task.load_from_checkpoint(path, place).parameters())
            assert all(tensor.is_meta for tensor in treadle.load_checkpoint(path, place)["state_dict"].values())
        for place in (lambda storage, location: storage, lambda storage, location: None, {"cuda:0": "cpu"}, None):
            assert same(Task.load_from_checkpoint(path, map_location=place), content["state_dict"])
        for place, error in (("gpu", ValueError), ({"cpu": "meta", "cuda:0": "cpu"}, TypeError), (2.5, TypeError)):
            for load in (Task.load_from_checkpoint, treadle.load_checkpoint):
                with pytest.raises(error, match="map_location="):
                    load(path, map_location=place)


def test_hyperparameters_as_one_argument(tmp_path):
    content = lightning_file(Task(6), {"width": 6, "lr": 0.1}, hparams_name="hparams")
    torch.save(content, tmp_path / "x.ckpt")
    task = Whole.load_from_checkpoint(tmp_path / "x.ckpt")
    assert dict(task.hp) == {"width": 6, "lr": 0.1}
    assert same(task, content["state_dict"])


def test_weights_that_a_hook_has_changed(tmp_path):
    class Renamed(Task):
        def on_load_checkpoint(self, checkpoint):
            checkpoint["state_dict"] = {n.replace("old.", "net."): v for n, v in checkpoint["state_dict"].items()}

    content = lightning_file(Task(4), {})
    wanted = content["state_dict"]
    torch.save(
        {**content, "state_dict": {n.replace("net.", "old."): v for n, v in wanted.items()}}, tmp_path / "x.ckpt"
    )
    assert same(Renamed.load_from_checkpoint(tmp_path / "x.ckpt"), wanted)
    with pytest.raises(ValueError, match=r"unexpected: old\.0\.bias"):
        Task.load_from_checkpoint(tmp_path / "x.ckpt")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hparams.yaml", "width: 7\npath: null\nnumber: 1.5\nconfig: [1, {a: b}]\n"),
        ("tags.csv", "key,value\nwidth,7\npath,None\nnumber,1.5\nconfig,\"[1, {'a': 'b'}]\"\n"),
    ],
)
def test_hyperparameters_of_a_file(name, text, tmp_path):
    torch.save(lightning_file(Task(7), {"width": 3}), tmp_path / "x.ckpt")
    (tmp_path / name).write_text(text)
    task = Task.load_from_checkpoint(tmp_path / "x.ckpt", hparams_file=tmp_path / name)
    assert {k: task.arguments[k] for k in ("width", "path", "number", "config")} == {
        "width": 7, "path": None, "number": 1.5, "config": [1, {"a": "b"}],
    }  # fmt: skip
    with pytest.raises(ValueError, match="does not exist"):
        Task.load_from_checkpoint(tmp_path / "x.ckpt", hparams_file=tmp_path / "none.yaml")


def test_a_task_from_other_sources(server, tmp_path):
    task = Task(4)
    save_file({name: value.clone() for name, value in task.state_dict().items()}, tmp_path / "w.safetensors")
    assert same(Task.load_from_checkpoint(tmp_path / "w.safetensors"), task.state_dict())
    url = f"{server[0]}/w.safetensors"
    assert same(Task.load_from_checkpoint(url, sha256=digest(tmp_path / "w.safetensors")), task.state_dict())
    with pytest.raises(ValueError, match="sha256="):
        Task.load_from_checkpoint(url)


REAL = """
import enum, sys, warnings, logging
warnings.simplefilter("ignore"); logging.disable(logging.WARNING)
from argparse import Namespace
from pathlib import Path
import numpy as np, torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, StochasticWeightAveraging
from omegaconf import OmegaConf
from torch.utils.data import DataLoader, TensorDataset

class Color(enum.Enum):
    RED = "r"

class Base(LightningModule):
    def build(self, width):
        from torch.nn import BatchNorm1d, Linear
        self.net = torch.nn.Sequential(Linear(4, width), BatchNorm1d(width), Linear(width, 2))
    def training_step(self, batch, index):
        loss = self.net(batch[0]).square().mean(); self.log("loss", loss); return loss
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)]

class Arguments(Base):
    def __init__(self, width=4, path=None, given=None, namespace=None, config=None, number=None):
        super().__init__(); self.save_hyperparameters(); self.build(width)

class Whole(Base):
    def __init__(self, hparams):
        super().__init__(); self.save_hyperparameters(hparams); self.build(hparams.width)

def go(name, model):
    kept = ModelCheckpoint(dirpath=sys.argv[1] + "/c", monitor="loss", save_last=True)
    trainer = Trainer(max_steps=4, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=sys.argv[1], callbacks=[kept, EarlyStopping("loss")])
    trainer.fit(model, DataLoader(TensorDataset(torch.randn(16, 4)), 4))
    trainer.save_checkpoint(f"{sys.argv[1]}/{name}.ckpt")
    torch.save(model.state_dict(), f"{sys.argv[1]}/{name}.state")

go("plain", Arguments(5))
config = OmegaConf.create({"a": [1, {"b": "c"}]})
go("rich", Arguments(5, Path("a/b"), Color.RED, Namespace(x=1), config, np.float64(2.5)))
go("whole", Whole(Namespace(width=5, lr=0.1)))
"""


@pytest.mark.skipif(not BENCH.exists(), reason="lightning is not installed beside")
def test_what_lightning_itself_writes(tmp_path):
    (tmp_path / "real.py").write_text(REAL)
    made = subprocess.run([BENCH, tmp_path / "real.py", tmp_path], capture_output=True, text=True, timeout=120)
    if "No module named" in made.stderr:
        pytest.skip("lightning is not installed beside")
    assert made.returncode == 0, made.stderr[-2000:]
    for name, kind in {"plain": Task, "rich": Task, "whole": Whole}.items():
        wanted = torch.load(tmp_path / f"{name}.state", weights_only=True)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            task = kind.load_from_checkpoint(tmp_path / f"{name}.ckpt")
        assert same(task, wanted)
        assert ["__main__.Color" in str(one.message) for one in said] == ([True] if name == "rich" else [])
        assert task.seen["global_step"] == 4
        assert task.seen["optimizer_states"][0]["state"][0]["step"] == 4
        if name == "rich":
            assert task.arguments == {
                "width": 5, "path": Path("a/b"), "given": "default", "namespace": argparse.Namespace(x=1),
                "config": {"a": [1, {"b": "c"}]}, "number": 2.5,
            }  # fmt: skip
        model = net(5)
        treadle.load_weights(model, tmp_path / f"{name}.ckpt", prefix="net.")
        assert same(model, {key.removeprefix("net."): value for key, value in wanted.items()})


def test_a_header_of_any_length_is_told_from_a_pickle(tmp_path):
    """A safetensors file begins with its header's length, whose first byte may be the one a pickle begins with."""
    first, model = set(), filled()
    for size in range(0, 256, 8):
        save_file(model.state_dict(), tmp_path / "w", {"note": "x" * size})
        first.add((tmp_path / "w").read_bytes()[0])
        other = filled(1)
        treadle.load_weights(other, tmp_path / "w")
        assert same(other, model.state_dict())
    assert 0x80 in first
