"""Paths of an object store: what their URLs may be, what each request does, and requests that fail and are repeated."""

import pickle
import sys
import uuid
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from treadle.common import remote_path
from treadle.common.remote_path import RemotePath, StoreError, absolute, as_path, is_url, lexists


class Flaky(MemoryFileSystem):
    """A store in memory whose requests fail as often as `failures` says."""

    protocol = "flaky"
    failures: list[Exception] = []

    def _fail(self):
        if self.failures:
            raise self.failures.pop()

    def pipe_file(self, *args, **options):
        self._fail()
        return super().pipe_file(*args, **options)

    def cat_file(self, *args, **options):
        self._fail()
        return super().cat_file(*args, **options)


fsspec.register_implementation("flaky", Flaky, clobber=True)


@pytest.fixture
def folder():
    return RemotePath(f"memory://{uuid.uuid4().hex}")


@pytest.fixture
def flaky(monkeypatch):
    monkeypatch.setattr(remote_path, "_PAUSES", (0.0,))
    monkeypatch.setattr(Flaky, "failures", [])
    return RemotePath(f"flaky://{uuid.uuid4().hex}/file")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("bucket/run", "Use scheme://bucket/path"),
        ("s3://", "must be scheme://bucket/path"),
        ("s3://bucket/../other", "without '..'"),
        ("s3://bucket/step-*", "without '..'"),
        ("https://host/run", "https:// can't be written"),
    ],
)
def test_a_wrong_url_is_named(url, words):
    with pytest.raises(ValueError, match=words):
        RemotePath(url)


def test_an_unknown_scheme_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match=r"s4://.*Did you mean 's3'"):
        RemotePath("s4://bucket/run").exists()


@pytest.mark.parametrize(("scheme", "package", "extra"), [("s3", "s3fs", "s3"), ("gs", "gcsfs", "gs")])
def test_a_missing_package_is_one_error_with_the_extra(scheme, package, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, scheme, raising=False)
    with pytest.raises(ModuleNotFoundError, match=rf"needs the package '{package}'.*treadle\[{extra}\]"):
        RemotePath(f"{scheme}://bucket/run").exists()


def test_it_counts_as_a_path():
    path = RemotePath("S3://bucket//runs/./one/")
    assert str(path) == "s3://bucket/runs/one"
    assert (path.name, str(path.parent), str(path / "a/b")) == ("one", "s3://bucket/runs", "s3://bucket/runs/one/a/b")
    assert [str(parent) for parent in path.parents] == ["s3://bucket/runs", "s3://bucket"]
    assert (path / "a/b").relative_to(path).as_posix() == "a/b"
    assert (path / "a").is_relative_to(path)
    assert not path.is_relative_to(RemotePath("s3://bucket/run"))
    assert pickle.loads(pickle.dumps(path)) == path
    assert len({path, RemotePath("s3://bucket/runs/one")}) == 1
    with pytest.raises(TypeError):
        Path(path)


def test_places_are_paths_or_urls(tmp_path):
    assert as_path("s3://bucket/run") == absolute("s3://bucket/run") == RemotePath("s3://bucket/run")
    assert as_path(f"file://{tmp_path}") == as_path(tmp_path) == tmp_path
    assert absolute("run") == Path.cwd() / "run"
    assert [is_url(place) for place in ("s3://b/a", RemotePath("s3://b/a"), "C:/a", tmp_path)] == [1, 1, 0, 0]
    assert lexists(tmp_path)
    assert not lexists("memory://nothing/here")


def test_objects_are_written_listed_read_and_deleted(folder, tmp_path):
    (folder / "a").write_bytes(b"12")
    (folder / "sub/b").write_bytes(b"345")
    assert folder.names() == ["a", "sub"]
    assert folder.files() == {"a": 2}
    assert folder.sizes() == {"a": 2, "sub/b": 3}
    assert (folder.is_dir(), folder.is_file(), (folder / "a").is_file(), (folder / "c").exists()) == (1, 0, 1, 0)
    assert (folder / "a").read_bytes() == b"12"
    with pytest.raises(ValueError, match="larger than 1 bytes"):
        (folder / "a").read_bytes(1)
    before = (folder / "a").version()
    (folder / "a").write_bytes(b"67")
    assert (folder / "a").version() != before
    assert 0 <= (folder / "a").age() < 60
    with pytest.raises(FileExistsError):
        (folder / "a").write_bytes(b"8", exclusive=True)
    (folder / "sub/b").download(tmp_path / "b")
    (folder / "c").upload(tmp_path / "b")
    assert (folder / "c").read_bytes() == b"345"
    (folder / "c").unlink()
    (folder / "c").unlink()
    with pytest.raises(FileNotFoundError):
        (folder / "c").unlink(missing_ok=False)
    with pytest.raises(FileNotFoundError):
        (folder / "c").read_bytes()
    assert (folder / "none").names() == []


def test_a_request_that_fails_is_made_again(flaky):
    Flaky.failures = [ConnectionResetError("reset"), TimeoutError("late"), RuntimeError("whatever a package raises")]
    flaky.write_bytes(b"1")
    assert Flaky.failures == []
    assert flaky.read_bytes() == b"1"


def test_a_store_that_stays_away_is_an_error_of_files(flaky):
    Flaky.failures = [ConnectionResetError("reset by peer") for _ in range(9)]
    with pytest.raises(StoreError, match=r"flaky://.*can't write it, tried 4 times: reset by peer"):
        flaky.write_bytes(b"1")
    assert len(Flaky.failures) == 9 - remote_path.ATTEMPTS
    assert issubclass(StoreError, OSError)


class NoCredentialsError(Exception):
    """Named as botocore's."""


@pytest.mark.parametrize("error", [PermissionError(13, "Access Denied"), NoCredentialsError("no credentials")])
def test_what_another_attempt_can_not_change_fails_at_once(flaky, error):
    Flaky.failures = [error, error]
    with pytest.raises(OSError, match=r"flaky://.*can't write it"):
        flaky.write_bytes(b"1")
    assert len(Flaky.failures) == 1
