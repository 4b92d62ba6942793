"""A folder whose files are written here and uploaded beside the training."""

import os
import subprocess
import sys
import uuid
import warnings

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from support.launches import wait_for
from treadle.common import mirror, remote_path
from treadle.common.mirror import flush, local_folder
from treadle.common.remote_path import RemotePath


@pytest.fixture
def folder(monkeypatch):
    monkeypatch.setattr(mirror, "SECONDS", 0.05)
    monkeypatch.setattr(remote_path, "_PAUSES", (0.0,))
    return RemotePath(f"memory://{uuid.uuid4().hex}")


def test_a_path_is_itself(tmp_path):
    assert local_folder(tmp_path / "logs") == tmp_path / "logs"
    assert not (tmp_path / "logs").exists()


def test_what_changes_is_uploaded_and_what_goes_is_deleted(folder):
    (folder / "events").write_bytes(b"before")
    here = local_folder(folder)
    assert (here / "events").read_bytes() == b"before"
    (here / "events").write_bytes(b"before and after")
    (here / "sub").mkdir()
    (here / "sub/page").write_bytes(b"page")
    (here / "half.tmp").write_bytes(b"half")
    (here / ".claim").write_bytes(b"")
    wait_for(lambda: folder.sizes() == {"events": 16, "sub/page": 4}, 10)
    (here / "sub/page").unlink()
    flush(folder)
    assert folder.sizes() == {"events": 16}


def test_a_folder_in_a_mirrored_one_is_a_part_of_it(folder):
    (folder / "inner/old").write_bytes(b"old")
    outer = local_folder(folder)
    inner = local_folder(folder / "inner")
    assert inner == outer / "inner"
    assert (inner / "old").read_bytes() == b"old"


def test_a_store_that_is_away_costs_a_warning_and_nothing_is_lost(folder, monkeypatch):
    def refuse(*args, **options):
        raise ConnectionRefusedError("refused")

    here = local_folder(folder)
    with monkeypatch.context() as away:
        away.setattr(MemoryFileSystem, "put_file", refuse)
        (here / "events").write_bytes(b"1")
        with pytest.warns(UserWarning, match=r"can't be uploaded to memory://.*refused.*are kept in"):
            flush(folder)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            flush(folder)  # the same again is no further warning
    flush(folder)
    assert folder.sizes() == {"events": 1}


AT_THE_END = """
import fsspec
from treadle.common import mirror
from fsspec.implementations.local import LocalFileSystem
class Disk(LocalFileSystem):
    protocol = "disk"
    @classmethod
    def _strip_protocol(cls, path):
        return path if path.startswith("/") else {root!r} + "/" + path.removeprefix("disk://").strip("/")
fsspec.register_implementation("disk", Disk)
here = mirror.local_folder("disk://logs")
(here / "events").write_bytes(b"last words")
print(here)
"""


def test_what_is_written_last_is_uploaded_as_the_process_ends(tmp_path):
    (tmp_path / "logs").mkdir()
    script = AT_THE_END.format(root=str(tmp_path))
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert (tmp_path / "logs/events").read_bytes() == b"last words"
    assert not os.path.exists(ended.stdout.strip())
