"""A checkpoint that is one file: what opens it, and what is found when it is damaged or made to deceive."""

import errno
import io
import json
import os
import shutil
import struct
import zipfile

import pytest
import torch
from support import checkpoint_dicts
from support.checkpoint_dicts import loader
from support.differences import differences
from support.trainers import NO_OUTPUT
from torch import nn
from torch.utils.serialization import config
from treadle.engine.checkpoint import OpenCheckpoint, filesystem, is_checkpoint, one_file, store
from treadle.engine.checkpoint.filesystem import TensorFile
from treadle.engine.checkpoint.one_file import _Pickler, lay_out, write
from treadle.engine.checkpoint.parts import Manifest
from treadle.trainer.checkpointing import lightning_layout

import treadle


class Net(nn.Module):
    """With a tied weight, several dtypes, a view that is not contiguous, and a tensor without elements."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.tied = self.first
        self.register_buffer("strided", torch.arange(12.0).view(4, 3).t())
        self.register_buffer("short", torch.arange(5).to(torch.bfloat16))
        self.register_buffer("tiny", torch.arange(4.0).to(torch.float8_e4m3fn))
        self.register_buffer("unsigned", torch.arange(4).to(torch.uint16))
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("scalar", torch.tensor(True))

    def forward(self, x):
        return self.first(x)


class Task(checkpoint_dicts.Task):
    def __init__(self, lr=0.1):
        super().__init__(lr)
        self.net = Net()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A whole checkpoint, one of weights only, and their task."""
    folder = tmp_path_factory.mktemp("saved")
    torch.manual_seed(1)
    task, trainer = Task(), treadle.Trainer(max_epochs=1, default_root_dir=folder, **NO_OUTPUT)
    trainer.fit(task, loader())
    trainer.save_checkpoint(folder / "whole.ckpt")
    trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    return folder, task, trainer


@pytest.mark.parametrize("mmap", [False, True])
@pytest.mark.parametrize("offsets", [False, True])
def test_torch_opens_it_after_a_copy(saved, mmap, offsets, tmp_path):
    folder, task, trainer = saved
    moved = tmp_path / "moved-ü.pt"
    shutil.copy(folder / "whole.ckpt", moved)
    with config.patch("load.calculate_storage_offsets", offsets):
        content = torch.load(moved, weights_only=True, mmap=mmap)
    assert not differences(content["state_dict"], dict(task.state_dict()))
    assert not differences(content["optimizer_states"], [trainer.optimizers[0].state_dict()])
    assert content["state_dict"]["net.first.weight"].data_ptr() == content["state_dict"]["net.tied.weight"].data_ptr()
    assert content["hyper_parameters"] == {"lr": 0.1}
    assert (content["epoch"], content["global_step"]) == (1, 8)
    assert torch.serialization.get_unsafe_globals_in_checkpoint(moved) == []
    from_memory = torch.load(io.BytesIO(moved.read_bytes()), weights_only=True)
    assert not differences(from_memory["state_dict"], dict(task.state_dict()))
    assert torch.load(moved, map_location="meta")["state_dict"]["net.first.weight"].shape == (4, 4)


def test_tensors_are_stored_once_and_aligned(saved):
    folder, task, _ = saved
    with zipfile.ZipFile(folder / "weights.ckpt") as archive:
        assert archive.testzip() is None
        data = [entry for entry in archive.infolist() if "/data/" in entry.filename and entry.file_size]
        for entry in data:
            with archive.open(entry) as record:
                assert record._orig_compress_start % 64 == 0  # where the content begins
    names = {entry.filename for entry in archive.infolist()}
    assert len(names) == len(archive.infolist())
    distinct = {tensor.data_ptr() for tensor in task.state_dict().values() if tensor.numel()}
    assert len(data) == len(distinct)


def test_both_sides_name_the_same_records(saved):
    """Also the optimizer's: what other programs read of its state are the bytes that Treadle reads."""
    folder, task, _ = saved
    opened = OpenCheckpoint(folder / "whole.ckpt")
    opened.verify()
    model = opened.read_part("model")
    assert not differences(model, dict(task.state_dict()))
    content = torch.load(folder / "whole.ckpt", weights_only=True)
    slots = opened.read_part("optimizer")["slots"]
    by_number = content["optimizer_states"][0]["state"]
    for number, (name, _) in enumerate(task.named_parameters()):
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(slots[name][key], by_number[number][key])


class Copying(Task):
    """Its ``state_dict`` returns other tensors from each call."""

    def state_dict(self, *args, **kwargs):
        return {name: value.clone() for name, value in super().state_dict(*args, **kwargs).items()}


@pytest.mark.parametrize("blocking", [True, False])
def test_a_state_dict_of_copies_is_stored_once(saved, tmp_path, blocking):
    task, trainer = Copying(), treadle.Trainer(max_epochs=1, default_root_dir=tmp_path, **NO_OUTPUT)
    trainer.fit(task, loader())
    trainer.save_checkpoint(tmp_path / "copies", blocking=blocking)
    trainer.accelerator.finish_saving()
    store.verify(tmp_path / "copies")
    assert not differences(torch.load(tmp_path / "copies")["state_dict"], task.state_dict())
    treadle.load_weights(Task(), tmp_path / "copies")
    trainer.fit(Copying(), loader(), ckpt_path=tmp_path / "copies")


STATE = {"w": torch.zeros(2), "bias": torch.zeros(2)}
FILES = {"model.safetensors": TensorFile(STATE, {"format": "pt"}), "state.json": b"{}"}


def forge(path, document):
    """Write a file with valid digests, whose sides need not name the same weights."""
    files = dict(FILES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_file, "_take_weights", lambda state, files: state)
        layout = lay_out(files, document)
    write(path, layout, files, lambda entries, records: Manifest.build(entries, {}, 1, records=records).source)


@pytest.mark.long
def test_every_flipped_byte_is_found(tmp_path):
    path = tmp_path / "flipped.ckpt"
    forge(path, {"state_dict": STATE})
    store.verify(path)
    original = path.read_bytes()
    for position in range(len(original)):
        flipped = bytearray(original)
        flipped[position] ^= 1 << position % 8
        path.write_bytes(flipped)
        with pytest.raises(ValueError, match=r"flipped\.ckpt"):
            store.verify(path)


def test_every_truncation_is_found(tmp_path):
    path = tmp_path / "cut.ckpt"
    forge(path, {"state_dict": STATE})
    whole = path.read_bytes()
    for content in (whole + b"x", *(whole[:size] for size in range(len(whole)))):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"cut\.ckpt"):
            store.verify(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state | {"w": torch.ones(2)},
        lambda state: state | {"more": torch.ones(2)},
        lambda state: {"bias": state["bias"]},
        lambda state: state | {"w": state["bias"]},
        lambda state: state | {"w": state["w"][:1]},
        lambda state: state | {"w": state["w"].view(torch.int32)},
    ],
)
def test_a_file_whose_sides_differ_is_refused(change, tmp_path):
    forge(tmp_path / "right", {"state_dict": STATE})
    store.verify(tmp_path / "right")
    forge(tmp_path / "forged", {"state_dict": change(STATE)})
    with pytest.raises(ValueError, match="does not agree with what Treadle reads"):
        store.verify(tmp_path / "forged")


def hidden_pickle(patch):
    """The pickle that torch reads is in no record."""
    write_all = one_file.ZipWriter.add

    def add(self, name, size, pieces):
        entry = write_all(self, name, size, pieces)
        if name == "data.pkl":
            del self.records[name]
            self._gaps.update(b"".join(map(bytes, pieces)))
        return entry

    patch.setattr(one_file.ZipWriter, "add", add)


def other_place(patch):
    """The zip file's directory leads torch to other bytes than the manifest."""
    make = one_file.make_directory_entry
    patch.setattr(
        one_file,
        "make_directory_entry",
        lambda path, crc, size, start: make(path, crc, size, start + 64 * path.endswith(b"data/0")),
    )


def other_order(patch):
    """torch would swap the bytes of each number."""
    patch.setitem(one_file.CONSTANTS, "byteorder", b"big")


def more_records(patch):
    """torch would take the file for a TorchScript module."""
    patch.setitem(one_file.CONSTANTS, "constants.pkl", b"")


@pytest.mark.parametrize("change", [hidden_pickle, other_place, other_order, more_records])
def test_a_file_in_which_torch_would_find_other_records_is_refused(change, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        change(patch)
        forge(tmp_path / "forged", {"state_dict": STATE})
    with pytest.raises(ValueError, match=r"zip structure|byteorder is not what Treadle writes"):
        store.verify(tmp_path / "forged")


class Attack:
    def __reduce__(self):
        return os.mkdir, ("attacked",)


def test_a_pickle_that_would_run_code_runs_nowhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    forge(tmp_path / "hostile", {"state_dict": STATE, "more": Attack()})
    with pytest.raises(ValueError, match=r"asks to run posix\.mkdir"):
        store.verify(tmp_path / "hostile")
    with pytest.raises(ValueError, match=r"asks to run posix\.mkdir"):
        treadle.load_weights(nn.Linear(1, 1), tmp_path / "hostile")
    assert not (tmp_path / "attacked").exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda records: records | {"end": 10},
        lambda records: records | {"gaps": 1},
        lambda records: records | {"entries": {"data/0": {"at": 0, "bytes": -1, "xxh3_128": "0" * 32}}},
        lambda records: records | {"entries": records["entries"] | {"late": {"at": 0, "bytes": 1, "xxh3_128": "0"}}},
        lambda records: [],
    ],
)
def test_a_manifest_that_lies_about_records_is_refused(change, tmp_path):
    def lie(entries, records):
        document = json.loads(Manifest.build(entries, {}, 1, records=records).source)
        return json.dumps({**document, "records": change(document["records"])}).encode()

    write(tmp_path / "liar", lay_out(FILES, {"state_dict": STATE}), FILES, lie)
    with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
        store.verify(tmp_path / "liar")


def test_what_is_a_checkpoint(saved, tmp_path):
    torch.save({"state_dict": {}}, tmp_path / "torch.ckpt")
    (tmp_path / "text").write_text("text")
    assert is_checkpoint(saved[0] / "weights.ckpt")
    assert not any(is_checkpoint(tmp_path / name) for name in ("torch.ckpt", "text", "missing"))
    with pytest.raises(ValueError, match="not a checkpoint that Treadle can resume from"):
        OpenCheckpoint(tmp_path / "torch.ckpt")
    with pytest.raises(FileNotFoundError, match="does not exist"):
        OpenCheckpoint(tmp_path / "missing")


def test_what_a_save_may_replace(saved, tmp_path):
    trainer = saved[2]
    (tmp_path / "empty").touch()
    torch.save({}, tmp_path / "torch")
    trainer.save_checkpoint(tmp_path / "directory", format="directory")
    for name in ("empty", "torch", "directory"):
        trainer.save_checkpoint(tmp_path / name)
        assert (tmp_path / name).is_file()
        store.verify(tmp_path / name)
    trainer.save_checkpoint(tmp_path / "empty", format="directory")
    assert (tmp_path / "empty").is_dir()
    store.verify(tmp_path / "empty")
    (tmp_path / "text").write_text("of the user")
    (tmp_path / "empty" / "tokenizer.json").write_text("of the user")
    for name, reason in (("text", "is not a checkpoint"), ("empty", "tokenizer.json")):
        with pytest.raises(ValueError, match=reason):
            trainer.save_checkpoint(tmp_path / name)
    assert (tmp_path / "text").read_text() == (tmp_path / "empty" / "tokenizer.json").read_text() == "of the user"
    assert sorted(os.listdir(tmp_path)) == ["directory", "empty", "text", "torch"]


def test_a_full_disk_is_named_with_what_is_needed_and_nothing_is_left(saved, tmp_path, monkeypatch):
    trainer = saved[2]
    trainer.save_checkpoint(tmp_path / "last")
    before = (tmp_path / "last").read_bytes()

    def full(path, write):
        path.write_bytes(before[: len(before) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(filesystem, "write_stream", full)
    with pytest.raises(OSError, match=r"No space left on device\. This process needs [0-9,]+ bytes") as caught:
        trainer.save_checkpoint(tmp_path / "last")
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(tmp_path) == ["last"]
    assert (tmp_path / "last").read_bytes() == before


class Odd(Task):
    """Adds values that not every reader knows, and the keys and items that hashing makes delicate."""

    def on_save_checkpoint(self, checkpoint):
        keys = [torch.device("cpu"), torch.float32, 2**70, -1.5, None, (1, ("a", (2,))), tuple(range(20)), b"x"]
        checkpoint["odd"] = {"dict": dict.fromkeys(keys, 1), "set": set(keys), "frozen": frozenset({frozenset({1})})}
        checkpoint["sizes"] = {torch.Size([1]): torch.Size([2, 3])}


def test_what_is_saved_for_others_is_never_refused_here(tmp_path):
    task, trainer = Odd(), treadle.Trainer(max_epochs=1, default_root_dir=tmp_path, **NO_OUTPUT)
    trainer.fit(task, loader())
    trainer.save_checkpoint(tmp_path / "odd", weights_only=True)
    store.verify(tmp_path / "odd")
    content = torch.load(tmp_path / "odd", weights_only=True)["odd"]
    assert len(content["dict"]) == len(content["set"]) == 8


def test_parameters_that_others_cannot_read_are_left_out_for_them(tmp_path):
    values = {"sparse": torch.eye(2).to_sparse(), "meta": torch.empty(1, device="meta"), "dense": torch.ones(1)}
    document = lightning_layout.make_plain({"values": values})
    assert [*document["values"]] == ["dense"]


class Sparse(io.RawIOBase):
    """File whose zeros take no room on the disk."""

    def __init__(self, path):
        self.file = open(path, "wb")  # noqa: SIM115

    def write(self, data):
        if len(data) >= 2**20 and not any(data[:: 2**16]):
            self.file.seek(len(data), os.SEEK_CUR)
        else:
            self.file.write(data)

    def close(self):
        self.file.truncate()
        self.file.close()


@pytest.mark.exhaustive
def test_records_beyond_four_gigabytes(tmp_path):
    from treadle.engine.checkpoint.one_file import MANIFEST_RECORD, read_tail, take_manifest

    path, zeros = tmp_path / "large", memoryview(bytes(2**22))
    stream = io.BytesIO()
    tensor = torch.empty(2**32 + 2**22, dtype=torch.uint8, device="meta")

    class Find:
        keys = iter("01")

        def __call__(self, tensor):
            return next(self.keys)

    _Pickler(stream, Find()).dump({"large": tensor, "after": torch.empty(3, device="meta")})
    sparse = Sparse(path)
    writer = one_file.ZipWriter(sparse)
    writer.add("data.pkl", len(stream.getvalue()), [stream.getvalue()])
    for name, text in ((".format_version", b"1"), (".storage_alignment", b"64"), ("byteorder", b"little")):
        writer.add(name, len(text), [text])
    writer.add("data/0", tensor.nbytes, (zeros for _ in range(2**10 + 1)))
    writer.add("data/1", 12, [struct.pack("<3f", 1, 2, 3)])
    writer.add("version", 2, [b"3\n"])
    writer.close(MANIFEST_RECORD, b"{}")
    sparse.close()
    assert take_manifest(read_tail(path, 2**20)) == b"{}"
    with zipfile.ZipFile(path) as archive:
        assert archive.read("checkpoint/data/1") == struct.pack("<3f", 1, 2, 3)
        assert archive.getinfo("checkpoint/data/0").file_size == tensor.nbytes
    content = torch.load(path, weights_only=True, mmap=True)
    assert content["large"].shape == tensor.shape
    assert content["after"].tolist() == [1, 2, 3]
