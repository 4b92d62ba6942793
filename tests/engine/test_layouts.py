"""A checkpoint of any layout of the processes loads under any other, and nothing is gathered on the way."""

import json
import os
import shutil

import pytest
import torch
from processes import run
from safetensors.torch import load_file
from torch import nn
from torch.distributed.tensor import DTensor
from treadle.engine import checkpoint
from treadle.engine.checkpoint import read_part
from treadle.strategies import DDP, FSDP

import treadle


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
    part = x[world.rank * 12 // world.size : (world.rank + 1) * 12 // world.size]
    accelerator.backward(model(part).square().mean())
    optimizer.step()
    optimizer.zero_grad()


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
@pytest.mark.parametrize("layout", ["single", "zero", "fsdp3", "hybrid", "tensor"])
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
    whole = sum(t.numel() for t in load_file(root / "single" / "model.safetensors").values())
    for layout, files in (("fsdp", 2), ("fsdp3", 3), ("hybrid", 2), ("tensor", 4)):
        shards = sorted(name for name in os.listdir(root / layout) if name.startswith("model-"))
        sizes = [sum(t.numel() for t in load_file(root / layout / name).values()) for name in shards]
        assert len(sizes) == files
        assert sum(sizes) == whole  # each element once
        assert max(sizes) < whole / files + 60
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
    from safetensors import safe_open
    from safetensors.torch import save_file
    from treadle.engine import disk

    with safe_open(path / name, framework="pt") as file:
        tensors, notes = {key: file.get_tensor(key).clone() for key in file.keys()}, file.metadata()  # noqa: SIM118
    change(tensors, notes)
    save_file(tensors, path / name, notes)
    document = json.loads((path / "manifest.json").read_text())
    document["files"][name] = disk.describe(path / name)
    (path / "manifest.json").write_text(json.dumps(document))


def edit(note, key, value):
    def change(tensors, notes):
        content = json.loads(notes[note])
        content[key] = value
        notes[note] = json.dumps(content)

    return change


@pytest.mark.guarantee
@pytest.mark.parametrize(
    "change",
    [
        edit("shapes", "head.weight", [10**12, 6]),
        edit("shapes", "head.weight", [1, 1]),
        edit("shapes", "head.weight", [-6, -6]),
        edit("shapes", "head.weight", "x"),
        edit("DCP_SHARDING_INFO", "head.weight", {"saved_offsets": [0, 0]}),
        edit("DCP_SHARDING_INFO", "head.weight", {"saved_offsets": [3, 3]}),
        edit("DCP_SHARDING_INFO", "head.weight", {"saved_offsets": [-1, 0]}),
        edit("DCP_SHARDING_INFO", "head.weight", {"saved_offsets": [0]}),
        edit("DCP_SHARDING_INFO", "head.weight", {"saved_offsets": None}),
        edit("DCP_SHARDING_INFO", "head.weight", 7),
        lambda tensors, notes: notes.update(DCP_SHARDING_INFO="[" * 100_000),
        lambda tensors, notes: tensors.pop("head.weight"),
        lambda tensors, notes: tensors.update({"head.weight": tensors["head.weight"].float()}),
    ],
    ids=range(13),
)
def test_shards_that_do_not_fit_together(checkpoints, tmp_path, change):
    path = tmp_path / "x"
    shutil.copytree(checkpoints[0] / "fsdp", path)
    forge(path, "model-shard-00001.safetensors", change)
    checkpoint.verify(path)
    with pytest.raises(ValueError, match=r"x: .*Use another checkpoint"):
        read_part(path, "model")


def test_a_missing_shard_is_noticed(checkpoints, tmp_path):
    path = tmp_path / "x"
    shutil.copytree(checkpoints[0] / "fsdp", path)
    (path / "optimizer-shard-00001.safetensors").unlink()
    with pytest.raises(ValueError, match=r"optimizer-shard-00001\.safetensors is missing"):
        checkpoint.verify(path)
