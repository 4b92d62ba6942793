"""What an Accelerator writes for others, and its checkpoints that name themselves."""

import contextlib
import errno
import io
import json
import os
import time
import uuid
import warnings
from collections import Counter, OrderedDict, defaultdict
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from support.differences import differences
from support.models import Count, take_step
from support.processes import run
from support.resume_trials import Uneven
from support.stored import DEAD, read_part
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler
from treadle.engine.checkpoint import filesystem
from treadle.engine.checkpoint.store import CheckpointStore, read_manifest

import treadle
from treadle import utils


def cpu(**options):
    return treadle.Accelerator(cpu=True, **options)


def with_model():
    accelerator = cpu()
    accelerator.prepare(nn.Linear(1, 1))
    return accelerator


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


WORLDS = pytest.mark.parametrize("world", [1, 2])


def work_in_turn(folder):
    """What each scenario returns, or none; each has a folder of its own."""
    scenarios = [save_models, count_on, refused_hooks, skipping, resuming]
    scenarios += [failing_on_one, saving_apart, wrong_on_one] if cpu().num_processes == 2 else []
    for scenario in scenarios:
        (folder / scenario.__name__).mkdir(exist_ok=True)
    return {scenario.__name__: scenario(folder / scenario.__name__) for scenario in scenarios}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """By number of processes, the folder and what each of them found: one start for all of it."""
    folders = {world: tmp_path_factory.mktemp("saved") for world in (1, 2)}
    return {world: (folder, run(work_in_turn, world, folder)) for world, folder in folders.items()}


# -- weights for others ----------------------------------------------------------------------------------------------


def save_models(folder):
    accelerator = cpu()
    model = accelerator.prepare(Tied())
    accelerator.save_model(model, f"{folder}/whole")
    accelerator.save_model(model, f"{folder}/shards", max_shard_size=100)
    accelerator.save_model(model, f"{folder}/torch", max_shard_size="1KB", safe_serialization=False)
    accelerator.save_model(model, f"{folder}/again", max_shard_size=100)
    accelerator.save_model(model, f"{folder}/again")
    accelerator.save({"rank": accelerator.process_index, "x": torch.arange(3)}, f"{folder}/data.pt")
    accelerator.save({"x": torch.arange(3)}, f"{folder}/data.safetensors", safe_serialization=True)
    if accelerator.is_main_process:  # alone
        for bad, safe in ((nn.Linear(1, 1), False), ([lambda: 0], False), ({"x": 1}, True)):
            with pytest.raises(TypeError, match=r"stored|supports only a dict"):
                accelerator.save(bad, f"{folder}/bad", safe_serialization=safe)
        accelerator.save_model(model, folder)


@pytest.mark.long
@WORLDS
def test_what_is_saved_for_others_is_read_by_other_tools(saved, world):
    tmp_path = saved[world][0] / "save_models"
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
    assert weights["head.weight"].data_ptr() == weights["embedding.weight"].data_ptr()
    other.middle.weight.data.zero_()
    other.load_state_dict(weights)  # every name is there
    assert torch.equal(other.middle.weight, wanted.middle.weight)
    assert os.listdir(tmp_path / "again") == ["model.safetensors"]

    files = [path.name for path in tmp_path.iterdir() if path.is_file()]
    assert sorted(files) == ["data.pt", "data.safetensors", "model.safetensors"]
    found = torch.load(tmp_path / "data.pt", weights_only=True)
    assert (found["rank"], found["x"].tolist()) == (0, [0, 1, 2])
    assert load_file(tmp_path / "data.safetensors")["x"].tolist() == [0, 1, 2]


@pytest.mark.guarantee
@pytest.mark.parametrize("size", ["10GB", 100], ids=str)
@pytest.mark.parametrize("safe", [True, False])
def test_an_earlier_save_of_the_other_kind_goes(tmp_path, monkeypatch, safe, size):
    """Loaders would take the older weights, or half of them."""
    accelerator = cpu()
    old, new = Tied(), Tied()
    with torch.no_grad():
        new.middle.weight.fill_(7)
    accelerator.save_model(old, tmp_path, max_shard_size=size, safe_serialization=not safe)
    (tmp_path / "config.json").write_text("{}")
    seen = []

    def unlink(path):
        model = Tied()
        treadle.load_weights(model, tmp_path)
        seen.append(model.middle.weight[0, 0].item())
        os.unlink(path)

    monkeypatch.setattr(filesystem, "unlink", unlink)
    accelerator.save_model(new, tmp_path, max_shard_size=size, safe_serialization=safe)
    before = old.middle.weight[0, 0].item()
    assert set(seen) <= {before, 7.0}
    assert seen == sorted(seen, key=lambda value: value == 7)  # never back again
    model = Tied()
    treadle.load_weights(model, tmp_path)
    assert model.middle.weight[0, 0] == 7
    other = ".bin" if safe else ".safetensors"
    assert not [name for name in os.listdir(tmp_path) if other in name]
    if not safe and size == 100:
        places = json.loads((tmp_path / "pytorch_model.bin.index.json").read_text())["weight_map"]
        assert places["head.weight"] == places["embedding.weight"]


@pytest.mark.guarantee
def test_save_model_destroys_no_checkpoint(tmp_path):
    accelerator = cpu()
    model = accelerator.prepare(Tied())
    accelerator.save_state(tmp_path)
    before = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
    for safe in (True, False):
        with pytest.raises(ValueError, match="is a checkpoint"):
            accelerator.save_model(model, tmp_path, safe_serialization=safe)
    assert {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)} == before
    accelerator.load_state(tmp_path)


UNSTORABLE = {
    "sparse": (torch.eye(2).to_sparse(), r"torch\.sparse_coo tensor.*\.to_dense"),
    "meta": (torch.empty(2, device="meta"), "on the meta device"),
    "complex32": (torch.ones(2, dtype=torch.complex32), r"torch\.complex32 tensor"),
}


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("kind", UNSTORABLE)
def test_tensors_that_a_file_does_not_take(kind, tmp_path):
    value, words = UNSTORABLE[kind]
    model = nn.Module()
    model.register_buffer("odd", value)
    for safe in (True,) if kind == "complex32" else (True, False):
        with pytest.raises(TypeError, match=f"odd is a .*{words}"):
            cpu().save_model(model, tmp_path / "folder", safe_serialization=safe)
    with pytest.raises(TypeError, match=words):
        cpu().save(model.state_dict(), tmp_path / "file", safe_serialization=True)
    assert os.listdir(tmp_path) == []
    if kind == "complex32":
        cpu().save_model(model, tmp_path, safe_serialization=False)
        assert torch.load(tmp_path / "pytorch_model.bin", weights_only=True)["odd"].dtype == value.dtype


@pytest.mark.parametrize("size", ["10XB", "GB", 0, True, "-1"])
def test_sizes_that_are_none(size, tmp_path):
    with pytest.raises(ValueError, match="max_shard_size="):
        cpu().save_model(nn.Linear(1, 1), tmp_path, max_shard_size=size)


@pytest.mark.parametrize("opened", [False, True])
def test_save_notes_tied_tensors(opened, tmp_path):
    path = tmp_path / "x.safetensors"
    with path.open("wb") if opened else contextlib.nullcontext(path) as file:
        cpu().save(Tied().state_dict(), file, safe_serialization=True)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embedding.weight"}
        assert "head.weight" not in list(file.keys())


def test_what_save_writes_is_read_without_trust():
    state = Tied().state_dict()
    value = {
        "none": None, "numbers": [1, 2.5, 1 + 2j, True, 10**400], "text": ("a", b"b"), "set": {1, 2},
        "torch": [torch.float32, torch.device("cpu"), torch.Size([2]), nn.Parameter(torch.ones(1))],
        "weights": state, (1, "key"): OrderedDict(a=1), "counts": Counter("aab"),
        "numpy": {"loss": np.float64(0.5), np.int64(3): [np.float32(2), np.bool_(True), np.str_("x")]},
        "default": defaultdict(list, a=[1]),
    }  # fmt: skip
    buffer = io.BytesIO()
    cpu().save(value, buffer)
    buffer.seek(0)
    found = torch.load(buffer, weights_only=True)
    weights = found.pop("weights")
    assert weights._metadata == state._metadata
    assert all(torch.equal(weights[name], state[name]) for name in state)
    assert repr(found.pop("numpy")) == "{'loss': 0.5, 3: [2.0, True, 'x']}"
    assert repr(found.pop("default")) == "{'a': [1]}"
    assert repr(found) == repr({name: value[name] for name in found})
    assert type(value["default"]) is defaultdict  # ours is left as it is


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Path("x"), "str"),
        (timedelta(1), "total_seconds"),
        (np.ones(2), "from_numpy"),
        (frozenset({1}), "a set"),
    ],
    ids=["path", "timedelta", "array", "frozenset"],
)
def test_what_is_not_read_without_trust_is_refused(value, words, tmp_path):
    with pytest.raises(TypeError, match=rf"obj\.a\.1 is a \w+, which torch\.load\(weights_only=True\) does .*{words}"):
        cpu().save({"a": [0, value]}, tmp_path / "x.pt")
    assert os.listdir(tmp_path) == []


# -- checkpoints that name themselves ----------------------------------------------------------------------------------


def automatic(folder, limit=None, **options):
    config = utils.ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=limit, **options)
    accelerator = cpu(project_config=config)
    net = nn.Linear(1, 1)
    return accelerator, *accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))


def count_on(folder):
    accelerator, model, optimizer = automatic(folder, limit=2)
    for _ in range(3):
        take_step(accelerator, model, optimizer, torch.ones(1, 1))
        path = accelerator.save_state()
    first = path.name, accelerator.save_iteration, sorted(os.listdir(f"{folder}/checkpoints"))
    weight = accelerator.unwrap_model(model).weight.item()
    accelerator.wait_for_everyone()

    accelerator, model, optimizer = automatic(folder, limit=2)
    with pytest.raises((ValueError, RuntimeError), match="already has checkpoint_2"):
        accelerator.save_state()
    info = accelerator.load_state()
    assert accelerator.unwrap_model(model).weight.item() == weight
    take_step(accelerator, model, optimizer, torch.ones(1, 1))
    accelerator.save_state()
    return first, (info["step"], accelerator.steps, sorted(os.listdir(f"{folder}/checkpoints")))


@pytest.mark.long
@WORLDS
def test_the_count_goes_on_after_a_resume(saved, world):
    for found in saved[world][1]:
        first, again = found["count_on"]
        assert first == ("checkpoint_2", 3, ["checkpoint_1", "checkpoint_2"])
        assert again == (3, 4, ["checkpoint_2", "checkpoint_3"])


def test_a_skipped_checkpoint_is_named(tmp_path):
    accelerator, _model, _optimizer = automatic(tmp_path)
    for _ in range(2):
        accelerator.save_state()
    (tmp_path / "checkpoints" / "checkpoint_1" / "model.safetensors").write_bytes(b"")
    with pytest.warns(UserWarning, match="checkpoint_1: model.safetensors has 0 bytes"):
        accelerator.load_state()
    assert accelerator.save_iteration == 2  # no name is used again
    (tmp_path / "checkpoints" / "checkpoint_0" / "manifest.json").unlink()
    with pytest.raises(ValueError, match="no checkpoint that can be loaded"):
        accelerator.load_state()


def test_without_names_a_directory_is_needed(tmp_path):
    for call in (cpu().save_state, cpu(project_dir=tmp_path).load_state):
        with pytest.raises(ValueError, match="automatic_checkpoint_naming=True"):
            call()


def test_options_of_other_formats_warn_and_nothing_is_lost(tmp_path):
    accelerator = cpu()
    model = accelerator.prepare(nn.Linear(1, 1))
    with pytest.warns(UserWarning, match="safe_serialization=False.* has no effect: .* never pickle"):
        accelerator.save_state(tmp_path / "c", safe_serialization=False)
    assert (tmp_path / "c" / "model.safetensors").is_file()
    saved = model.weight.clone()
    nn.init.zeros_(model.weight)
    with pytest.warns(UserWarning, match="load_kwargs=.'weights_only': False.. has no effect"):
        accelerator.load_state(tmp_path / "c", {"weights_only": False}, map_location="cpu")
    assert torch.equal(model.weight, saved)


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
    assert set(read_manifest(tmp_path / "c").hooked) == {"second.pt"}
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


def test_hooks_need_a_directory_on_a_disk():
    accelerator = with_model()
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: open(f"{folder}/mine", "w").close())
    with pytest.raises(ValueError, match=r"pre-hook writes files into one directory on a disk.*upload it afterwards"):
        accelerator.save_state(f"memory://{uuid.uuid4().hex}/c")


def refused_hooks(folder):
    """What hooks wrote goes if one of them fails on one process, or the state is no data."""
    accelerator = with_model()

    def write(given, weights, output_dir):
        with open(f"{output_dir}/{accelerator.process_index}.bin", "wb") as file:
            file.write(b"123")

    def fail(given, weights, output_dir):
        if accelerator.is_last_process:
            raise LookupError("a hook's")

    def exchange(given, weights, output_dir):
        accelerator.gather(torch.ones(1))

    def expect_nothing():
        accelerator.wait_for_everyone()
        assert os.listdir(folder) == []
        accelerator.wait_for_everyone()

    accelerator.register_save_state_pre_hook(write)
    handles = [accelerator.register_save_state_pre_hook(hook) for hook in (fail, exchange)]
    with pytest.raises((LookupError, RuntimeError), match="a hook's"):
        accelerator.save_state(f"{folder}/c")
    for handle in handles:
        handle.remove()
    expect_nothing()
    with pytest.raises((TypeError, RuntimeError), match="can't be stored"):
        accelerator.save_state(f"{folder}/c", parts={"mine": {"call": print}})
    expect_nothing()
    for name, what in (
        ("manifest.json", "reserved for the checkpoint's own file"),
        ("model.safetensors", "wrote model.safetensors, but this name is reserved for the checkpoint's own file"),
    ):
        handle = accelerator.register_save_state_pre_hook(lambda *a, n=name: open(f"{a[2]}/{n}", "w").close())
        with pytest.raises((ValueError, RuntimeError), match=what):
            accelerator.save_state(f"{folder}/c")
        handle.remove()
        expect_nothing()
    return sorted(read_manifest(accelerator.save_state(f"{folder}/c")).hooked)


def failing_on_one(folder):
    def fail():
        raise LookupError("no state here")

    accelerator = with_model()
    first, second = Count(), Count()
    second.state_dict = lambda: {"sum": accelerator.reduce(torch.ones(1)).item()}
    accelerator.register_for_checkpointing(first, second)
    if accelerator.is_last_process:
        first.state_dict = fail
    with pytest.raises((LookupError, RuntimeError), match="no state here"):
        accelerator.save_state(f"{folder}/c")
    first.state_dict = dict
    accelerator.save_state(f"{folder}/c")
    return read_part(f"{folder}/c", "state")["registered"]["Count_1"]["sum"]


@pytest.mark.long
@WORLDS
def test_what_a_hook_wrote_goes_with_a_save_that_fails(saved, world):
    assert [found["refused_hooks"] for found in saved[world][1]] == [[f"{rank}.bin" for rank in range(world)]] * world


# -- what goes into one ------------------------------------------------------------------------------------------------


def test_a_directory_of_others_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("mine")
    accelerator = with_model()
    calls = []
    accelerator.register_save_state_pre_hook(lambda *args: calls.append(args))
    with pytest.raises(ValueError, match="mine exists and is not a checkpoint"):
        accelerator.save_state(tmp_path / "mine")
    assert calls == []
    assert os.listdir(tmp_path) == ["mine"]


# -- those that stand there --------------------------------------------------------------------------------------------


def test_the_newest_is_found_between_two_renames_and_a_save_that_is_under_way_is_left(tmp_path):
    accelerator, *_ = automatic(tmp_path)
    for _ in range(2):
        path = accelerator.save_state()
    path.rename(path.parent / f".{path.name}.{DEAD}.old")
    begun = path.parent / f".checkpoint_2.{DEAD}.part"
    begun.mkdir()
    (begun / "model.safetensors").write_bytes(b"half")
    with pytest.warns(UserWarning, match="checkpoint_1: restored"):
        automatic(tmp_path)[0].load_state()
    assert path.is_dir()
    assert os.listdir(begun) == ["model.safetensors"]


def test_weights_only_is_no_checkpoint_to_go_on_from(tmp_path):
    accelerator, *_ = automatic(tmp_path)
    accelerator.save_state()
    accelerator.save_state(weights_only=True)
    other, *_ = automatic(tmp_path)
    with pytest.warns(UserWarning, match="checkpoint_1 contains only weights"):
        other.load_state()
    assert other.save_iteration == 2
    automatic(tmp_path)[0].load_state(state=False)


def test_old_ones_that_can_not_go_are_named_and_the_others_go(tmp_path):
    accelerator, *_ = automatic(tmp_path, limit=1)
    folder = tmp_path / "checkpoints"
    accelerator.project_configuration.total_limit = None
    for _ in range(4):
        accelerator.save_state()
    accelerator.project_configuration.total_limit = 1
    (folder / "checkpoint_0").rename(tmp_path / "elsewhere")
    (folder / "checkpoint_0").symlink_to(tmp_path / "elsewhere")
    (folder / "checkpoint_1" / "manifest.json").write_text("{")
    (folder / "checkpoint_2" / "tokenizer.json").write_text("mine")
    with pytest.warns(UserWarning, match="exceeds total_limit") as said:
        accelerator.save_state()
    assert sorted(os.listdir(folder)) == [f"checkpoint_{n}" for n in (0, 1, 2, 4)]
    for number, why in enumerate(("is a link", "manifest.json can't be read", "to the checkpoint (tokenizer.json)")):
        assert [why in str(one.message) for one in said if f"checkpoint_{number} in" in str(one.message)] == [True]
    assert CheckpointStore(tmp_path / "elsewhere").find() == []
    assert (tmp_path / "elsewhere" / "manifest.json").is_file()


def test_a_full_disk_is_said_though_the_directory_could_not_be_made(tmp_path, monkeypatch):
    def full(path):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("treadle.engine.checkpoint.filesystem.mkdir", full)
    with pytest.raises(OSError, match=r"No space left.*This process needs [\d,]+ bytes, but only [\d,]+ are free"):
        cpu().save_state(tmp_path / "a" / "b" / "c")


# -- the middle of an epoch --------------------------------------------------------------------------------------------


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
        "own batches": DataLoader(data, batch_sampler=Uneven(13)),
        "unbatched": DataLoader(data, batch_size=None, sampler=SequentialSampler(data)),
        "stream": DataLoader(Stream(), 2),
        "list": [[1.0], [2.0], [3.0], [4.0], [5.0]],
    }


def read(accelerator, batches):
    return [accelerator.gather_for_metrics(torch.as_tensor(batch)).tolist() for batch in batches]


def three_epochs(kind, skip=None):
    """The batches of three epochs; the second is cut at batch ``skip``."""
    accelerator, loader = prepare_seeded(kind, 5)
    epochs = [read(accelerator, loader)]
    if skip is None:
        return [*epochs, read(accelerator, loader), read(accelerator, loader)]
    active = accelerator.skip_first_batches(loader, skip)
    if kind not in ("stream", "list"):
        assert len(active) == max(0, len(loader) - skip)
    epochs.append(read(accelerator, active))
    return [*epochs, read(accelerator, loader)]


def skipping(_):
    for kind in loaders():
        whole = three_epochs(kind)
        for skip in (0, 1, 2, 99):
            cut = three_epochs(kind, skip)
            assert cut == [whole[0], whole[1][skip:], whole[2]], (kind, skip)


def resuming(folder):
    """A checkpoint in the middle of the second epoch; a script that counts batches itself goes on from it."""
    found = {}
    for kind in loaders():
        if kind == "list":
            continue
        accelerator, loader = prepare_seeded(kind, 5)
        read(accelerator, loader)
        rest = []
        for number, batch in enumerate(loader):
            gathered = read(accelerator, [batch])
            if number >= 2:
                rest += gathered
            if number == 1:
                accelerator.save_state(f"{folder}/{kind}")
        after = read(accelerator, loader)
        for skips in (False, True):
            accelerator, loader = prepare_seeded(kind, 77)
            accelerator.load_state(f"{folder}/{kind}")
            left = accelerator.skip_first_batches(loader, 2) if skips else loader
            found[kind, skips] = [read(accelerator, left), read(accelerator, loader)] == [rest, after]
    return found


def saving_apart(folder):
    accelerator = with_model()
    rank = accelerator.process_index
    with pytest.raises(ValueError, match=rf"rank 0: {folder}/rank0; rank 1: {folder}/rank1\), but all ranks write"):
        accelerator.save_state(f"{folder}/rank{rank}")
    accelerator.save_state(f"{folder}/{'./' * rank}c")


@pytest.mark.long
@WORLDS
def test_skipping_after_load_state_skips_nothing_twice(saved, world):
    for found in saved[world][1]:
        assert [case for case, equal in found["resuming"].items() if not equal] == []


@pytest.mark.long
def test_a_directory_that_differs_by_rank_is_refused(saved):
    """A name with a clock's time in it would leave a checkpoint of each rank, none of them whole."""
    assert os.listdir(saved[2][0] / "saving_apart") == ["c"]


@pytest.mark.long
def test_what_fails_on_one_rank_is_an_error_on_all(saved):
    assert [found["failing_on_one"] for found in saved[2][1]] == [2.0, 2.0]
    first, second = (found["wrong_on_one"] for found in saved[2][1])
    assert first in second
    assert "rank 0" in second


def prepare_seeded(kind, seed):
    torch.manual_seed(seed)
    accelerator = cpu()
    return accelerator, accelerator.prepare_data_loader(loaders()[kind])


def wrong_on_one(folder):
    accelerator = with_model()
    with pytest.raises((TypeError, RuntimeError), match=r"info\.loss is a tensor") as caught:
        accelerator.save_state(f"{folder}/a", info={"loss": torch.ones(1)} if accelerator.is_main_process else {})
    return str(caught.value)


def resuming_at_an_end(folder):
    """The epochs that scripts read which count them in different ways, resumed from the second epoch's last batch."""
    found = {}
    for kind in loaders():
        if kind in ("list", "stream"):  # its length is not known
            continue
        accelerator, loader = prepare_seeded(kind, 5)
        read(accelerator, loader)
        for number, _ in enumerate(loader, 1):
            if number == len(loader):
                path = accelerator.save_state(f"{folder}/{kind}", info={"size": number})
        whole = [read(accelerator, loader) for _ in range(2)]

        def resume(path=path, kind=kind, **options):
            accelerator, loader = prepare_seeded(kind, 77)
            return accelerator, loader, accelerator.load_state(path, **options)

        accelerator, loader, info = resume()
        found[kind, "counted by steps"] = [read(accelerator, loader) for _ in range(2, 4)] == whole
        accelerator, loader, info = resume()
        found[kind, "the returned epoch"] = [read(accelerator, loader) for _ in range(info["epoch"], 4)] == whole
        accelerator, loader, info = resume()
        counted = []
        while loader.epoch < 4:
            counted.append(read(accelerator, loader))
        found[kind, "the loader's epoch"] = counted == whole
        for skipped, first in ((0, whole[0]), (2, whole[0][2:]), (info["size"], [])):
            accelerator, loader, info = resume()
            epochs = [read(accelerator, accelerator.skip_first_batches(loader, skipped)), read(accelerator, loader)]
            found[kind, f"skipping {skipped}"] = epochs == [first, whole[1] if skipped < info["size"] else whole[0]]
        accelerator, loader, info = resume(finish_epoch=False)
        epochs = [read(accelerator, loader) for _ in range(info["epoch"], 4)]
        found[kind, "what was left"] = epochs == [[], *whole]
    return found


@pytest.mark.long
@pytest.mark.guarantee
@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_a_resume_from_the_last_batch_loses_no_epoch(world, tmp_path):
    for found in run(resuming_at_an_end, world, str(tmp_path)):
        assert found
        assert [case for case, equal in found.items() if not equal] == []


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


def test_neither_skipping_nor_resuming_reads_what_was_read(tmp_path):
    class Watched(list):
        def __getitem__(self, index):
            seen.append(index)
            return index

    def make():
        return DataLoader(Watched(range(6)), 2)

    accelerator, seen = cpu(), []
    batches = iter(loader := accelerator.prepare(make()))
    next(batches), next(batches)
    accelerator.save_state(tmp_path / "c")
    accelerator.load_state(tmp_path / "c")
    for rest in (loader, treadle.skip_first_batches(loader, 2), treadle.skip_first_batches(make(), 2)):
        seen.clear()
        assert [batch.tolist() for batch in rest] == [[4, 5]]
        assert seen == [4, 5]


# -- disks that refuse -----------------------------------------------------------------------------------------------


@pytest.mark.guarantee
@pytest.mark.parametrize("small_disk", ["nr_inodes=12"], indirect=True)
def test_a_disk_without_free_inodes_is_not_called_out_of_bytes(small_disk):
    accelerator = with_model()

    def fill(number):
        accelerator.save_state(small_disk / str(number))
        return fill(number + 1)

    with pytest.raises(OSError, match=r"no room for another file \(inode\), although") as raised:
        fill(0)
    assert raised.value.errno == errno.ENOSPC
    with contextlib.suppress(OSError):
        for number in range(12):
            (small_disk / f"file-{number}").touch()
    with pytest.raises(OSError, match=r"no room for another file \(inode\), although"):
        CheckpointStore(small_disk).probe()


def test_a_directory_of_checkpoints_that_became_a_file_is_named(tmp_path):
    accelerator = with_model()
    (tmp_path / "run").write_text("a file")
    for blocking in (True, False):
        with pytest.raises(OSError, match=r"run is not a directory\. Earlier checkpoints are kept"):  # noqa: PT012
            accelerator.save_state(tmp_path / "run" / "last", blocking=blocking)
            accelerator.finish_saving()
    with pytest.raises(OSError, match=r"run is not a directory\. Choose"):
        CheckpointStore(tmp_path / "run").probe()


def save_on_rank_zero(root):
    """As many public loops do it; the last save is of all ranks."""
    torch.manual_seed(0)
    accelerator = treadle.Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.Linear(2, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    seconds = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(4):
            take_step(accelerator, model, optimizer, torch.ones(2, 2))
            if step < 3 and accelerator.is_main_process:
                began = time.monotonic()
                accelerator.save_state(f"{root}/{step}")
                seconds.append(time.monotonic() - began)
    accelerator.save_state(f"{root}/all")
    states = {}
    for name in ("2", "all"):
        accelerator.load_state(f"{root}/{name}")
        states[name] = [value.clone() for value in accelerator.unwrap_model(model).state_dict().values()]
        steps = [state["step"].item() for state in optimizer.state.values()]
        assert steps == [3 if name == "2" else 4] * 4
    said = [str(warning.message) for warning in caught if "only rank zero called save_state" in str(warning.message)]
    return seconds, states, len(said)


@pytest.mark.long
def test_rank_zero_may_save_alone_without_sharding(tmp_path):
    (seconds, states, said), (none, others, silent) = run(save_on_rank_zero, 2, str(tmp_path))
    assert differences(states, others) == []
    assert differences(states["2"], states["all"]) != []
    assert seconds[0] > 1.0 > max(seconds[1:])  # the other rank is waited for once
    assert (none, said, silent) == ([], 1, 0)
