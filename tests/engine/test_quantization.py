"""Weights of eight and four bits, and products in float8, by torchao itself."""

import re
import sys

import pytest
import torch
from safetensors.torch import save_file
from support.language_model import empty
from support.trainers import make_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from treadle.engine import quantization
from treadle.engine.big_models import WeightQuantizer, load_checkpoint_and_dispatch
from treadle.strategies import FSDP

import treadle

pytestmark = pytest.mark.filterwarnings("ignore")  # torchao's own, of the tensors it makes

WIDTH = 64


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.odd = nn.Linear(WIDTH, 7)
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.odd(x)


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    net = Net()
    state = {name: value for name, value in net.state_dict().items() if name != "head.weight"}
    save_file(state, tmp_path / "model.safetensors")
    return net, tmp_path / "model.safetensors"


TOKENS = torch.arange(12).view(2, 6)


def held(model):
    total = 0
    for parameter in {id(p): p for p in model.parameters()}.values():
        names = [*getattr(parameter, "tensor_data_names", ()), *getattr(parameter, "optional_tensor_data_names", ())]
        parts = [getattr(parameter, name, None) for name in names] or [parameter]
        total += sum(part.nbytes for part in parts if isinstance(part, torch.Tensor))
    return total


@pytest.mark.parametrize(("bits", "error", "share"), [("int8", 0.02, 0.45), ("int4", 0.3, 0.35)])
def test_weights_are_rounded_as_they_are_read(saved, bits, error, share):
    net, path = saved
    loaded = load_checkpoint_and_dispatch(empty(Net), path, quantization=bits)
    with torch.no_grad():
        expected, found = net(TOKENS), loaded(TOKENS)
    assert 0 < ((found - expected).norm() / expected.norm()).item() < error
    layers = [block[0].weight for block in loaded.blocks]
    assert all(type(weight).__name__.startswith("Int") for weight in layers)
    assert type(loaded.embed.weight) is nn.Parameter
    assert loaded.head.weight is loaded.embed.weight  # which another part looks up: it stays whole
    assert held(loaded) < share * held(net)


def test_named_modules_keep_their_weights(saved):
    net, path = saved
    loaded = load_checkpoint_and_dispatch(empty(Net), path, quantization=WeightQuantizer("int8", ["odd", "blocks.1"]))
    assert torch.equal(loaded.odd.weight, net.odd.weight)
    assert torch.equal(loaded.blocks[1][0].weight, net.blocks[1][0].weight)
    assert type(loaded.blocks[0][0].weight).__name__ == "Int8Tensor"


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_a_plan_counts_the_bytes_that_are_kept(saved, dtype, tmp_path):
    _, path = saved
    layer = WIDTH * WIDTH
    # Room for two of the blocks at a byte per weight, but not at four; the rest lies on the disk, and is not rounded.
    memory = {"cpu": 16 * WIDTH * 4 + 3 * (layer + 4 * WIDTH) + 4 * layer}
    plain = load_checkpoint_and_dispatch(empty(Net), path, "sequential", memory, dtype=torch.float32)
    loaded = load_checkpoint_and_dispatch(empty(Net), path, "sequential", memory, quantization="int8", dtype=dtype)
    assert list(loaded.hf_device_map.values()).count("disk") < list(plain.hf_device_map.values()).count("disk")
    with torch.no_grad():
        assert torch.isfinite(loaded(TOKENS).float()).all()


def test_what_is_refused(saved, monkeypatch):
    _, path = saved
    with pytest.raises(ValueError, match="quantization='int3' is not one of int8, int4"):
        load_checkpoint_and_dispatch(empty(Net), path, quantization="int3")
    with pytest.raises(ValueError, match=r"skip contains 'haed', but \w+ has no module with this name\. Did you mean"):
        load_checkpoint_and_dispatch(empty(Net), path, quantization=WeightQuantizer("int8", ["haed"]))
    monkeypatch.setattr("treadle.common.optional.is_installed", lambda package: False)
    with pytest.raises(ModuleNotFoundError, match=r"quantization='int8' needs the package 'torchao'.*quantization"):
        load_checkpoint_and_dispatch(empty(Net), path, quantization="int8")


def test_a_torchao_that_this_torch_cannot_import(tmp_path, monkeypatch):
    """As torchao 0.18 with torch 2.9, by a stand-in of that version."""
    (tmp_path / "torchao").mkdir()
    (tmp_path / "torchao/__init__.py").write_text("from torch import a_name_of_a_newer_torch\n")
    (tmp_path / "torchao-0.18.0.dist-info").mkdir()
    (tmp_path / "torchao-0.18.0.dist-info/METADATA").write_text("Name: torchao\nVersion: 0.18.0\n")
    for name in [name for name in sys.modules if name.split(".")[0] == "torchao"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    versions = rf"torchao 0\.18\.0 cannot be imported with torch {re.escape(torch.__version__)}"
    for needed_by, use in {
        "quantization='int8'": lambda: WeightQuantizer("int8"),
        "precision='float8'": lambda: quantization.convert_to_float8(Net(), torch.device("cpu")),
    }.items():
        message = f"{needed_by} needs torchao, but {versions}.*a_name_of_a_newer_torch.*Update torch, or install"
        with pytest.raises(ImportError, match=message):
            use()


# -- float8 --------------------------------------------------------------------------------------------------------


class Task(treadle.TaskModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16), nn.Linear(16, 1))
        self.losses = []

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.02)


def fit(task, ckpt_path=None, **flags):
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    trainer = make_trainer(**{"max_epochs": 8, **flags})
    trainer.fit(task, DataLoader(TensorDataset(x, x.mean(1, keepdim=True)), 16), ckpt_path=ckpt_path)
    return trainer


@pytest.mark.parametrize("strategy", ["single", pytest.param("fsdp", marks=pytest.mark.exhaustive)])
def test_float8_trains_nearly_as_bfloat16_does(strategy):
    task, other = Task(), Task()
    names = list(task.state_dict())
    fit(task, precision="float8", strategy=FSDP(auto_wrap_policy={nn.Linear}) if strategy == "fsdp" else strategy)
    fit(other, precision="bf16-mixed")
    assert all("Float8" in type(layer).__name__ for layer in task.net[::2])
    assert "Float8" not in type(task.net[3]).__name__  # one output: no multiple of 16
    assert list(task.state_dict()) == names
    assert task.losses != other.losses
    assert task.losses[-1] < 0.3 * task.losses[0]
    assert task.losses[-1] == pytest.approx(other.losses[-1], abs=0.05)


def test_a_float8_run_goes_on_from_a_plain_one(tmp_path):
    first = Task()
    fit(first, max_epochs=2).save_checkpoint(tmp_path / "c.ckpt")
    second = Task()
    fit(second, ckpt_path=tmp_path / "c.ckpt", precision="float8", max_epochs=3)
    assert len(second.losses) == 4
    assert second.losses[0] < first.losses[0]


def test_an_own_loop_has_accelerates_word_for_it():
    accelerator = treadle.Accelerator(cpu=True, mixed_precision="fp8")
    assert accelerator.mixed_precision == "fp8"
    net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(16, 16)).square().mean())
    optimizer.step()
    assert type(net[0]).__name__ == "Float8Linear"
    assert torch.isfinite(net[0].weight).all()


def test_where_float8_can_not_be(monkeypatch):
    with pytest.warns(UserWarning, match="has no nn.Linear submodule whose in_features and out_features are multiples"):
        quantization.convert_to_float8(nn.Sequential(nn.Linear(3, 3)), torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(ValueError, match="NVIDIA A100 does not support float8"):
        quantization.convert_to_float8(nn.Sequential(nn.Linear(16, 16)), torch.device("cuda"))
    monkeypatch.setattr("treadle.common.optional.is_installed", lambda package: False)
    with pytest.raises(ModuleNotFoundError, match="precision='float8' needs the package 'torchao'"):
        quantization.convert_to_float8(nn.Sequential(nn.Linear(16, 16)), torch.device("cpu"))
