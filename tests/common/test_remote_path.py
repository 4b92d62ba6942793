"""Paths of an object store: what their URLs may be, what each request does, and requests that fail and are repeated."""

import sys
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from treadle.common import remote_path
from treadle.common.remote_path import RemotePath, StoreError, absolute, as_path, is_url, lexists


@pytest.fixture
def folder():
    return RemotePath(f"memory://{uuid.uuid4().hex}")


@pytest.fixture
def failures(monkeypatch):
    """Errors of the next requests to write."""
    failures, pipe_file = [], MemoryFileSystem.pipe_file

    def fail(*args, **options):
        if failures:
            raise failures.pop()
        return pipe_file(*args, **options)

    monkeypatch.setattr(remote_path, "_PAUSES", (0.0,))
    monkeypatch.setattr(MemoryFileSystem, "pipe_file", fail)
    return failures


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("bucket/run", "Use scheme://bucket/path"),
        ("s3://", "must have the form scheme://bucket/path"),
        ("s3://bucket/../other", "without '..'"),
        ("s3://bucket/step-*", "without '..'"),
        ("https://host/run", "https:// URLs are read-only"),
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
    for call in (lambda: (folder / "c").unlink(missing_ok=False), (folder / "c").read_bytes):
        with pytest.raises(FileNotFoundError):
            call()
    assert (folder / "none").names() == []


def test_a_request_that_fails_is_made_again(failures, folder):
    failures += [ConnectionResetError("reset"), TimeoutError("late"), RuntimeError("whatever a package raises")]
    (folder / "a").write_bytes(b"1")
    assert failures == []
    assert (folder / "a").read_bytes() == b"1"


def test_a_store_that_stays_away_is_an_error_of_files(failures, folder):
    failures += [ConnectionResetError("reset by peer") for _ in range(9)]
    with pytest.raises(StoreError, match=r"memory://.*can't be written \(4 attempts failed\): reset by peer"):
        (folder / "a").write_bytes(b"1")
    assert len(failures) == 9 - remote_path.ATTEMPTS
    assert issubclass(StoreError, OSError)


class NoCredentialsError(Exception):
    """Named as botocore's."""


@pytest.mark.parametrize("error", [PermissionError(13, "Access Denied"), NoCredentialsError("no credentials")])
def test_what_another_attempt_can_not_change_fails_at_once(failures, folder, error):
    failures += [error, error]
    with pytest.raises(OSError, match=r"memory://.*can't be written"):
        (folder / "a").write_bytes(b"1")
    assert len(failures) == 1


def test_a_refusal_without_a_number_names_the_fix(failures, folder):
    failures += [PermissionError("Forbidden")]
    with pytest.raises(PermissionError, match=r"\[Errno 13\] memory://.*: Forbidden. Check the credentials"):
        (folder / "a").write_bytes(b"1")


# -- in parts ----------------------------------------------------------------------------------------------------------


class Parts(MemoryFileSystem):
    """A store in memory that takes parts, as S3 does. A request fails as often as `failures` says, by its name."""

    protocol = "s3a"
    s3 = SimpleNamespace(meta=SimpleNamespace(config=SimpleNamespace(request_checksum_calculation="when_supported")))
    failures: list[str] = []
    requests: list[str] = []
    uploads: dict[str, dict[int, bytes]] = {}
    checksums: dict[str, dict[str, str]] = {}

    @classmethod
    def _strip_protocol(cls, path):
        return "/" + path.partition("://")[2] if "://" in path else path

    def split_path(self, path):
        bucket, _, key = path.lstrip("/").partition("/")
        return bucket, key, None

    def connect(self):
        pass

    def call_s3(self, method, **options):
        self.requests.append(method)
        return getattr(self, f"_{method}")(**options)

    def _fail(self, name):
        if name in self.failures:
            self.failures.remove(name)
            raise OSError(f"{name} failed")

    def _create_multipart_upload(self, Bucket, Key, **checksum):
        name = f"upload-{len(self.requests)}"
        self.uploads[name] = {}
        self.checksums[name] = checksum
        return {"UploadId": name}

    def _upload_part(self, Bucket, Key, UploadId, PartNumber, Body, **checksum):
        self._fail(f"part {PartNumber}")
        assert checksum == self.checksums[UploadId]
        self.uploads[UploadId][PartNumber] = Body
        return self._describe(Body, checksum)

    @staticmethod
    def _describe(body, checksum):
        return {"ETag": str(hash(body))} | ({"ChecksumCRC32": f"crc {hash(body)}"} if checksum else {})

    def _complete_multipart_upload(self, Bucket, Key, UploadId, MultipartUpload):
        parts = self.uploads.pop(UploadId)  # an error for one that was completed before
        checksum = self.checksums[UploadId]
        wanted = [{"PartNumber": number, **self._describe(parts[number], checksum)} for number in sorted(parts)]
        assert MultipartUpload == {"Parts": wanted}
        self.pipe_file(f"/{Bucket}/{Key}", b"".join(parts[number] for number in sorted(parts)))
        self._fail("complete")

    def _abort_multipart_upload(self, UploadId, **place):
        del self.uploads[UploadId]


@pytest.fixture
def parts(monkeypatch):
    for name in ("failures", "requests", "uploads", "checksums"):
        monkeypatch.setattr(Parts, name, type(getattr(Parts, name))())
    monkeypatch.setattr(remote_path, "_PAUSES", (0.0,))
    monkeypatch.setattr(remote_path, "_PART_BYTES", 100)
    path = RemotePath(f"s3a://{uuid.uuid4().hex}/file")
    path.__dict__["_store"] = Parts(skip_instance_cache=True)
    return path


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 200, 1234, 5000])
@pytest.mark.parametrize("piece", [7, 100, 150, 10_000])
def test_parts_make_the_object(size, piece, parts):
    content = bytes(number % 251 for number in range(size))
    view = memoryview(content)
    assert parts.takes_parts
    parts.upload_parts((view[start : start + piece] for start in range(0, size, piece)), size)
    assert parts.read_bytes() == content
    assert Parts.requests.count("upload_part") == (-(-size // 100) if size > 100 else 0)
    assert Parts.uploads == {}


@pytest.mark.parametrize("setting", ["when_supported", "when_required", None])
def test_parts_carry_checksums_where_the_configuration_allows(setting, parts, monkeypatch):
    config = SimpleNamespace(request_checksum_calculation=setting) if setting else SimpleNamespace()
    monkeypatch.setattr(Parts, "s3", SimpleNamespace(meta=SimpleNamespace(config=config)))
    parts.upload_parts([b"x" * 1000], 1000)
    expected = {"ChecksumAlgorithm": "CRC32"} if setting == "when_supported" else {}
    assert list(Parts.checksums.values()) == [expected]


def test_there_are_no_more_parts_than_an_object_may_have(parts, monkeypatch):
    monkeypatch.setattr(remote_path, "_MOST_PARTS", 7)
    parts.upload_parts([b"x" * 1000], 1000)
    assert Parts.requests.count("upload_part") == 7
    assert parts.read_bytes() == b"x" * 1000


@pytest.mark.parametrize("failures", [["part 2", "part 5", "part 5"], ["complete"]])  # the latter is done first
def test_a_request_for_parts_that_fails_is_sent_again(failures, parts):
    Parts.failures += failures
    parts.upload_parts([b"x" * 1000], 1000)
    assert parts.read_bytes() == b"x" * 1000


def test_a_part_that_can_not_be_sent_is_an_error_and_leaves_nothing(parts):
    Parts.failures += ["part 3"] * remote_path.ATTEMPTS
    pieces = iter([b"x" * 100] * 1000)
    with pytest.raises(StoreError, match=r"\(4 attempts failed\): part 3 failed"):
        parts.upload_parts(pieces, 100_000)
    assert not parts.exists()
    assert Parts.uploads == {}
    assert next(pieces, None) is not None  # no more is made once one has failed


def test_content_that_can_not_be_made_leaves_nothing(parts):
    def pieces():
        yield b"x" * 500
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        parts.upload_parts(pieces(), 1000)
    assert not parts.exists()
    assert Parts.uploads == {}
