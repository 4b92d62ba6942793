"""What a task writes for others computes what it computes, and leaves it as it was."""

import copy
import io
import uuid

import pytest
import torch
from safetensors import safe_open
from support.models import SGDTask, loader
from support.processes import run
from support.trainers import make_trainer
from torch import nn
from treadle.common.remote_path import RemotePath

import treadle as tl


class Net(SGDTask):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.drop = nn.Dropout(0.5)
        self.frozen = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)
        self.example_input_array = torch.randn(2, 4)

    def forward(self, x):
        return self.last(self.drop(self.frozen(self.first(x))))

    def training_step(self, batch, batch_idx):
        return self(batch[0]).square().mean()


class TwoInputs(tl.TaskModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2)

    def forward(self, x, scale):
        return {"scaled": self.net(x) * scale, "sum": x.sum(1)}


def modes(task):
    return [part.training for part in task.modules()]


@pytest.fixture
def net():
    torch.manual_seed(0)
    net = Net()
    net.frozen.eval()
    return net


def expected(task, *inputs):
    """What forward returns in evaluation mode, computed by a copy."""
    other = copy.deepcopy(task).eval()
    with torch.no_grad():
        return other(*inputs)


def test_torch_export_is_loaded_back_and_computes_the_same(net, tmp_path):
    before, x = modes(net), torch.randn(5, 4)
    net.to_torch_export(tmp_path / "new" / "net.pt2", dynamic_shapes={"x": {0: torch.export.Dim("batch")}})
    with pytest.raises(RuntimeError):
        net.to_torch_export(input_sample=torch.ones(2, 99))
    assert modes(net) == before
    assert net.first.weight.requires_grad
    loaded = torch.export.load(tmp_path / "new" / "net.pt2").module()
    torch.testing.assert_close(loaded(x), expected(net, x))


def test_files_at_urls(net, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    url, x = f"memory://{uuid.uuid4().hex}", torch.randn(2, 4)
    net.to_torch_export(f"{url}/net.pt2")
    net.to_torchscript(f"{url}/net.pt", method="trace")
    assert not list(tmp_path.iterdir())
    for name, load in (("net.pt2", lambda file: torch.export.load(file).module()), ("net.pt", torch.jit.load)):
        (tmp_path / name).write_bytes((RemotePath(url) / name).read_bytes())
        torch.testing.assert_close(load(tmp_path / name)(x), expected(net, x))


def test_several_arguments():
    task, x, scale = TwoInputs(), torch.randn(3, 4), torch.tensor(2.0)
    by_place = task.to_torch_export(input_sample=(x, scale)).module()(x, scale)
    by_name = task.to_torch_export(input_sample={"x": x, "scale": scale}).module()(x=x, scale=scale)
    for found in (by_place, by_name):
        torch.testing.assert_close(found, {"scaled": task.net(x) * scale, "sum": x.sum(1)})


def test_a_task_after_a_compiled_fit(net, tmp_path):
    make_trainer(default_root_dir=tmp_path, compile={"backend": "eager"}).fit(net, loader(8, 4, 4))
    x = torch.randn(2, 4)
    torch.testing.assert_close(net.to_torch_export(input_sample=x).module()(x), expected(net, x))
    assert net.first._compiled_call_impl is not None


@pytest.mark.long
def test_onnx_computes_the_same(net, tmp_path):
    pytest.importorskip("onnxscript")
    reference = pytest.importorskip("onnx.reference")
    before, x = modes(net), torch.randn(2, 4)
    net.to_onnx(tmp_path / "net.onnx", verbose=False)
    assert modes(net) == before
    stream, remote = io.BytesIO(), RemotePath(f"memory://{uuid.uuid4().hex}/net.onnx")
    net.to_onnx(stream, x, verbose=False)
    net.to_onnx(str(remote), x, verbose=False)
    import onnx

    written = map(onnx.load_from_string, (stream.getvalue(), remote.read_bytes()))
    for program in (onnx.load(tmp_path / "net.onnx"), *written):
        session = reference.ReferenceEvaluator(program)
        (found,) = session.run(None, {session.input_names[0]: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), expected(net, x), rtol=1e-4, atol=1e-5)


def test_onnx_without_its_packages_says_what_to_install(net, monkeypatch):
    monkeypatch.setattr("treadle.common.optional.find_spec", lambda name: None)  # as if they were not there
    with pytest.raises(ModuleNotFoundError, match="pip install onnx onnxscript"):
        net.to_onnx()


def test_weights_are_written_under_their_own_names_and_once(tmp_path):
    class Tied(tl.TaskModule):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(5, 3)
            self.head = torch.compile(nn.Linear(3, 5, bias=False), backend="eager")
            self.head._orig_mod.weight = self.embed.weight

    task = Tied()
    task.to_safetensors(tmp_path / "tied.safetensors")
    with safe_open(tmp_path / "tied.safetensors", "pt") as file:
        assert sorted(file.keys()) == ["embed.weight"]
        assert torch.equal(file.get_tensor("embed.weight"), task.embed.weight)
    other = Tied()
    tl.load_weights(other, tmp_path / "tied.safetensors")
    assert torch.equal(other.head._orig_mod.weight, task.embed.weight)
    assert [path.name for path in tmp_path.iterdir()] == ["tied.safetensors"]


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("method", ["script", "trace"])
def test_torchscript(net, tmp_path, method):
    before = modes(net)
    with pytest.warns(UserWarning, match=r"TorchScript is deprecated.*to_torch_export"):
        module = net.to_torchscript(tmp_path / "new" / "net.pt", method=method)
    x = torch.randn(2, 4)
    for loaded in (module, torch.jit.load(tmp_path / "new" / "net.pt")):
        assert not loaded.training
        assert torch.equal(loaded(x), expected(net, x))
    assert modes(net) == before
    with pytest.raises(RuntimeError, match="not attached"):
        _ = net.trainer


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:to_torchscript")
def test_torchscript_of_a_task_in_a_task_after_a_fit():
    class Outer(Net):
        def forward(self, x):
            return self.inner.first(x) + self.first(x)

    task = Outer()
    task.inner = Net()
    trainer = make_trainer(max_steps=1)
    trainer.fit(task, loader(features=4))
    x = torch.randn(2, 4)
    assert torch.equal(task.to_torchscript()(x), expected(task, x))
    assert task.trainer is trainer
    assert task.inner.trainer is trainer


def test_errors_name_the_value_the_rule_and_the_fix(net, tmp_path):
    with pytest.raises(ValueError, match=r"Pass input_sample, or set TwoInputs.example_input_array"):
        TwoInputs().to_torch_export()
    with pytest.raises(ValueError, match=r"'net.pt' must end in .pt2"):
        net.to_torch_export("net.pt")
    with pytest.raises(ValueError, match="TaskModule has no forward"):
        tl.TaskModule().to_torch_export(input_sample=torch.ones(1))
    with pytest.raises(ValueError, match=r"method='onnx' is not one of script, trace"):
        net.to_torchscript(method="onnx")
    with pytest.raises(ValueError, match=r"to_torchscript needs an example input"):
        TwoInputs().to_torchscript(method="trace")
    with pytest.raises(NotImplementedError, match="torch_tensorrt"):
        net.to_tensorrt()
    pytest.importorskip("onnxscript")
    with pytest.raises(ValueError, match="dynamo=False"):
        net.to_onnx(dynamo=False)


def sharded(root):
    task = Net()
    make_trainer(default_root_dir=root, devices=1, strategy="fsdp").fit(task, loader(8, 2, 4))
    for method in (task.to_torch_export, lambda: task.to_safetensors(f"{root}/file.safetensors")):
        with pytest.raises(ValueError, match="load_from_checkpoint"):
            method()


def test_a_sharded_model_is_refused(tmp_path):
    run(sharded, 1, str(tmp_path))
