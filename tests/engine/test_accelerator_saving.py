"""What an Accelerator writes for others, and its checkpoints that name themselves."""

import io
import json
import os

import pytest
import torch
from processes import run
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

import treadle
from treadle import utils


def cpu(**options):
    return treadle.Accelerator(cpu=True, **options)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(8, 4)
        self.middle = nn.Linear(4, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(self.middle(self.embedding(x)))


# -- weights for others ----------------------------------------------------------------------------------------------


def save_models(folder):
    accelerator = cpu()
    model = accelerator.prepare(Tied())
    accelerator.save_model(model, f"{folder}/whole")
    accelerator.save_model(model, f"{folder}/shards", max_shard_size=100)
    accelerator.save_model(model, f"{folder}/torch", max_shard_size="1KB", safe_serialization=False)
    accelerator.save_model(model, f"{folder}/again", max_shard_size=100)
    accelerator.save_model(model, f"{folder}/again")


@pytest.mark.parametrize("world", [1, 2])
def test_save_model_is_read_by_other_tools(world, tmp_path):
    run(save_models, world, str(tmp_path))
    wanted, other = Tied(), Tied()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert os.listdir(tmp_path / "whole") == ["model.safetensors"]
    load_model(other, tmp_path / "whole" / "model.safetensors")  # safetensors' own, which knows tied weights
    assert all(torch.equal(a, b) for a, b in zip(wanted.parameters(), other.parameters(), strict=True))
    with safe_open(tmp_path / "whole" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embedding.weight"}

    index = json.loads((tmp_path / "shards" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 4 * (32 + 16 + 4)}
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    assert sorted(os.listdir(tmp_path / "shards")) == [*files, "model.safetensors.index.json"]
    loaded = {}
    for name, file in index["weight_map"].items():
        loaded[name] = load_file(tmp_path / "shards" / file)[name]
    assert sorted(loaded) == ["embedding.weight", "middle.bias", "middle.weight"]
    assert all(torch.equal(value, wanted.state_dict()[name]) for name, value in loaded.items())

    weights = torch.load(tmp_path / "torch" / "pytorch_model.bin", weights_only=True)
    assert torch.equal(weights["embedding.weight"], wanted.embedding.weight)
    assert os.listdir(tmp_path / "again") == ["model.safetensors"]


def test_a_failed_save_model_leaves_the_older_one_whole(tmp_path, monkeypatch):
    accelerator = cpu()
    model = accelerator.prepare(Tied())
    accelerator.save_model(model, tmp_path, max_shard_size=100)
    before = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
    with torch.no_grad():
        model.middle.weight.zero_()
    written = []

    def full(path, tensors, notes):
        if written:
            raise OSError("disk full")
        written.append(path)
        path.write_bytes(b"new")

    monkeypatch.setattr("treadle.engine.disk.write_tensors", full)
    with pytest.raises(OSError, match="disk full"):
        accelerator.save_model(model, tmp_path, max_shard_size=100)
    assert {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)} == before


@pytest.mark.parametrize("size", ["10XB", "GB", 0, True, "-1"])
def test_sizes_that_are_none(size, tmp_path):
    with pytest.raises(ValueError, match="max_shard_size="):
        cpu().save_model(nn.Linear(1, 1), tmp_path, max_shard_size=size)


def save_objects(folder):
    accelerator = cpu()
    rank = accelerator.process_index
    accelerator.save({"rank": rank, "x": torch.arange(3)}, f"{folder}/data.pt")
    accelerator.save({"x": torch.arange(3)}, f"{folder}/data.safetensors", safe_serialization=True)
    for bad, safe in ((nn.Linear(1, 1), False), ([lambda: 0], False), ({"x": 1}, True)):
        with pytest.raises((TypeError, RuntimeError), match=r"stored|takes a dict"):
            accelerator.save(bad, f"{folder}/bad", safe_serialization=safe)
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("world", [1, 2])
def test_save(world, tmp_path):
    assert run(save_objects, world, str(tmp_path))[0] == ["data.pt", "data.safetensors"]
    found = torch.load(tmp_path / "data.pt", weights_only=True)
    assert found["rank"] == 0
    assert found["x"].tolist() == [0, 1, 2]
    assert load_file(tmp_path / "data.safetensors")["x"].tolist() == [0, 1, 2]


def test_save_to_an_open_file():
    buffer = io.BytesIO()
    cpu().save({"x": torch.ones(2)}, buffer)
    buffer.seek(0)
    assert torch.load(buffer, weights_only=True)["x"].tolist() == [1, 1]


# -- checkpoints that name themselves ----------------------------------------------------------------------------------


def automatic(folder, limit=None, **options):
    config = utils.ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=limit, **options)
    accelerator = cpu(project_config=config)
    net = nn.Linear(1, 1)
    return accelerator, *accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))


def step(accelerator, model, optimizer):
    accelerator.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    optimizer.zero_grad()


def count_on(folder):
    accelerator, model, optimizer = automatic(folder, limit=2)
    for _ in range(3):
        step(accelerator, model, optimizer)
        path = accelerator.save_state()
    found = [path.name, accelerator.save_iteration, sorted(os.listdir(f"{folder}/checkpoints"))]
    weight = accelerator.unwrap_model(model).weight.item()
    accelerator.wait_for_everyone()

    accelerator, model, optimizer = automatic(folder, limit=2)
    with pytest.raises((ValueError, RuntimeError), match="has checkpoint_2 already"):
        accelerator.save_state()
    info = accelerator.load_state()
    assert accelerator.unwrap_model(model).weight.item() == weight
    step(accelerator, model, optimizer)
    accelerator.save_state()
    found += [info["step"], accelerator.steps, sorted(os.listdir(f"{folder}/checkpoints"))]
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        with open(f"{folder}/checkpoints/checkpoint_3/model.safetensors", "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\xff")
    accelerator.wait_for_everyone()
    accelerator, model, optimizer = automatic(folder)
    found.append(accelerator.load_state()["step"])
    return [*found, accelerator.save_iteration]


@pytest.mark.parametrize("world", [1, 2])
def test_the_count_goes_on_after_a_resume(world, tmp_path):
    for found in run(count_on, world, str(tmp_path)):
        assert found == [
            "checkpoint_2",
            3,
            ["checkpoint_1", "checkpoint_2"],
            3,
            4,
            ["checkpoint_2", "checkpoint_3"],
            3,  # the newest is damaged
            4,
        ]


def test_a_skipped_checkpoint_is_named(tmp_path):
    accelerator, _model, _optimizer = automatic(tmp_path)
    for _ in range(2):
        accelerator.save_state()
    (tmp_path / "checkpoints" / "checkpoint_1" / "model.safetensors").write_bytes(b"")
    with pytest.warns(UserWarning, match="checkpoint_1: model.safetensors has 0 bytes"):
        accelerator.load_state()
    (tmp_path / "checkpoints" / "checkpoint_0" / "manifest.json").unlink()
    with pytest.raises(ValueError, match="no checkpoint that can be loaded"):
        accelerator.load_state()


def test_without_names_a_directory_is_needed(tmp_path):
    for call in (cpu().save_state, cpu(project_dir=tmp_path).load_state):
        with pytest.raises(ValueError, match="automatic_checkpoint_naming=True"):
            call()
    with pytest.raises(ValueError, match="never pickle"):
        cpu().save_state(tmp_path / "c", safe_serialization=False)
    with pytest.raises(ValueError, match="load_kwargs"):
        cpu().load_state(tmp_path / "c", {"map_location": "cpu"})


def test_hooks(tmp_path):
    accelerator = cpu()
    models = accelerator.prepare(nn.Linear(1, 1), nn.Linear(1, 1))
    calls = []

    def save(given, weights, folder):
        calls.append([len(given), len(weights)])
        torch.save(weights.pop(), f"{folder}/second.pt")
        os.mkdir(f"{folder}/deeper")

    def load(given, folder):
        calls.append(len(given))
        accelerator.unwrap_model(given.pop()).load_state_dict(torch.load(f"{folder}/second.pt", weights_only=True))

    handles = [accelerator.register_save_state_pre_hook(save), accelerator.register_load_state_pre_hook(load)]
    wanted = [model.weight.item() for model in models]
    accelerator.save_state(tmp_path / "c")
    assert not (tmp_path / "c" / "model-1.json").exists()
    assert sorted(p.name for p in (tmp_path / "c").iterdir() if p.is_dir()) == ["deeper"]
    with torch.no_grad():
        for model in models:
            model.weight.zero_()
    accelerator.load_state(tmp_path / "c")
    assert [model.weight.item() for model in models] == wanted
    assert calls == [[2, 2], 2]
    for handle in handles:
        handle.remove()
    accelerator.save_state(tmp_path / "c")
    accelerator.load_state(tmp_path / "c")
    assert calls == [[2, 2], 2]
    assert not (tmp_path / "c" / "second.pt").exists()


# -- the middle of an epoch --------------------------------------------------------------------------------------------


class Blocks(BatchSampler):
    """Batches of growing length, of a sampler of its own."""

    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        indices, length = list(self.sampler), 1
        while indices:
            yield indices[:length]
            indices, length = indices[length:], length % 3 + 1

    def __len__(self):
        return len(list(iter(self)))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.rand(13).tolist())


def loaders():
    generator = torch.Generator().manual_seed(11)
    data = [float(i) for i in range(13)]
    return {
        "plain": DataLoader(data, 2),
        "shuffled": DataLoader(data, 2, shuffle=True),
        "generator": DataLoader(data, 2, shuffle=True, generator=generator),
        "short": DataLoader(data, 2, shuffle=True, drop_last=True),
        "own batches": DataLoader(data, batch_sampler=Blocks(torch.utils.data.RandomSampler(data))),
        "unbatched": DataLoader(data, batch_size=None, sampler=SequentialSampler(data)),
        "stream": DataLoader(Stream(), 2),
        "list": [[1.0], [2.0], [3.0], [4.0], [5.0]],
    }


def read(accelerator, batches):
    return [accelerator.gather_for_metrics(torch.as_tensor(batch)).tolist() for batch in batches]


def three_epochs(kind, skip=None, state=None):
    """The batches of three epochs; the second is cut at batch ``skip``, or taken up there by another Accelerator."""
    torch.manual_seed(5)
    accelerator = cpu()
    loader = accelerator.prepare_data_loader(loaders()[kind])
    epochs = [read(accelerator, loader)]
    if skip is None:
        return [*epochs, read(accelerator, loader), read(accelerator, loader)]
    active = accelerator.skip_first_batches(loader, skip)
    if kind not in ("stream", "list"):
        assert len(active) == max(0, len(loader) - skip)
    epochs.append(read(accelerator, active))
    return [*epochs, read(accelerator, loader)]


def skipping():
    for kind in loaders():
        whole = three_epochs(kind)
        for skip in (0, 1, 2, 99):
            cut = three_epochs(kind, skip)
            assert cut == [whole[0], whole[1][skip:], whole[2]], (kind, skip)
    return True


@pytest.mark.parametrize("world", [1, 2])
def test_an_epoch_without_its_first_batches(world):
    assert run(skipping, world) == [True] * world


def resuming(folder):
    """A checkpoint in the middle of the second epoch; a script that counts batches itself goes on from it."""
    found = {}
    for kind in loaders():
        if kind == "list":
            continue
        torch.manual_seed(5)
        accelerator = cpu()
        loader = accelerator.prepare_data_loader(loaders()[kind])
        read(accelerator, loader)
        rest = []
        for number, batch in enumerate(loader):
            gathered = read(accelerator, [batch])
            if number >= 2:
                rest += gathered
            if number == 1:
                accelerator.save_state(f"{folder}/{kind}")
        after = read(accelerator, loader)
        torch.manual_seed(77)
        accelerator = cpu()
        loader = accelerator.prepare_data_loader(loaders()[kind])
        accelerator.load_state(f"{folder}/{kind}")
        found[kind] = read(accelerator, accelerator.skip_first_batches(loader, 2)) == rest
        found[kind] &= read(accelerator, loader) == after
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_skipping_after_load_state_skips_nothing_twice(world, tmp_path):
    for found in run(resuming, world, str(tmp_path)):
        assert all(found.values()), found


def test_a_checkpoint_of_the_last_batch_begins_the_next_epoch(tmp_path):
    accelerator = cpu()
    loader = accelerator.prepare(DataLoader(range(4), 2))
    for _ in loader:
        accelerator.save_state(tmp_path / "c")
    other = cpu()
    loader = other.prepare(DataLoader(range(4), 2))
    other.load_state(tmp_path / "c")
    assert read(other, other.skip_first_batches(loader, 0)) == [[0, 1], [2, 3]]
    assert loader.epoch == 2


def test_loaders_that_were_not_prepared():
    torch.manual_seed(0)
    wanted = [batch.tolist() for batch in DataLoader(range(7), 2, shuffle=True)]
    torch.manual_seed(0)
    loader = DataLoader(range(7), 2, shuffle=True)
    active = treadle.skip_first_batches(loader, 2)
    assert [batch.tolist() for batch in active] == wanted[2:]
    assert (len(active), active.batch_size) == (2, 2)
    assert list(treadle.skip_first_batches([1, 2, 3], 1)) == [2, 3]
    with pytest.raises(ValueError, match="num_batches=-1"):
        treadle.skip_first_batches(loader, -1)


def test_skipping_reads_no_data():
    class Watched(torch.utils.data.Dataset):
        seen = []

        def __len__(self):
            return 6

        def __getitem__(self, index):
            self.seen.append(index)
            return index

    for loader in (cpu().prepare(DataLoader(Watched(), 2)), DataLoader(Watched(), 2)):
        Watched.seen.clear()
        assert [batch.tolist() for batch in treadle.skip_first_batches(loader, 2)] == [[4, 5]]
        assert Watched.seen == [4, 5]
