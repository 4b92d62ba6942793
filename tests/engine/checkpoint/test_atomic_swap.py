"""A checkpoint takes another's place at once: leftovers, foreign files, and several runs in one directory."""

import contextlib
import multiprocessing
import os
import shutil
import subprocess
import tempfile
import time
import warnings
from pathlib import Path

import pytest
import torch
from support import stored
from support.stored_states import FILES, assert_has_things, assert_holds, flip_a_bit, put_things_into, save
from treadle.engine.checkpoint import filesystem
from treadle.engine.checkpoint import store as checkpoint
from treadle.engine.checkpoint.store import CheckpointStore
from treadle.strategies.processes import identify_process, read_start_time

from treadle.testing.faults import Fault, forked


def test_a_failed_rename_puts_the_old_one_back(tmp_path, monkeypatch):
    save(tmp_path / "last", 1)
    rename = filesystem.rename

    def failing(source, target):
        if source == checkpoint.get_staging_path(tmp_path / "last"):
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(filesystem, "rename", failing)
    with pytest.raises(OSError, match="Input/output"):
        save(tmp_path / "last", 2)
    assert_holds(tmp_path / "last", 1)
    checkpoint.discard(tmp_path / "last")
    assert os.listdir(tmp_path) == ["last"]


def test_a_leftover_that_cannot_be_deleted_does_not_undo_the_save(tmp_path, monkeypatch):
    save(tmp_path / "last", 1)

    def failing(path):
        raise OSError(16, "Device or resource busy")

    with monkeypatch.context() as patch:
        patch.setattr(filesystem, "rmdir", failing)
        with pytest.warns(UserWarning, match=r"is saved, but.*busy"):
            save(tmp_path / "last", 2)
    assert_holds(tmp_path / "last", 2)
    CheckpointStore(tmp_path).recover()
    assert os.listdir(tmp_path) == ["last"]


def test_what_a_killed_attempt_staged_does_not_get_in(tmp_path):
    stored.write_part(tmp_path / "x", "rank-00005", {"t": torch.ones(2)})
    part = checkpoint.get_staging_path(tmp_path / "x")
    (part / "manifest.json").write_text("{}")
    (part / "hook" / "deep").mkdir(parents=True)
    (part / "hook" / "deep" / "a.pt").write_bytes(b"half")
    shutil.copytree(part, tmp_path / f".y.{stored.DEAD}.part")
    assert sorted(os.listdir(save(tmp_path / "x", 1))) == sorted([*FILES, "manifest.json"])
    assert "never completed" in CheckpointStore(tmp_path).recover()[0]
    assert os.listdir(tmp_path) == ["x"]


def test_a_new_one_that_rots_during_an_interrupted_swap_leaves_the_old_one(tmp_path):
    save(tmp_path / "last", 2).rename(tmp_path / "new")
    save(tmp_path / "last", 1).rename(tmp_path / f".last.{stored.DEAD}.old")
    (tmp_path / "new").rename(tmp_path / f".last.{stored.DEAD}.part")
    flip_a_bit(tmp_path / f".last.{stored.DEAD}.part" / "model.safetensors")
    assert "restored" in CheckpointStore(tmp_path).recover()[0]
    assert_holds(tmp_path / "last", 1)


def test_the_replaced_one_is_kept_as_long_as_its_replacement_is_damaged(tmp_path):
    save(tmp_path / "last", 1)
    shutil.copytree(tmp_path / "last", tmp_path / f".last.{stored.DEAD}.old")
    os.truncate(tmp_path / "last" / "model.safetensors", 10)
    store = CheckpointStore(tmp_path)
    assert "kept" in store.recover()[0]
    path, skipped = store.latest()
    assert_holds(path, 1)
    assert path.name == f".last.{stored.DEAD}.old"
    assert all("model.safetensors" in reason for reason in skipped)
    save(tmp_path / "last", 2)
    assert os.listdir(tmp_path) == ["last"]
    assert_holds(tmp_path / "last", 2)


def test_directories_of_others_are_left_alone(tmp_path):
    kinds = {"cache": "part", "book": "old", "thesis": "gone"}
    foreign = [f".{name}.{stored.DEAD}.{kind}" for name, kind in kinds.items()]
    for name in (*foreign, ".cache.part", "mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text("mine")
    (tmp_path / ".cache.part.old").write_text("a file")
    before = sorted(os.listdir(tmp_path))
    assert CheckpointStore(tmp_path).recover() == []
    assert CheckpointStore(tmp_path).find() == []
    with pytest.raises(ValueError, match=r"exists and is not a checkpoint"):
        save(tmp_path / "mine", 1)
    for name in kinds:
        save(tmp_path / name, 1)
        checkpoint.remove(tmp_path / name)
    checkpoint.discard(tmp_path / "mine")
    for path in (tmp_path / "mine", tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ValueError, match=r"manifest\.json is missing|does not exist"):
            checkpoint.remove(path)
    assert sorted(os.listdir(tmp_path)) == before


def test_an_empty_directory_may_be_the_target(tmp_path):
    (tmp_path / "out").mkdir()
    assert_holds(save(tmp_path / "out", 1), 1)


def test_what_is_not_a_checkpoints_own_moves_into_the_next_one(tmp_path):
    target = save(tmp_path / "runs", 1)
    put_things_into(target)
    things = {"notes", "tokenizer.json", "link", "best"}
    for step in (2, 3):
        save(target, step)
        assert_holds(target, step)
        assert_has_things(target)
        assert set(os.listdir(target)) == {*FILES, "manifest.json", *things}
        if step == 2:
            (target / "manifest.json").write_text("{")  # they move though it is damaged
    files = stored.write_part(target, "tokenizer", {"words": 3})
    with pytest.warns(UserWarning, match=r"previous file with this name is kept as tokenizer\.json\.kept"):
        stored.commit(target, files, {"step": 4})
    assert stored.read_part(target, "tokenizer") == {"words": 3}
    assert_has_things(target, "tokenizer.json.kept")
    assert os.listdir(tmp_path) == ["runs"]


def test_a_link_that_is_replaced_leaves_what_it_led_to(tmp_path):
    put_things_into(save(tmp_path / "real", 1))
    (tmp_path / "last").symlink_to(tmp_path / "real")
    save(tmp_path / "last", 2)
    assert_holds(tmp_path / "last", 2)
    assert_holds(tmp_path / "real", 1)
    assert_has_things(tmp_path / "real")
    assert sorted(os.listdir(tmp_path)) == ["last", "real"]


@pytest.fixture
def other_run(tmp_path):
    """A process that runs, and the name that it has here."""
    process = subprocess.Popen(["sleep", "600"])
    machine = identify_process().split("-")[0]
    yield process, f"{machine}-{process.pid}-{read_start_time(process.pid)}"
    process.kill()
    process.wait()


def test_what_a_run_that_lives_is_writing_stays_until_it_is_killed(tmp_path, other_run):
    process, writer = other_run
    stored.write_part(tmp_path / "last", "model", {"t": torch.ones(2)}, writer)
    save(tmp_path / "last", 1).rename(old := tmp_path / f".last.{writer}.old")
    part = checkpoint.get_staging_path(tmp_path / "last", writer)
    store = CheckpointStore(tmp_path)
    assert store.recover() == []  # it is between its two renames
    assert [path.name for path in store.find()] == [old.name]
    save(tmp_path / "last", 2)
    save(tmp_path / "last", 3)
    checkpoint.discard(tmp_path / "last")
    assert part.is_dir()
    assert old.is_dir()
    process.kill()
    process.wait()
    assert len(store.recover()) == 2
    assert os.listdir(tmp_path) == ["last"]
    assert_holds(tmp_path / "last", 3)


def test_what_another_machine_is_writing_stays_for_an_hour(tmp_path, monkeypatch):
    writer = "0123abcd-17-99"
    stored.write_part(tmp_path / "last", "model", {"t": torch.ones(2)}, writer)
    save(tmp_path / "last", 1).rename(tmp_path / f".last.{writer}.old")
    (message,) = CheckpointStore(tmp_path).recover()  # two renames take no two seconds
    assert "restored" in message
    assert_holds(tmp_path / "last", 1)
    assert checkpoint.get_staging_path(tmp_path / "last", writer).is_dir()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3500)
    assert CheckpointStore(tmp_path).recover() == []
    monkeypatch.setattr(time, "time", lambda: now + 3700)
    assert "never completed" in CheckpointStore(tmp_path).recover()[0]
    assert os.listdir(tmp_path) == ["last"]


def test_what_another_run_has_saved_under_the_same_name_is_not_removed(tmp_path):
    target = save(tmp_path / "best", 1)

    def work():
        save(target, 1)  # a twin: the same step, sequence and content

    time.sleep(0.02)
    assert forked(work, Fault("disk:*", "delay:0")) == 0
    with pytest.raises(ValueError, match="another run has replaced it"):
        checkpoint.remove(target)
    assert_holds(target, 1)
    with pytest.warns(UserWarning, match=r"another run has replaced it since.*This save replaces it again"):
        save(target, 2)
    checkpoint.remove(target)
    assert os.listdir(tmp_path) == []


@pytest.mark.long
def test_two_runs_that_replace_one_checkpoint_all_the_time(tmp_path):
    """Each commit succeeds, a reader finds a whole one at any time, and nothing is left."""
    target, go = tmp_path / "last", tmp_path / "go"

    def work(number):
        warnings.simplefilter("ignore")
        while not go.exists():
            time.sleep(0.001)
        for step in range(40):
            save(target, 100 * number + step)

    children = [multiprocessing.get_context("fork").Process(target=work, args=(number,)) for number in range(3)]
    for child in children:
        child.start()
    go.touch()
    seen = 0
    while any(child.is_alive() for child in children):
        for path in CheckpointStore(tmp_path).find():
            with contextlib.suppress(ValueError):  # it may be replaced while it is read
                checkpoint.verify(path)
                seen += 1
    assert [child.exitcode for child in children] == [0, 0, 0]
    assert seen
    go.unlink()
    assert os.listdir(tmp_path) == ["last"]
    assert checkpoint.verify(target).step in (39, 139, 239)


def test_a_sibling_that_nobody_may_look_into_is_somebody_elses():
    with tempfile.TemporaryDirectory() as name:  # pytest's own can't be entered by others
        folder = Path(name)
        private = folder / "systemd-private"
        private.mkdir(mode=0)
        (folder / f".own.{stored.DEAD}.part").mkdir(mode=0)
        save(folder / "step-1", 1)

        def work():
            if os.geteuid() == 0:
                os.setuid(65534)
            assert_holds(save(folder / "step-2", 2), 2)
            assert [path.name for path in CheckpointStore(folder).find()] == ["step-1", "step-2"]
            assert CheckpointStore(folder).latest() == (folder / "step-2", [])
            assert CheckpointStore(folder).recover() == []
            with pytest.raises(ValueError, match="exists and is not a checkpoint"):
                save(private, 1)

        folder.chmod(0o777)
        assert forked(work, Fault("disk:*", "delay:0")) == 0
        private.chmod(0o700)
