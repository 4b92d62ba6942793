"""Checkpoints in an object store: which counts, what a damaged one costs, what is deleted, and what is left alone."""

import json
import uuid

import pytest
import torch
from support.stored_states import flip_a_bit
from treadle.common import remote_path
from treadle.common.remote_path import RemotePath
from treadle.engine.checkpoint import OpenCheckpoint, remote
from treadle.engine.checkpoint.parts import encode_part
from treadle.engine.checkpoint.store import MANIFEST, CheckpointStore, read_manifest

pytestmark = pytest.mark.guarantee


@pytest.fixture
def directory(monkeypatch):
    monkeypatch.setattr(remote_path, "_PAUSES", (0.0,))
    return RemotePath(f"memory://{uuid.uuid4().hex}")


def save(target, step, **info):
    """One save as a single process makes it; returns its folder of files."""
    folder = remote.Upload.new_folder()
    upload = remote.Upload(target, folder)
    try:
        files = upload.write(
            encode_part("model", {"weight": torch.full((300,), float(step))}) | encode_part("state", {"step": step})
        )
        upload.commit(files, {"step": step, **info}, hooked=False)
    finally:
        upload.discard(is_main=True)
    return folder


def names(path):
    """The names of what is in a folder; a store in memory keeps folders without objects, which others don't have."""
    return sorted({name.partition("/")[0] for name in path.sizes()})


def assert_holds(path, step):
    opened = OpenCheckpoint(path)
    opened.verify()
    assert opened.manifest.step == step
    assert torch.equal(opened.read_part("model")["weight"], torch.full((300,), float(step)))
    assert opened.read_part("state") == {"step": step}


def latest(directory):
    path, skipped = CheckpointStore(directory).latest()
    return str(path), skipped


def test_a_checkpoint_is_a_manifest_and_one_folder_and_a_save_to_the_same_url_replaces_it(directory):
    for step in (1, 2):
        folder = save(directory / "last", step)
        assert names(directory / "last") == [folder, MANIFEST]
        assert_holds(directory / "last", step)


def test_the_order_is_by_step_then_by_commit(directory):
    for name, step in (("b", 5), ("c", 7), ("a", 7), ("d", 6)):
        save(directory / name, step)
    assert [path.name for path in CheckpointStore(directory).find()] == ["b", "d", "c", "a"]


def truncate(file):
    file.write_bytes(file.read_bytes()[:-1])


def swap(file):
    """Put an older checkpoint's file of the same size in its place."""
    older = file.parents[2] / "older"
    file.write_bytes((older / read_manifest(older).folder / file.name).read_bytes())


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (RemotePath.unlink, "missing"),
        (truncate, "bytes"),
        (flip_a_bit, "not the file that was written"),
        (swap, "not the file that was written"),
    ],
)
@pytest.mark.parametrize("name", ["model.safetensors", "state.json"])
def test_a_damaged_object_is_named_and_the_older_checkpoint_taken(directory, name, damage, words):
    save(directory / "older", 1)
    folder = save(directory / "newer", 2)
    damage(directory / "newer" / folder / name)
    path, skipped = latest(directory)
    assert path == str(directory / "older")
    assert len(skipped) == 1
    assert name in skipped[0]
    assert words in skipped[0]
    assert str(directory / "newer") in skipped[0]
    with pytest.raises(ValueError, match=name):
        OpenCheckpoint(directory / "newer").verify()


@pytest.mark.parametrize(
    "damage", [lambda text: b"", lambda text: b"{", lambda text: b'{"format": 99}', lambda text: text[:-40]]
)
def test_a_damaged_manifest_is_named_and_the_older_checkpoint_taken(directory, damage):
    save(directory / "older", 1)
    save(directory / "newer", 2)
    manifest = directory / "newer" / MANIFEST
    manifest.write_bytes(damage(manifest.read_bytes()))
    path, skipped = latest(directory)
    assert path == str(directory / "older")
    assert len(skipped) == 1
    assert "newer" in skipped[0]


@pytest.mark.parametrize("folder", ["../other", "data-../x", "/", "data", ".."])
def test_a_hostile_folder_is_refused(directory, folder):
    save(directory / "one", 1)
    document = json.loads((directory / "one" / MANIFEST).read_bytes())
    document["folder"] = folder
    (directory / "one" / MANIFEST).write_bytes(json.dumps(document).encode())
    with pytest.raises(ValueError, match="one"):
        OpenCheckpoint(directory / "one").verify()


def test_removing_takes_all_of_it_and_refuses_what_holds_more(directory):
    save(directory / "one", 1)
    save(directory / "two", 2)
    remote.remove(directory / "one")
    assert names(directory) == ["two"]
    (directory / "two/notes.txt").write_bytes(b"mine")
    with pytest.raises(ValueError, match=r"contains files that do not belong to the checkpoint \(notes\.txt\)"):
        remote.remove(directory / "two")
    assert_holds(directory / "two", 2)
    with pytest.raises(ValueError, match="manifest"):
        remote.remove(directory / "none")


def test_a_place_that_somebody_else_uses_is_refused(directory):
    (directory / "data/train.csv").write_bytes(b"1,2")
    with pytest.raises(ValueError, match=r"contains train\.csv and is not a checkpoint"):
        save(directory / "data", 1)
    (directory / "file").write_bytes(b"1")
    with pytest.raises(ValueError, match="is an object"):
        remote.check_target(directory / "file")
    assert directory.sizes() == {"data/train.csv": 3, "file": 1}


def test_what_killed_saves_left_is_deleted_and_nothing_else(directory):
    folder = save(directory / "last", 1)
    (directory / "last/data-0123456789abcdef/model.safetensors").write_bytes(b"half")
    (directory / "new/data-fedcba9876543210/model.safetensors").write_bytes(b"half")
    (directory / "new/notes.txt").write_bytes(b"mine")
    (directory / "other/data-1/x").write_bytes(b"mine")
    done = CheckpointStore(directory).recover()
    assert [str(directory / name) in sentence for name, sentence in zip(("last", "new"), done, strict=True)] == [1, 1]
    assert set(names(directory)) == {"last", "new", "other"}
    assert names(directory / "last") == [folder, MANIFEST]
    assert names(directory / "new") == ["notes.txt"]
    assert_holds(directory / "last", 1)
    assert CheckpointStore(directory).recover() == []


def test_an_object_that_is_lost_before_the_commit_fails_it(directory):
    save(directory / "last", 1)
    upload = remote.Upload(directory / "last", "data-00000000000000aa")
    files = upload.write(encode_part("model", {"weight": torch.zeros(3)}))
    (directory / "last/data-00000000000000aa/model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model\.safetensors is missing"):
        upload.commit(files, {"step": 2}, hooked=False)
    upload.discard(is_main=True)
    assert_holds(directory / "last", 1)
    assert len(names(directory / "last")) == 2


@pytest.mark.parametrize("committed", [True, False])
def test_an_answer_that_is_lost_is_asked_for(directory, committed, monkeypatch):
    """A commit's request whose answer does not come counts as what the store then holds."""
    save(directory / "last", 1)
    real = RemotePath.write_bytes

    def lose_answer(path, data, exclusive=False):
        if path.name == MANIFEST and committed:
            real(path, data, exclusive)
        if path.name == MANIFEST:
            raise remote_path.StoreError("the answer is lost")
        real(path, data, exclusive)

    monkeypatch.setattr(RemotePath, "write_bytes", lose_answer)
    if committed:
        save(directory / "last", 2)
    else:
        with pytest.raises(OSError, match="lost"):
            save(directory / "last", 2)
    assert_holds(directory / "last", 2 if committed else 1)
    assert len(names(directory / "last")) == 2
