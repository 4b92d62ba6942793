"""A checkpoint of any layout of the processes loads under any other, and nothing is gathered on the way."""

import json
import os
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from safetensors.torch import save as serialize
from support.differences import whole
from support.models import Normed, take_step
from support.processes import run
from support.saved_nets import same
from support.stored import read_part, replace_file
from torch import nn
from torch.distributed.tensor import DTensor
from treadle.engine.checkpoint import store
from treadle.strategies import DDP, FSDP

import treadle

pytestmark = pytest.mark.long


class Net(nn.Module):
    """Rows that do not divide, a tied weight, a buffer, a part with a state of its own, and very small parameters."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)) for _ in range(2))
        self.head = nn.Linear(6, 6, bias=False)
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.head.weight
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(3))
        self.note = {"kind": "own"}

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.tied(self.head(x)) * self.scale

    def get_extra_state(self):
        return self.note

    def set_extra_state(self, state):
        self.note = state

    def parallelize(self, mesh):
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        for block in self.blocks:
            parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


LAYOUTS = {
    "single": (1, lambda: "single"),
    "ddp": (2, lambda: DDP()),
    "zero": (2, lambda: DDP(zero=True)),
    "fsdp": (2, lambda: FSDP(auto_wrap_policy=10)),
    "fsdp3": (3, lambda: FSDP(auto_wrap_policy=10)),
    "hybrid": (4, lambda: FSDP(data_parallel_replicate=2)),
    "tensor": (4, lambda: FSDP(tensor_parallel_size=2)),
}


def prepared(layout, seed):
    torch.manual_seed(seed)
    accelerator = treadle.Accelerator(cpu=True, strategy=LAYOUTS[layout][1](), mixed_precision="64-true")
    net = Net()
    optimizer = torch.optim.AdamW(
        [
            {"params": [*net.blocks[0].parameters()], "lr": 0.02},
            {"params": [p for name, p in net.named_parameters() if not name.startswith("blocks.0")]},
        ],
        lr=0.01,
    )
    return accelerator, net, *accelerator.prepare(net, optimizer)


def step(accelerator, model, optimizer, number):
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
    world = accelerator.data_world
    take_step(accelerator, model, optimizer, x[world.rank * 12 // world.size : (world.rank + 1) * 12 // world.size])


def saved(layout, root):
    accelerator, net, model, optimizer = prepared(layout, seed=1)
    for number in range(3):
        step(accelerator, model, optimizer, number)
    net.seen += 5
    net.note = {"kind": layout}
    full_tensor, DTensor.full_tensor = DTensor.full_tensor, None  # nothing is gathered
    accelerator.save_state(f"{root}/{layout}")
    DTensor.full_tensor = full_tensor
    step(accelerator, model, optimizer, 3)
    return accelerator.get_state_dict(model)


def loaded(layout, root, sources):
    """For each checkpoint: the weights that are loaded and those after another step, whole."""
    found = {}
    for source in sources:
        accelerator, net, model, optimizer = prepared(layout, seed=2)
        accelerator.load_state(f"{root}/{source}")
        assert net.note == {"kind": source}
        first = {
            name: v.clone() for name, v in accelerator.get_state_dict(model).items() if v is not None and name[0] != "_"
        }
        step(accelerator, model, optimizer, 3)
        found[source] = first, {n: v for n, v in accelerator.get_state_dict(model).items() if n[0] != "_"}
    return found


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """One of each layout, saved after the same three steps, and the weights after the fourth."""
    root = tmp_path_factory.mktemp("layouts")
    after = {layout: run(saved, world, layout, root)[0] for layout, (world, _) in LAYOUTS.items()}
    return root, after


@pytest.mark.guarantee
@pytest.mark.parametrize(
    "layout",
    ["single", "zero", *(pytest.param(one, marks=pytest.mark.exhaustive) for one in ("fsdp3", "hybrid", "tensor"))],
)
def test_every_layout_loads_every_other(checkpoints, layout):
    root, after = checkpoints
    world, _ = LAYOUTS[layout]
    found = run(loaded, world, layout, root, list(LAYOUTS))[0]
    for source, (first, second) in found.items():
        stored = read_part(root / source, "model")
        assert first.keys() == stored.keys()
        assert all(torch.equal(first[name], stored[name]) for name in stored), source  # moving changes no bit
        for name, value in second.items():  # the optimizer went on where it was
            torch.testing.assert_close(value, after["single"][name], rtol=1e-9, atol=1e-11)


def test_each_process_writes_what_it_has(checkpoints):
    root, _ = checkpoints
    total = sum(t.numel() for t in load_file(root / "single" / "model.safetensors").values())
    for layout, files in (("fsdp", 2), ("fsdp3", 3), ("hybrid", 2), ("tensor", 4)):
        shards = sorted(name for name in os.listdir(root / layout) if name.startswith("model-"))
        sizes = [sum(t.numel() for t in load_file(root / layout / name).values()) for name in shards]
        assert len(sizes) == files
        assert sum(sizes) == total  # each element once
        assert max(sizes) < total / files + 60
    owned = [
        json.loads((root / "zero" / f"{name}.json").read_text())["slots"]
        for name in ("optimizer", "optimizer-rank-00001")
    ]
    assert not set(owned[0]) & set(owned[1])


def test_torch_reads_a_sharded_model(checkpoints):
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load

    root, _ = checkpoints
    stored = read_part(root / "fsdp", "model")
    state = {name: torch.zeros_like(value) for name, value in stored.items() if name != "tied.weight"}
    load(state, storage_reader=HuggingFaceStorageReader(root / "fsdp"), no_dist=True)
    assert all(torch.equal(value, stored[name]) for name, value in state.items())


def forge(path, name, change):
    """Rewrite one shard's notes, and make the manifest agree."""
    with safe_open(path / name, framework="pt") as file:
        tensors, notes = {key: file.get_tensor(key).clone() for key in file.keys()}, file.metadata()  # noqa: SIM118
    change(tensors, notes)
    replace_file(path, name, serialize(tensors, notes))


def edit(note, value):
    def change(tensors, notes):
        notes[note] = json.dumps(json.loads(notes[note]) | {"head.weight": value})

    return change


@pytest.mark.guarantee
@pytest.mark.parametrize(
    "change",
    [
        *(edit("shapes", shape) for shape in ([10**12, 6], [1, 1], [-6, -6], "x")),
        *(
            edit("DCP_SHARDING_INFO", {"saved_offsets": offsets})
            for offsets in ([2, 0], [0, 0], [3, 3], [-1, 0], [0], None)
        ),
        edit("DCP_SHARDING_INFO", 7),
        lambda tensors, notes: notes.update(DCP_SHARDING_INFO="[" * 100_000),
        lambda tensors, notes: tensors.pop("head.weight"),
        lambda tensors, notes: tensors.update({"head.weight": tensors["head.weight"].float()}),
    ],
    ids=range(14),
)
def test_shards_that_do_not_fit_together(checkpoints, tmp_path, change):
    path = tmp_path / "x"
    shutil.copytree(checkpoints[0] / "fsdp", path)
    forge(path, "model-shard-00001.safetensors", change)
    store.verify(path)
    with pytest.raises(ValueError, match=r"x.*Copy or download (it|the checkpoint) again"):
        read_part(path, "model")


def own_buffers(folder):
    """Each process's buffers, loaded with the models in one call or in two, and only with them."""
    accelerator = treadle.Accelerator(cpu=True, strategy="fsdp")
    net = Normed()
    accelerator.prepare(net)
    mean = net.batchnorm.running_mean
    mean.fill_(5.0 + accelerator.process_index)
    path = accelerator.save_state(f"{folder}/x")
    found = []

    def after(load):
        mean.zero_()
        load()
        found.append(mean[0].item())

    after(lambda: accelerator.load_state(path))
    after(lambda: (accelerator.load_state(path, state=False), accelerator.load_state(path, models=False)))
    after(lambda: accelerator.load_state(path, models=False))
    handle = accelerator.register_load_state_pre_hook(lambda models, folder: models.clear())
    after(lambda: accelerator.load_state(path))
    handle.remove()
    after(lambda: accelerator.load_state(path, state=False))  # to look at it: the same on all processes
    return found


def test_buffers_of_each_process(tmp_path):
    assert run(own_buffers, 2, tmp_path) == [[5, 5, 0, 0, 5], [6, 6, 0, 0, 5]]


class Average:
    """An average of a model, laid out as its parameters are."""

    def __init__(self, model):
        self.kept = {name: 2 * parameter.detach() for name, parameter in model.named_parameters()}

    def state_dict(self):
        return {"kept": self.kept, "several": [1, (self.kept["weight"],)]}

    def load_state_dict(self, state):
        self.kept, (_, (again,)) = state["kept"], state["several"]
        assert again is self.kept["weight"]


def averaged(strategy, source, target):
    """Saves an average, or one that is loaded from ``source``; returns it, whole."""
    torch.manual_seed(7)
    accelerator = treadle.Accelerator(cpu=True, strategy=strategy)
    net = nn.Linear(3, 5)
    accelerator.prepare(net)
    average = Average(net)
    accelerator.register_for_checkpointing(average=average)
    if source is not None:
        average.kept["weight"].zero_()
        average.kept["bias"].zero_()
        accelerator.load_state(source)
        assert [type(value) for value in average.kept.values()] == [type(p.data) for p in net.parameters()]
    accelerator.save_state(target)
    return [whole(value) for value in average.kept.values()]


def averaged_on_two(folder):
    averaged("fsdp", None, folder / "two")
    return [averaged("fsdp", folder / name, folder / "again") for name in ("one", "two")]


def test_a_registered_average_of_shards(tmp_path):
    wanted = averaged("single", None, tmp_path / "one")
    results = run(averaged_on_two, 2, tmp_path)[0]
    results += [averaged("single", tmp_path / name, tmp_path / "again") for name in ("one", "two")]
    for result in results:
        same(result, wanted)
