"""Models built empty, planned, loaded in place and run part by part give what the plain model gives, bit for bit."""

import copy
import itertools
import json
import shutil
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from support import stored
from support.processes import script
from torch import nn
from treadle.compat.big_models.offload_files import offload_state_dict
from treadle.engine.big_models import (
    clean_device_map,
    compute_module_sizes,
    cpu_offload,
    cpu_offload_with_hook,
    device_map_plan,
    disk_offload,
    dispatch_model,
    get_balanced_memory,
    get_max_memory,
    infer_auto_device_map,
    init_empty_weights,
    init_on_device,
    is_dispatched,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
    remove_hook_from_submodules,
)

import treadle


class Block(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.register_buffer("scale", torch.full((width,), 0.5))

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x)))) * self.scale


class LanguageModel(nn.Module):
    """Tied ends, a parameter of its own, a stack, several inputs, and a dict for an output."""

    def __init__(self, words=53, width=32, depth=3):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.positions = nn.Parameter(torch.randn(16, width))
        self.register_buffer("mask", torch.ones(16, 16).tril(), persistent=False)
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words, bias=None, *, extra=None):
        hidden = self.embed(words) + self.positions[: words.shape[1]]
        hidden = self.mask[: words.shape[1], : words.shape[1]] @ hidden
        for layer in self.layers:
            hidden = layer(hidden)
        if extra is not None:
            hidden = hidden + extra["shift"]
        logits = self.head(hidden)
        return {"logits": logits if bias is None else logits + bias, "hidden": hidden}


LAYER = 4 * (2 * 32 + 2 * 32 * 32 * 2 + 64 + 32 + 32)  # norm, up and down, their biases, scale: of four bytes each
EMBED, POSITIONS, MASK = 4 * 53 * 32, 4 * 16 * 32, 4 * 16 * 16


@pytest.fixture(scope="module")
def plain():
    torch.manual_seed(0)
    return LanguageModel().eval()


def empty(kind=LanguageModel):
    with init_empty_weights():
        return kind().eval()


def inputs():
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(0, 53, (1, 7), generator=generator)
    return (words, torch.randn(53, generator=generator)), {"extra": {"shift": torch.randn(32, generator=generator)}}


@torch.no_grad()
def assert_same(model, plain, calls=2):
    args, kwargs = inputs()
    expected = plain(*args, **kwargs)
    for _ in range(calls):
        found = model(*args, **kwargs)
        assert torch.equal(found["logits"], expected["logits"])
        assert torch.equal(found["hidden"], expected["hidden"])


def offloaded(model):
    return {name for name, tensor in model.state_dict().items() if tensor.is_meta}


# -- built empty -----------------------------------------------------------------------------------------------------


def test_parameters_are_empty_and_buffers_are_not(plain):
    model = empty()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.head.weight is model.embed.weight
    assert torch.equal(model.layers[1].scale, plain.layers[1].scale)
    assert torch.equal(model.mask, plain.mask)
    assert {n: (p.shape, p.dtype) for n, p in model.named_parameters()} == {
        n: (p.shape, p.dtype) for n, p in plain.named_parameters()
    }
    with init_empty_weights(include_buffers=True):
        model = LanguageModel()
    assert all(buffer.is_meta for buffer in model.buffers())


class Marked(nn.Parameter):
    pass


def test_what_a_parameter_is_stays():
    with init_empty_weights():
        module, shared = nn.Module(), Marked(torch.ones(3), requires_grad=False)
        shared.note = "kept"
        module.one, module.two, module.lazy = shared, shared, nn.LazyLinear(3)
        module.from_numpy = nn.Parameter(torch.from_numpy(shared.detach().numpy()))
    assert type(module.one) is Marked
    assert module.one is module.two
    assert (module.one.is_meta, module.one.requires_grad, module.one.note) == (True, False, "kept")
    assert nn.parameter.is_lazy(module.lazy.weight)
    array = torch.ones(2).numpy()
    with init_on_device("meta", include_buffers=True):
        module.register_buffer("late", torch.from_numpy(array))
    assert module.late.is_meta
    with init_on_device("cpu"):
        assert nn.Linear(2, 2).weight.device.type == "cpu"


def test_contexts_nest_and_end_whatever_happens():
    with init_empty_weights():
        with init_empty_weights():
            assert nn.Linear(2, 2).weight.is_meta
        assert nn.Linear(2, 2).weight.is_meta
        with init_on_device("cpu"):
            assert not nn.Linear(2, 2).weight.is_meta
        with pytest.raises(ZeroDivisionError):
            with init_empty_weights(include_buffers=True):
                _ = 1 / 0
        assert not nn.BatchNorm1d(2).running_mean.is_meta
    assert not nn.Linear(2, 2).weight.is_meta


def test_threads_do_not_see_each_other():
    seen, errors, stop = [], [], threading.Event()

    def build(inside):
        try:
            while not stop.is_set():
                if inside:
                    with init_empty_weights():
                        seen.append((True, nn.Linear(3, 3).weight.is_meta))
                else:
                    seen.append((False, nn.Linear(3, 3).weight.is_meta))
        except BaseException as error:
            errors.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=build, args=(inside,)) for inside in (True, True, False)]
    try:
        for thread in threads:
            thread.start()
        stop.wait(0.5)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(before)
    assert errors == []
    assert set(seen) == {(True, True), (False, False)}


PEAK = """
import resource, torch
from torch import nn
from treadle.engine.big_models import *

def peak():
    with open("/proc/self/status") as file:
        return 1024 * int(next(line.split()[1] for line in file if line.startswith("VmHWM:")))

class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(2048, 2048, bias=False) for _ in range(6))
        self.noise = nn.Parameter(torch.randn(2048, 2048))
        self.more = nn.Parameter(torch.randn(2048, 2048))
    def forward(self, x):
        for part in self.parts:
            x = part(x)
        return x
ONE = 4 * 2048 * 2048
torch.set_num_threads(1)
torch.nn.functional.linear(torch.ones(1, 64), torch.ones(64, 64))
nn.Linear(4, 4, device="meta")
start = peak()  # after what torch loads at its first product and its first weights on device meta
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_never_holds_a_second_copy(tmp_path):
    torch.manual_seed(0)
    weights = {f"parts.{i}.weight": torch.randn(2048, 2048) / 45 for i in range(6)}
    weights |= {name: torch.zeros(2048, 2048) for name in ("noise", "more")}
    save_file(weights, tmp_path / "model.safetensors")
    source = f"""{PEAK}
with init_empty_weights():
    model = Wide()
built = peak() - start
load_checkpoint_and_dispatch(model, {str(tmp_path)!r}, {{"": "disk"}})
x = torch.ones(1, 2048)
with torch.no_grad():
    away = model(x)
ran = peak() - start
"""
    streamed = f"""{PEAK.replace("randn", "empty")}
with init_empty_weights():
    model = Wide()
load_checkpoint_and_dispatch(model, {str(tmp_path)!r}, {{"": "cpu"}})
assert not any(p.is_meta for p in model.parameters())
loaded = peak() - start
print(loaded / ONE)
"""
    at_once = {"MALLOC_MMAP_THRESHOLD_": "1000000"}  # what is freed goes back to the system
    away = script(source + "\nprint(built / ONE, ran / ONE)", env=at_once, fresh=True)
    assert away.returncode == 0, away.stderr
    built, ran = map(float, away.stdout.split())
    assert built < 1.5  # one random parameter at a time, of eight
    assert ran < 3.5  # six of eight are run through, one after the other
    done = script(streamed, env=at_once, fresh=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 9  # the eight of the model, and less than one more


# -- planned ---------------------------------------------------------------------------------------------------------


def test_devices_that_are_not_there_are_an_error():
    free = get_max_memory()
    assert free["cpu"] > 2**20
    for device in (99, "cuda:99", "meta:x", "gpu"):
        with pytest.raises(ValueError, match=str(device)):
            infer_auto_device_map(LanguageModel(), {device: "1GB"})
    assert list(get_max_memory({"disk": 1, "cpu": 2, "meta:1": 3, "meta:0": 4})) == ["meta:1", "meta:0", "cpu", "disk"]


def test_module_sizes():
    sizes = compute_module_sizes(empty())
    assert sizes[""] == EMBED + POSITIONS + MASK + 3 * LAYER
    assert sizes["layers"] == 3 * LAYER
    assert sizes["layers.1.norm"] == sizes["layers.1.norm.weight"] + sizes["layers.1.norm.bias"] == 256
    assert sizes["head"] == sizes["embed"] == EMBED
    assert compute_module_sizes(LanguageModel(), buffers_only=True)[""] == MASK + 3 * 128
    halves = compute_module_sizes(LanguageModel(), dtype="float16", special_dtypes={"positions": torch.float32})
    assert halves[""] == (EMBED + MASK + 3 * LAYER) // 2 + POSITIONS
    with pytest.raises(ValueError, match="Did you mean 'positions'"):
        compute_module_sizes(LanguageModel(), special_dtypes={"position": "float32"})
    with pytest.raises(ValueError, match="'float23'"):
        compute_module_sizes(LanguageModel(), dtype="float23")


def test_devices_are_filled_in_order_and_tied_modules_stay_together():
    first = POSITIONS + MASK + EMBED
    two = {"meta:0": first + LAYER, "meta:1": 2 * LAYER}
    assert infer_auto_device_map(empty(), two, ["Block"]) == {
        **{"positions": "meta:0", "mask": "meta:0", "embed": "meta:0", "layers.0": "meta:0"},
        **{"layers.1": "meta:1", "layers.2": "meta:1", "head": "meta:0"},
    }
    assert infer_auto_device_map(empty(), {"meta:0": "1GB"}) == {"": "meta:0"}
    assert infer_auto_device_map(LanguageModel(), {"cpu": "1GB"}) == {"": "cpu"}
    cut = infer_auto_device_map(empty(), {"meta:0": first + 256, "meta:1": "1GB"}, clean_result=False)
    assert (cut["layers.0.scale"], cut["layers.0.norm"], cut["layers.0.up"]) == ("meta:0", "meta:1", "meta:1")
    assert set(cut.values()) == {"meta:0", "meta:1"}


def test_entries_on_one_device_become_one():
    assert clean_device_map({"a.x": 0, "a.y": 0, "b": 1}) == {"a": 0, "b": 1}
    nested = {"a": "cpu", "a.b": "disk", "a.c.d": "cpu", "a.c.e": "cpu"}
    assert clean_device_map(nested) == {"a": "cpu", "a.b": "disk", "a.c": "cpu"}
    assert clean_device_map(nested, "a.c") == {"a.c": "cpu"}


def test_room_is_kept_to_run_what_is_offloaded():
    parameters = LAYER - 128
    first = POSITIONS + MASK + EMBED
    # What is kept: the parameters of the largest layer, and the buffers of both layers that are offloaded.
    enough = first + LAYER + parameters + 2 * 128
    kept = infer_auto_device_map(empty(), {"meta:0": enough, "cpu": "1GB"}, ["Block"])
    assert [name for name, device in kept.items() if device == "cpu"] == ["layers.1", "layers.2"]
    less = infer_auto_device_map(empty(), {"meta:0": enough - 1, "cpu": "1GB"}, ["Block"])
    assert less["layers"] == "cpu"
    away = infer_auto_device_map(empty(), {"meta:0": enough - 256, "cpu": "1GB"}, ["Block"], offload_buffers=True)
    assert away["layers.0"] == "meta:0"
    # A device that can't run the largest layer is of no use, nor is one that has no room at all.
    assert infer_auto_device_map(empty(), {"meta:0": LAYER // 2, "cpu": "1GB"}, ["Block"]) == {"": "cpu"}
    assert infer_auto_device_map(empty(), {"meta:0": 0, "meta:1": "1GB"}) == {"": "meta:1"}
    with pytest.raises(ValueError, match=r"within max_memory: .* of its tensors, starting with 'layers.0.up'"):
        infer_auto_device_map(empty(), {"cpu": first + 400, "disk": 50})


def test_fallback_takes_what_fits():
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(10, 10), nn.Linear(20, 20), nn.Linear(100, 100))
    room = {"meta:0": 2000, "meta:1": "1GB"}
    assert infer_auto_device_map(model, room) == {"": "meta:1"}
    assert infer_auto_device_map(model, room, fallback_allocation=True)["2"] == "meta:0"


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_balanced_is_the_best_cut(devices):
    widths = [30, 5, 60, 20, 20, 45, 10, 33]
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for width in widths))
    sizes = [4 * width * width for width in widths]
    cuts = itertools.combinations(range(1, len(sizes)), devices - 1)
    bounds = ([0, *cut, len(sizes)] for cut in cuts)
    best = min(max(sum(sizes[a:b]) for a, b in itertools.pairwise(bound)) for bound in bounds)
    room = {f"meta:{n}": "1MB" for n in range(devices)}
    limits = get_balanced_memory(model, room)
    assert limits == dict.fromkeys(list(room)[:-1], best) | {f"meta:{devices - 1}": 10**6}
    placed = infer_auto_device_map(model, limits)
    loads = [sum(s for s, d in zip(sizes, placed.values(), strict=True) if d == device) for device in room]
    assert max(loads) == best
    low = get_balanced_memory(model, room, low_zero=True)
    assert low["meta:0"] == 0
    assert get_balanced_memory(model, {"meta:0": 50, "meta:1": 60, "cpu": 7}) == {"meta:0": 50, "meta:1": 60, "cpu": 7}


def test_the_plan_in_words():
    room = {"meta:0": POSITIONS + MASK + EMBED + LAYER, "cpu": "1MB"}
    device_map = {"": "cpu", "layers.0": "meta:0", "layers.1": "meta:0", "layers.2": "disk"}
    lines = device_map_plan(empty(), device_map, room).splitlines()
    rows = [line.split() for line in lines]
    assert ["(the", "model)", "cpu", f"{(POSITIONS + MASK + EMBED) / 1000:.2f}", "kB"] in rows
    assert ["layers.0", "...", "1", "meta:0", f"{2 * LAYER / 1000:.2f}", "kB"] in rows
    assert ["disk", f"{LAYER / 1000:.2f}", "kB", "no", "limit"] in rows
    assert lines[-1] == "tied: embed.weight = head.weight"


# -- loaded and run --------------------------------------------------------------------------------------------------


def write(plain, path, form):
    """The model's checkpoint in one of the forms that can be read."""
    if form == "file":
        save_model(plain, str(path / "one.safetensors"))  # leaves the tied name out
        return path / "one.safetensors"
    if form == "treadle":
        files = stored.write_part(path / "step-1", "model", plain.state_dict())
        return stored.commit(path / "step-1", files, {"step": 1})
    if form == "torch":
        torch.save(plain.state_dict(), path / "model.pt")
        return path / "model.pt"
    state = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    names, places = list(state), {}
    for number in (1, 2):
        part = names[(number - 1) * 9 : number * 9 if number == 1 else None]
        save_file({name: state[name] for name in part}, path / f"model-{number}.safetensors")
        places |= dict.fromkeys(part, f"model-{number}.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return path


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
    assert offloaded(model) == {name for name in model.state_dict() if buffers or not name.endswith("scale")}
    assert_same(model, plain)
    assert offloaded(model) == {name for name in model.state_dict() if buffers or not name.endswith("scale")}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one.safetensors"]  # nothing was copied
    requires = {name for name, p in model.named_parameters() if p.requires_grad}
    remove_hook_from_submodules(model)
    assert not is_dispatched(model)
    assert offloaded(model) == set()
    assert model.head.weight is model.embed.weight
    assert requires == {name for name, p in plain.named_parameters() if p.requires_grad}
    assert_same(model, plain)


def test_no_offloaded_weight_collects_a_gradient(plain, tmp_path):
    model = load_checkpoint_and_dispatch(empty(), write(plain, tmp_path, "file"), {"": "disk"})
    with pytest.raises(ValueError, match="got a gradient"):
        model(inputs()[0][0])["logits"].sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, "float64"], ids=str)
def test_a_dtype_for_all_or_nearly_all(plain, tmp_path, dtype):
    path = write(plain, tmp_path, "file")
    kind = torch.bfloat16 if dtype == torch.bfloat16 else torch.float64
    wanted, norm = copy.deepcopy(plain).to(kind), ["norm"] if kind is torch.bfloat16 else "norm"
    model = empty()
    model.mask = model.mask.to(kind)
    load_checkpoint_and_dispatch(model, path, {"": "disk", "layers.1": "cpu"}, dtype=dtype)
    words = inputs()[0][0]
    with torch.no_grad():
        assert torch.equal(model(words)["logits"], wanted(words)["logits"])
    model = empty()
    load_checkpoint_in_model(model, path, dtype=dtype, keep_in_fp32_modules=norm)
    assert {t.dtype for n, t in model.state_dict().items() if "norm" in n} == {torch.float32}
    assert {t.dtype for n, t in model.state_dict().items() if "norm" not in n} == {kind}


def test_a_real_model_keeps_its_parameters(plain, tmp_path):
    model = LanguageModel()
    before = dict(model.named_parameters())
    assert load_checkpoint_in_model(model, write(plain, tmp_path, "sharded"), strict=False) is None
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
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
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))
    with torch.inference_mode():
        assert torch.equal(model(x), plain(x))
    assert torch.equal(model(x), plain(x))
    assert len(offloaded(model)) > 20
    remove_hook_from_submodules(model)
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))


class Reaches(nn.Module):
    """Reads the weight of a module inside it that it never calls."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return x @ self.inner.weight


def test_weights_read_from_outside_are_preloaded():
    plain, x = nn.Sequential(Reaches(), nn.Linear(4, 4)), torch.randn(2, 4)
    model = cpu_offload(copy.deepcopy(plain), "cpu", preload_module_classes=["Reaches"])
    assert torch.equal(model(x), plain(x))
    with pytest.raises(ValueError, match="preload_module_classes"):
        cpu_offload(copy.deepcopy(plain), "cpu")(x)
    with pytest.warns(UserWarning, match="Did you mean 'Reaches'"):
        cpu_offload(copy.deepcopy(plain), "cpu", preload_module_classes=["Reachs"])


@pytest.mark.parametrize("start", range(8))
def test_bits_do_not_depend_on_the_place_in_the_file(tmp_path, start):
    """Kernels sum in another order where memory is aligned otherwise; one row shows it."""
    torch.manual_seed(0)
    plain, x = nn.Linear(333, 100), torch.randn(1, 333)
    save_file(plain.state_dict() | {"a": torch.zeros(start)}, tmp_path / "model.safetensors")
    model = load_checkpoint_and_dispatch(empty(lambda: nn.Linear(333, 100)), tmp_path, {"": "disk"})
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))


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
    errors = []

    def call():
        try:
            assert_same(model, plain, calls=20)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    other = copy.deepcopy(model)
    remove_hook_from_submodules(other)
    assert_same(other, plain)
    assert is_dispatched(model)
    assert_same(model, plain)


def test_memory_to_disk(plain, tmp_path):
    model = disk_offload(copy.deepcopy(plain), tmp_path / "new" / "folder")
    assert_same(model, plain)
    assert sorted(load_file(tmp_path / "new" / "folder" / "offload.safetensors")) == sorted(
        name for name, _ in plain.named_parameters()
    )
    half = dispatch_model(copy.deepcopy(plain), {"": "cpu", "layers.1": "disk"}, offload_dir=tmp_path / "half")
    assert_same(half, plain)
    shutil.copy(tmp_path / "half" / "offload.safetensors", tmp_path / "again")
    shutil.move(tmp_path / "again", tmp_path / "half" / "offload.safetensors")
    with pytest.raises(ValueError, match=r"offload.safetensors was changed"):
        half(inputs()[0][0])


OFFLOADS = {
    "disk": lambda model, folder: disk_offload(model, folder),
    "memory": lambda model, _: cpu_offload(model, "cpu"),
    "layers": lambda model, folder: dispatch_model(model, {"": "cpu", "layers.1": "disk"}, offload_dir=folder),
    "tied": lambda model, folder: dispatch_model(
        model, {"": "cpu", "embed": "disk", "head": "disk"}, offload_dir=folder
    ),
}


@pytest.mark.parametrize(
    ("how", "safe", "limit"),
    [
        *((how, True, "10GB") for how in OFFLOADS),
        ("disk", False, "10KB"),
        ("tied", True, "10KB"),
        ("layers", False, "10GB"),
    ],
)
def test_weights_of_an_offloaded_model_are_exported(plain, tmp_path, how, safe, limit):
    accelerator = treadle.Accelerator(cpu=True)
    model = OFFLOADS[how](copy.deepcopy(plain), tmp_path / "offloaded")
    assert offloaded(model)
    accelerator.save_model(plain, tmp_path / "plain", limit, safe)
    accelerator.save_model(model, tmp_path / "saved", limit, safe)
    files = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert len(files) > 1 or limit == "10GB"
    if how == "disk":  # otherwise files are filled in another order
        assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == files
    loaded = LanguageModel().eval()
    load_checkpoint_in_model(loaded, tmp_path / "saved", strict=True)
    assert_same(loaded, plain)
    state = accelerator.get_state_dict(model)
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    assert [*state] == [*plain.state_dict()]
    assert state["head.weight"] is state["embed.weight"] or how == "layers"
    assert_same(model, plain)


@pytest.mark.parametrize("is_empty", [True, False])
def test_weights_that_were_offloaded_before(plain, tmp_path, capsys, is_empty):
    """Accelerate's folder of raw bytes: its values count, not those of the model that is dispatched onto it."""
    state = plain.state_dict()
    offload_state_dict(tmp_path / "all", state)

    def build():
        torch.manual_seed(12)
        return empty() if is_empty else LanguageModel()

    assert_same(disk_offload(build(), tmp_path / "all", torch.device("cpu")), plain)
    assert sorted(path.suffix for path in (tmp_path / "all").iterdir()) == [".dat"] * len(state) + [".json"]
    if not is_empty:
        assert "offloaded earlier" in capsys.readouterr().err

    save_file({"x." + name: state[name].clone() for name in state if name.startswith("layers.1")}, tmp_path / "file")
    layer = {name: value for name, value in state.items() if name.startswith("layers.0")}
    offload_state_dict(tmp_path / "some", layer)
    index = json.loads((tmp_path / "some" / "index.json").read_text()) | {
        name: {"safetensors_file": str(tmp_path / "file"), "weight_name": "x." + name, "dtype": "float32"}
        for name in state
        if name.startswith("layers.1")
    }
    model = copy.deepcopy(plain)
    with torch.no_grad():
        for parameter in model.layers[:2].parameters():
            parameter.zero_()
    device_map = {"": "cpu", "layers.0": "disk", "layers.1": "disk"}
    assert_same(dispatch_model(model, device_map, None, None, tmp_path / "some", index), plain)

    with pytest.raises(ValueError, match="neither the model nor the offloaded weights have values for positions"):
        dispatch_model(empty(), {"": "disk"}, offload_dir=tmp_path / "some")
    remove_hook_from_submodules(model)
    misnamed = {name: entry | {"weight_name": "y." + name} for name, entry in index.items() if "weight_name" in entry}
    with pytest.raises(ValueError, match=r"to 'y.layers.1.scale' in .* Did you mean 'x.layers.1.scale'"):
        dispatch_model(model, device_map, None, None, tmp_path / "some", index | misnamed)
    with pytest.raises(ValueError, match=r"the index has no 'safetensors_file' for 'layers.0"):
        dispatch_model(model, device_map, offload_index=index)
    (tmp_path / "some" / "layers.0.up.weight.dat").write_bytes(b"short")
    with pytest.raises(ValueError, match=r"layers.0.up.weight.dat has 5 bytes"):
        dispatch_model(model, device_map, offload_dir=tmp_path / "some")


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
    with pytest.raises(ValueError, match="already dispatched"):
        load_checkpoint_and_dispatch(model, path, {"": "cpu"})


def test_inputs_follow_and_named_ones_stay():
    """Device meta stands for a second one: it computes shapes."""

    class Tail(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, *, cache):
            return {"cache": cache, "where": [cache["k"].device.type, x.device.type], "x": self.linear(x)}

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.tail = nn.Linear(4, 4), Tail()

        def forward(self, x, cache):
            return self.tail(self.head(x), cache=cache)

    device_map = {"head": "cpu", "tail": "meta:0"}
    model = dispatch_model(Two(), device_map, main_device="cpu", skip_keys=["cache", "x"])
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
    other.remove()
    hook.remove()
    assert not second._forward_pre_hooks


def in_cache_layout(path):
    """Turn a checkpoint into links to blobs, as Hugging Face's cache lays it out."""
    blobs = path.parent / "blobs"
    blobs.mkdir()
    for number, file in enumerate(sorted(path.iterdir())):
        file.rename(blobs / f"sha{number}")
        file.symlink_to(Path("..", "blobs", f"sha{number}"))
    return path


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ("file", ""),
        ("file", "one.safetensors"),
        ("torch", "model.pt"),
        ("sharded", ""),
        ("sharded", "model.safetensors.index.json"),
    ],
)
def test_a_checkpoint_of_links(plain, tmp_path, form, name):
    folder = tmp_path / "snapshot"
    folder.mkdir()
    write(plain, folder, form)
    path = in_cache_layout(folder) / name
    assert_same(load_checkpoint_and_dispatch(empty(), path, {"": "cpu"}), plain)


# -- refused ---------------------------------------------------------------------------------------------------------


def damaged(plain, tmp_path, how):
    """A checkpoint with one thing wrong, and what the error must say."""
    path = write(plain, tmp_path, "sharded")
    state = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    index = json.loads((path / "model.safetensors.index.json").read_text())
    if how == "file missing":
        (path / "model-2.safetensors").unlink()
        return path, r"lists model-2.safetensors for layers\.1\..*, but this file is missing from the folder"
    if how == "file cut":
        data = (path / "model-1.safetensors").read_bytes()
        (path / "model-1.safetensors").write_bytes(data[:-10])
        return path, "model-1.safetensors is not a complete safetensors file"
    if how == "path outside":
        index["weight_map"]["positions"] = "../model-1.safetensors"
    if how == "wrong file":
        index["weight_map"]["positions"] = "model-2.safetensors"
    if how == "link to a path outside":
        index["weight_map"]["positions"] = "../outside/model-1.safetensors"
        (tmp_path / "outside").mkdir()
        (path / "model-1.safetensors").rename(tmp_path / "outside" / "model-1.safetensors")
        (tmp_path / "outside" / "index").write_text(json.dumps(index))
        (path / "model.safetensors.index.json").unlink()
        (path / "model.safetensors.index.json").symlink_to(tmp_path / "outside" / "index")
        return path, "'../outside"
    if how in ("path outside", "wrong file"):
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
        return path, "'../model" if how == "path outside" else "not in the listed files: positions"
    if how == "shape":
        state["positions"] = state["positions"][:, :5].clone()
        words = r"positions has shape \[16, 5\], but \[16, 32\] in the model"
    elif how == "missing":
        del state["layers.1.up.weight"], state["layers.1.up.bias"]
        words = r"neither the checkpoint nor the model has values for layers\.1\.up\.weight, layers\.1\.up\.bias"
    elif how == "pickle":
        torch.save({"positions": copy.deepcopy}, path / "model.pt")
        return path / "model.pt", "has no tensors at the top level"
    elif how == "nothing":
        return path / "none", "none: it does not exist"
    save_file(state, path / "bad.safetensors")
    return path / "bad.safetensors", words


WRONG = [
    "file missing",
    "file cut",
    "path outside",
    "link to a path outside",
    "wrong file",
    "shape",
    "missing",
    "pickle",
]


@pytest.mark.parametrize("how", [*WRONG, "nothing"])
def test_a_wrong_checkpoint_is_named_and_changes_nothing(plain, tmp_path, how):
    path, words = damaged(plain, tmp_path, how)
    model = empty()
    with pytest.raises(ValueError, match=words):
        load_checkpoint_and_dispatch(model, path, {"": "cpu"})
    assert offloaded(model) == {name for name in model.state_dict() if not name.endswith("scale")}


@pytest.mark.parametrize("how", ["nested", "legacy"])
def test_other_files_of_torch(plain, tmp_path, how):
    state = plain.state_dict()
    new = how == "nested"
    torch.save({"state_dict": state} if new else state, tmp_path / "model.pt", _use_new_zipfile_serialization=new)
    model = load_checkpoint_and_dispatch(empty(), tmp_path / "model.pt", {"": "cpu"})
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_names_that_only_one_side_has(plain, tmp_path):
    state = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    del state["layers.0.scale"]
    save_file(state | {"surplus": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.warns(
        UserWarning, match=r"does not have \(surplus\) and lacks tensors of the model \(layers\.0\.scale\)"
    ):
        model = load_checkpoint_and_dispatch(empty(), tmp_path, {"": "disk"}, offload_buffers=True)
    assert_same(model, plain)
    with pytest.raises(
        ValueError, match=r"does not have \(surplus\) and lacks tensors of the model \(layers\.0\.scale\)"
    ):
        load_checkpoint_in_model(empty(), tmp_path, strict=True)
    for name in ("full_state_dict", "broadcast_from_rank0"):
        with pytest.raises(ValueError, match=name):
            load_checkpoint_in_model(empty(), tmp_path, **{name: name != "full_state_dict"})


@pytest.mark.parametrize(
    ("device_map", "words"),
    [
        (
            {"": "cpu", "layer.0": "disk"},
            r"'layer\.0', but the model has no such module or tensor\. Did you mean 'layers",
        ),
        ({"embed": "cpu", "head": "cpu", "mask": "cpu"}, r"no device for positions, layers\.0\."),
        (
            {"": "cpu", "head": "disk"},
            r"'embed\.weight' to 'cpu' and 'head\.weight' to 'disk', but they are one tensor",
        ),
        ({"": "cpu", "layers": "dsk"}, "'dsk' is not a valid device.*Did you mean 'disk'"),
        ({"": 99}, "=99 does not exist on this machine"),
        ("balance", "device_map='balance' is not one of auto"),
    ],
    ids=["unknown", "missed", "tied", "device", "absent", "word"],
)
def test_a_map_that_can_not_be_followed(plain, tmp_path, device_map, words):
    path = write(plain, tmp_path, "file")
    with pytest.raises(ValueError, match=words):
        load_checkpoint_and_dispatch(empty(), path, device_map)
    with pytest.raises(ValueError, match=r"positions.* to 'disk', but offload_dir is not set"):
        dispatch_model(copy.deepcopy(plain), {"": "disk"})
    with pytest.raises(ValueError, match="main_device='disk' can't compute anything, because it only"):
        dispatch_model(copy.deepcopy(plain), {"": "disk"}, main_device="disk", offload_dir=tmp_path)
    with pytest.raises(ValueError, match="are used together by MultiheadAttention"):
        dispatch_model(nn.MultiheadAttention(4, 2), {"": "cpu", "out_proj": "disk"}, offload_dir=tmp_path)
