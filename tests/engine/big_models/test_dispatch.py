"""Models whose weights are in memory, on disk or on several devices give what the plain model gives, bit for bit."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import save_file
from support.language_model import EMBED, POSITIONS, assert_same, empty, inputs, offloaded, write
from torch import nn
from treadle.engine.big_models import (
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    dispatch_model,
    is_dispatched,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
    remove_hook_from_submodules,
)

# -- loaded and run --------------------------------------------------------------------------------------------------


MAPS = {
    "none": None,
    "auto": "auto",
    "sequential": "sequential",
    "cpu": {"": "cpu"},
    "disk": {"": "disk"},
    "mixed": {"": "cpu", "layers": "disk", "layers.1": "cpu", "layers.2.up.weight": "cpu"},
    "ends": {"embed": "disk", "head": "disk", "positions": "disk", "mask": "disk", "layers": torch.device("cpu")},
}


@pytest.mark.parametrize(
    ("form", "where"),
    [*(("file", where) for where in MAPS), *((form, "mixed") for form in ("treadle", "torch", "sharded"))],
)
def test_outputs_are_those_of_the_plain_model(plain, tmp_path, form, where):
    path = write(plain, tmp_path, form)
    model = load_checkpoint_and_dispatch(empty(), path, MAPS[where], {"cpu": EMBED + POSITIONS + 9000})
    assert_same(model, plain)
    if isinstance(MAPS[where], dict):
        assert model.hf_device_map == MAPS[where]
    in_memory = where in ("none", "cpu")
    assert bool(offloaded(model)) is not in_memory
    assert is_dispatched(model) is not in_memory
    if in_memory:
        assert not model._forward_pre_hooks


@pytest.mark.parametrize("buffers", [False, True])
def test_everything_on_disk_leaves_nothing_in_memory(plain, tmp_path, buffers):
    path = write(plain, tmp_path, "file")
    model = load_checkpoint_and_dispatch(empty(), path, {"": "disk"}, offload_buffers=buffers)
    assert_same(model, plain)
    assert offloaded(model) == {name for name in model.state_dict() if buffers or not name.endswith("scale")}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one.safetensors"]  # nothing was copied
    assert all(parameter.requires_grad for parameter in model.parameters())
    remove_hook_from_submodules(model)
    assert not is_dispatched(model)
    assert offloaded(model) == set()
    assert model.head.weight is model.embed.weight
    assert_same(model, plain)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 8, num_layers=2, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.normal = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        hidden = self.lstm(x)[0]
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        return self.norm(self.normal(self.encoder(hidden))[:, -1])


@pytest.mark.parametrize("where", ["disk", "memory"])
def test_torchs_own_modules(tmp_path, where):
    torch.manual_seed(0)
    plain = Recurrent().eval()
    save_file(plain.state_dict(), tmp_path / "model.safetensors")
    if where == "disk":
        model = load_checkpoint_and_dispatch(empty(Recurrent), tmp_path, {"": "disk"}, offload_buffers=True)
    else:
        model = cpu_offload(copy.deepcopy(plain), "cpu")
    assert len(offloaded(model)) > 20
    x = torch.randn(2, 5, 8)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            assert torch.equal(model(x), plain(x))
    assert len(offloaded(model)) > 20
    remove_hook_from_submodules(model)
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))


class Reaches(nn.ModuleList):
    """Reads the weight of a module inside it that it never calls."""

    def forward(self, x):
        return x @ self[0].weight


def test_weights_read_from_outside_are_preloaded():
    plain, x = nn.Sequential(Reaches([nn.Linear(4, 4)]), nn.Linear(4, 4)), torch.randn(2, 4)
    model = cpu_offload(copy.deepcopy(plain), "cpu", preload_module_classes=["Reaches"])
    assert torch.equal(model(x), plain(x))
    with pytest.raises(ValueError, match="preload_module_classes"):
        cpu_offload(copy.deepcopy(plain), "cpu")(x)
    with pytest.warns(UserWarning, match="Did you mean 'Reaches'"):
        cpu_offload(copy.deepcopy(plain), "cpu", preload_module_classes=["Reachs"])


class Cache(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(2))
        self.register_buffer("last", torch.zeros(2))
        self.norm = nn.BatchNorm1d(2)

    def forward(self, x):
        self.steps += 1
        self.last = x[0].clone()
        return self.norm(x) + self.steps


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("where", ["disk", "memory"])
def test_buffers_that_forward_writes_to_are_kept(tmp_path, where, mode):
    plain = Cache()
    model = copy.deepcopy(plain)
    if where == "disk":
        disk_offload(model, tmp_path / "new", offload_buffers=True)
    else:
        cpu_offload(model, offload_buffers=True)
    assert len(offloaded(model)) == len(plain.state_dict())
    for _ in range(3):
        x = torch.randn(4, 2)
        with mode():
            assert torch.equal(model(x), plain(x))
    remove_hook_from_submodules(model)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_an_error_inside_leaves_nothing_loaded(plain, tmp_path):
    model = load_checkpoint_and_dispatch(empty(), write(plain, tmp_path, "file"), {"": "disk"})
    before = offloaded(model)
    with pytest.raises(RuntimeError):
        model(torch.zeros(1, 7, dtype=torch.long), torch.zeros(5))
    with pytest.raises(IndexError):
        model(torch.full((1, 7), 99))
    assert offloaded(model) == before
    assert_same(model, plain)


def test_threads_and_copies(plain, tmp_path):
    model = load_checkpoint_and_dispatch(empty(), write(plain, tmp_path, "file"), {"": "disk", "layers.0": "cpu"})
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: assert_same(model, plain, calls=20), range(3)))  # raises what one of them raises
    other = copy.deepcopy(model)
    remove_hook_from_submodules(other)
    assert_same(other, plain)
    assert is_dispatched(model)
    assert_same(model, plain)


def test_an_empty_model_is_dispatched_onto_a_checkpoint(plain, tmp_path):
    path, device_map = write(plain, tmp_path, "sharded"), {"": "cpu", "layers": "disk"}
    model = empty()
    load_checkpoint_in_model(model, path, device_map)
    assert_same(dispatch_model(model, device_map, offload_dir=path), plain)
    assert_same(dispatch_model(empty(), device_map, offload_dir=path), plain)  # reads those that stay in memory too
    with pytest.raises(ValueError, match=r"https://example\.com/m\.safetensors: .* Download the file"):
        load_checkpoint_in_model(empty(), "https://example.com/m.safetensors")
    with pytest.raises(TypeError, match="checkpoint=3 must be a path or a URL, not an int"):
        load_checkpoint_in_model(empty(), 3)
    with pytest.raises(ValueError, match="no values for positions, embed"):
        dispatch_model(empty(), {"": "cpu"})
    for again in (lambda: dispatch_model(model, {"": "cpu"}), lambda: load_checkpoint_in_model(model, path)):
        with pytest.raises(ValueError, match="already dispatched"):
            again()


def test_inputs_follow_and_named_ones_stay():
    """Device meta stands for a second one: it computes shapes."""

    class Tail(nn.Linear):
        def forward(self, x, *, cache):
            return {"cache": cache, "where": [cache["k"].device.type, x.device.type], "x": super().forward(x)}

    class Two(nn.ModuleDict):
        def forward(self, x, cache):
            return self["tail"](self["head"](x), cache=cache)

    two, device_map = Two({"head": nn.Linear(4, 4), "tail": Tail(4, 4)}), {"head": "cpu", "tail": "meta:0"}
    model = dispatch_model(two, device_map, main_device="cpu", skip_keys=["cache", "x"])
    cache = {"k": torch.ones(1)}
    out = model(torch.ones(1, 4), cache=cache)
    assert out["where"] == ["cpu", "meta"]
    assert out["cache"]["k"] is cache["k"]
    assert out["x"].is_meta
    assert is_dispatched(model)


def test_whole_models_take_turns(plain):
    first, hook = cpu_offload_with_hook(copy.deepcopy(plain), "cpu")
    second, other = cpu_offload_with_hook(copy.deepcopy(plain), "meta", hook)
    assert_same(first, plain)
    moves = []
    first.to = lambda device: moves.append(device) or first
    second(inputs()[0][0])
    assert moves == ["cpu"]
    assert all(parameter.is_meta for parameter in second.parameters())
    hook.offload()
    assert moves == ["cpu", "cpu"]
    for one in (hook, other):
        one.remove()
    assert not {"_hf_hook", "_old_forward"} & {*vars(first), *vars(second)}
