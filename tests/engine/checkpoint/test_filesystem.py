"""Files and directories of checkpoints: probes, modes, and deletions that follow no link."""

import os

import pytest
from support.stored import edit_manifest
from support.stored_states import ENTRY, assert_holds, save
from treadle.engine.checkpoint import filesystem
from treadle.engine.checkpoint import store as checkpoint
from treadle.engine.checkpoint.store import CheckpointStore


def test_files_are_as_readable_as_their_directory(tmp_path):
    previous = os.umask(0o027)
    try:
        path = save(tmp_path / "x", 1)
    finally:
        os.umask(previous)
    assert {(path / name).stat().st_mode & 0o777 for name in os.listdir(path)} == {0o640}


def test_remove_takes_all_of_it_and_refuses_a_link_and_what_holds_more_than_was_saved(tmp_path):
    path = save(tmp_path / "step-1", 1)
    more = path / "nothing" / "in it" / "words.txt"
    more.parent.mkdir(parents=True)
    more.write_text("words")
    with pytest.raises(ValueError, match=r"step-1 contains files that .* \(nothing\)"):
        checkpoint.remove(path)
    assert_holds(path, 1)
    assert more.read_text() == "words"
    more.unlink()
    (tmp_path / "last").symlink_to(path)
    with pytest.raises(ValueError, match="is a link"):
        checkpoint.remove(tmp_path / "last")
    checkpoint.remove(path)
    assert os.listdir(tmp_path) == ["last"]


@pytest.mark.guarantee
def test_deleting_follows_no_link_out_of_a_hostile_checkpoint(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "runs").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("mine")
    path = save(tmp_path / "x", 1).rename(tmp_path / "runs" / "x")
    (path / "deep").symlink_to(tmp_path / "home")
    others = {"deep/thesis.tex": filesystem.describe(tmp_path / "home" / "thesis.tex"), "deep": ENTRY}
    edit_manifest(path, others=others)
    checkpoint.remove(path)
    assert os.listdir(tmp_path / "runs") == []
    assert (tmp_path / "home" / "thesis.tex").read_text() == "mine"


def test_probe_says_how_much_is_missing_and_why_it_cannot_write(tmp_path):
    CheckpointStore(tmp_path / "a" / "b").probe(nbytes=1000)
    assert os.listdir(tmp_path / "a" / "b") == []
    with pytest.raises(OSError, match=r"a checkpoint needs 1,125,899,906,842,624 bytes, but only [\d,]+ are free"):
        CheckpointStore(tmp_path).probe(nbytes=2**50)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"can't save checkpoints in .*file"):
        CheckpointStore(tmp_path / "file").probe()
    with pytest.raises(OSError, match=r"can't save checkpoints in .*sub"):
        CheckpointStore(tmp_path / "file" / "sub").probe()
    assert sorted(os.listdir(tmp_path)) == ["a", "file"]
