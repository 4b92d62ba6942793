"""Paths in object storage, such as ``s3://bucket/run``, with the operations that Treadle needs, based on fsspec.

An object store has no directories, no rename and no fsync. An object becomes visible as a whole, with the request that
completes its upload. Objects with a common prefix are called a folder here. Networks are unreliable, so a failed
request is retried unless its error is final, such as a missing object.
"""

from __future__ import annotations

import errno
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from .messages import nearest

T = TypeVar("T")

_URL = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://(.*)", re.DOTALL)
_EXTRAS = {"s3": ("s3fs", "s3"), "s3a": ("s3fs", "s3"), "gs": ("gcsfs", "gs"), "gcs": ("gcsfs", "gs")}
_READ_ONLY = ("http", "https", "data", "ftp", "git", "github", "zip", "tar")

ATTEMPTS = 4
"""Number of attempts for a request, in addition to the retries of the store's package."""
_PAUSES = (0.5, 2.0, 8.0)  # seconds before each further attempt

_FILE_PART_BYTES = 16 * 2**20
"""Bytes per request for uploads of large files to S3 or GCS.

With the packages' default of 50 MiB, too few requests would run concurrently.
"""
_PART_BYTES = 8 * 2**20
"""Minimum number of bytes per part of a multipart upload; the default of boto3."""
_MOST_PARTS = 10_000
"""Maximum number of parts that S3 accepts for one object."""
_CHECKSUM = "CRC32"
"""Checksum that S3 verifies as each part arrives. Without one, S3 reads the complete object again at the end."""
_PARTS_AT_ONCE = 8
"""Number of parts of one object that are uploaded concurrently; all of them are in memory."""

# Errors that a further attempt cannot resolve. A missing bucket is a FileNotFoundError.
_FINAL = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError, ImportError)
# Such errors of packages that need not be installed: botocore's and google-auth's.
_FINAL_NAMES = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "DefaultCredentialsError")


class StoreError(OSError):
    """Error of a request to a store."""


class RemotePath:
    """Path in an object store, with the part of ``pathlib.Path``'s interface that Treadle needs.

    It is not an ``os.PathLike``: code that opens local files raises a TypeError instead of creating a folder called
    ``s3:``. The store's package reads addresses and credentials from its usual settings, such as ``AWS_ENDPOINT_URL``
    and ``AWS_PROFILE``, or from fsspec's own configuration (``FSSPEC_S3_...``). Objects with a common prefix are called
    a folder here. A failed request is retried unless its error is final, such as a missing object.

    Args:
        url: ``scheme://bucket/path``.

    Raises:
        ValueError: If the URL is invalid or its scheme is read-only.
    """

    def __init__(self, url: str) -> None:
        match = _URL.fullmatch(url)
        if match is None:
            raise ValueError(f"{url!r} is not a URL. Use scheme://bucket/path, such as s3://bucket/run.")
        self.scheme = match[1].lower()
        parts = [part for part in match[2].split("/") if part not in ("", ".")]
        if self.scheme in _READ_ONLY:
            raise ValueError(f"{url}: {self.scheme}:// URLs are read-only. Use a local folder, or s3://bucket/path.")
        if not parts or ".." in parts or any(c in match[2] for c in "?#*[\n\0"):
            raise ValueError(
                f"{url!r} must have the form scheme://bucket/path, without '..', line breaks or the characters ?, #, * "
                "and [."
            )
        self._parts = tuple(parts)

    def __str__(self) -> str:
        return f"{self.scheme}://{'/'.join(self._parts)}"

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __lt__(self, other: RemotePath) -> bool:
        return str(self) < str(other)

    def __truediv__(self, name: str | PurePosixPath) -> RemotePath:
        return RemotePath(f"{self}/{name}")

    def __getstate__(self) -> dict[str, Any]:
        return {"scheme": self.scheme, "_parts": self._parts}

    @property
    def name(self) -> str:
        """Last component of the path."""
        return self._parts[-1]

    @property
    def parents(self) -> tuple[RemotePath, ...]:
        """Enclosing folders, from the nearest to the bucket."""
        texts = ("/".join(self._parts[:end]) for end in range(len(self._parts) - 1, 0, -1))
        return tuple(RemotePath(f"{self.scheme}://{text}") for text in texts)

    @property
    def parent(self) -> RemotePath:
        """Enclosing folder; for a bucket, the bucket itself."""
        return next(iter(self.parents), self)

    # -- requests ------------------------------------------------------------------------------------------------

    @cached_property
    def _store(self) -> Any:
        """Filesystem of fsspec without its listing cache, which would hide objects that other processes write."""
        import fsspec

        try:
            return fsspec.filesystem(self.scheme, use_listings_cache=False)
        except ImportError as error:
            package, extra = _EXTRAS.get(self.scheme, (error.name or "", ""))
            if not package:
                raise
            command = f"pip install 'treadle[{extra}]', or pip install {package}" if extra else f"pip install {package}"
            raise ModuleNotFoundError(
                f"{self} needs the package {package!r}, which is not installed. Run {command}.", name=package
            ) from error
        except ValueError as error:
            known = sorted(fsspec.available_protocols())
            raise ValueError(
                f"{self}: {self.scheme}:// is not a protocol that fsspec supports.{nearest(self.scheme, known)}"
            ) from error

    @property
    def _key(self) -> str:
        return str(self._store._strip_protocol(str(self)))

    def _ask(self, action: str, request: Callable[[], T]) -> T:
        """Make a request, up to `ATTEMPTS` times if it fails with an error that a further attempt may resolve."""
        store = self._store
        for attempt in range(ATTEMPTS):
            try:
                return request()
            except PermissionError as error:
                reason = error.strerror or error
                text = f"{self} can't be {action}: {reason}. Check the credentials and their permissions for this path."
                raise PermissionError(error.errno or errno.EACCES, text) from error
            except _FINAL:
                raise
            except Exception as error:
                # Packages of stores raise errors of any kind; callers only handle errors of files.
                reason = str(error) or type(error).__name__
                if type(error).__name__ in _FINAL_NAMES:
                    raise StoreError(f"{self} can't be {action}: {reason}") from error
                if attempt == ATTEMPTS - 1:
                    raise StoreError(f"{self} can't be {action} ({ATTEMPTS} attempts failed): {reason}") from error
                store.invalidate_cache()
                time.sleep(_PAUSES[min(attempt, len(_PAUSES) - 1)])
        raise AssertionError

    def exists(self) -> bool:
        """Return whether an object or a folder exists at this path."""
        return bool(self._ask("looked up", lambda: self._store.exists(self._key)))

    def is_file(self) -> bool:
        """Return whether an object exists at this path."""
        return bool(self._ask("looked up", lambda: self._store.isfile(self._key)))

    def is_dir(self) -> bool:
        """Return whether this path is a bucket, or a folder in which objects exist."""
        return bool(self._ask("looked up", lambda: self._store.isdir(self._key)))

    def names(self) -> list[str]:
        """Return the sorted names in the folder, or an empty list if the path is not a folder."""
        return sorted({path.partition("/")[0] for path in self._list(depth=1)})

    def files(self) -> dict[str, int]:
        """Return the sizes in bytes of the objects in the folder, by name. Objects in subfolders are excluded."""
        return {name: int(e["size"] or 0) for name, e in self._list(depth=1).items() if e["type"] == "file"}

    def sizes(self) -> dict[str, int]:
        """Return the sizes in bytes of the objects in the folder and its subfolders, by relative path."""
        return {path: int(entry["size"] or 0) for path, entry in self._list().items() if entry["type"] == "file"}

    def _list(self, depth: int | None = None) -> dict[str, Any]:
        def request() -> dict[str, Any]:
            entries = self._store.find(self._key, maxdepth=depth, withdirs=depth is not None, detail=True)
            return {str(path): entry for path, entry in entries.items()}

        try:
            entries = self._ask("listed", request)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        start = f"{self._key.rstrip('/')}/"
        return {path[len(start) :]: entry for path, entry in entries.items() if len(path) > len(start)}

    def version(self) -> tuple[Any, ...]:
        """Return a value that changes when the object is replaced."""
        entry = self._ask("looked up", lambda: self._store.info(self._key))
        return tuple(str(entry.get(name)) for name in ("ETag", "etag", "LastModified", "created", "mtime", "size"))

    def age(self) -> float:
        """Return the object's age in seconds: this machine's time minus the store's time of the last change."""
        return float(time.time() - self._ask("looked up", lambda: self._store.modified(self._key)).timestamp())

    def read_bytes(self, limit: int | None = None) -> bytes:
        """Return the object's content. Raise a ValueError if it is larger than ``limit`` bytes."""
        if limit is not None and int(self._ask("looked up", lambda: self._store.size(self._key)) or 0) > limit:
            raise ValueError(f"{self} is larger than {limit:,} bytes")
        return bytes(self._ask("read", lambda: self._store.cat_file(self._key)))

    def write_bytes(self, data: bytes, exclusive: bool = False) -> None:
        """Write the object. With ``exclusive``, raise a FileExistsError instead of replacing an existing one."""
        mode = "create" if exclusive else "overwrite"
        self._write("written", lambda: self._store.pipe_file(self._key, data, mode=mode))

    def _write(self, action: str, request: Callable[[], T]) -> T:
        try:
            return self._ask(action, request)
        except FileNotFoundError as error:  # there is no bucket
            raise StoreError(f"{self} can't be {action}: {error}") from error

    def upload(self, file: Path) -> None:
        """Upload a local file as the object."""
        options = {"chunksize": _FILE_PART_BYTES} if self.scheme in _EXTRAS else {}
        self._write("uploaded", lambda: self._store.put_file(str(file), self._key, **options))

    @property
    def takes_parts(self) -> bool:
        """Return whether `upload_parts` can be used, which requires S3."""
        return self.scheme in ("s3", "s3a") and hasattr(self._store, "call_s3")

    @property
    def _sends_checksums(self) -> bool:
        """Return whether botocore is configured to add checksums to uploads, which a few older stores reject."""
        self._store.connect()
        # botocore before 1.36 does not have this option
        return getattr(self._store.s3.meta.config, "request_checksum_calculation", "") == "when_supported"

    def upload_parts(self, pieces: Iterable[bytes | memoryview], size: int) -> None:
        """Upload content of ``size`` bytes while it is being produced. Requires `takes_parts`.

        ``pieces`` yields the content. A piece must not change after it is yielded. A failed upload creates no object.
        """
        if size <= _PART_BYTES:
            self.write_bytes(b"".join(pieces))
            return
        part_bytes = max(_PART_BYTES, -(-size // _MOST_PARTS))
        bucket, key, _ = self._store.split_path(self._key)
        place = {"Bucket": bucket, "Key": key}
        checked = {"ChecksumAlgorithm": _CHECKSUM} if self._sends_checksums else {}
        place["UploadId"] = self._call_s3("create_multipart_upload", **place, **checked)["UploadId"]
        slots, failed = threading.Semaphore(_PARTS_AT_ONCE), threading.Event()

        def upload(number: int, body: bytes) -> dict[str, Any]:
            try:
                answer = self._call_s3("upload_part", **place, **checked, PartNumber=number, Body=body)
                known = {name: answer[name] for name in ("ETag", f"Checksum{_CHECKSUM}") if name in answer}
                return {"PartNumber": number, **known}
            except BaseException:
                failed.set()
                raise
            finally:
                slots.release()

        try:
            with ThreadPoolExecutor(_PARTS_AT_ONCE, thread_name_prefix="treadle-part") as pool:
                futures: list[Future[dict[str, Any]]] = []
                for number, body in enumerate(_join_pieces(pieces, part_bytes), start=1):
                    slots.acquire()
                    if failed.is_set():
                        break  # the results below raise the error
                    futures.append(pool.submit(upload, number, body))
                parts = {"Parts": [future.result() for future in futures]}
            self._complete(place, parts, size)
        except BaseException:
            with suppress(OSError):  # otherwise the bucket's lifecycle rules delete the parts
                self._call_s3("abort_multipart_upload", **place)
            raise

    def _complete(self, place: dict[str, Any], parts: dict[str, Any], size: int) -> None:
        """Combine the parts into an object. After an error, check whether only the response was lost."""
        try:
            self._call_s3("complete_multipart_upload", **place, MultipartUpload=parts)
        except OSError:
            if not self.is_file() or int(self._ask("looked up", lambda: self._store.size(self._key)) or 0) != size:
                raise

    def _call_s3(self, method: str, **options: Any) -> Any:
        return self._write("uploaded", lambda: self._store.call_s3(method, **options))

    def download(self, file: Path) -> None:
        """Copy the object's content into a local file."""
        self._ask("downloaded", lambda: self._store.get_file(self._key, str(file)))

    def unlink(self, missing_ok: bool = True) -> None:
        """Delete the object. S3 does not report a missing object, even if ``missing_ok`` is False."""
        try:
            self._ask("deleted", lambda: self._store.rm_file(self._key))
        except FileNotFoundError:
            if not missing_ok:
                raise


def _join_pieces(pieces: Iterable[bytes | memoryview], size: int) -> Iterator[bytes]:
    """Yield the content of pieces in parts of ``size`` bytes. The last part may be smaller."""
    waiting: list[bytes | memoryview] = []
    missing = size
    for piece in pieces:
        start = 0
        while len(piece) - start >= missing:
            yield b"".join([*waiting, piece[start : start + missing]])
            start, waiting, missing = start + missing, [], size
        if start < len(piece):
            waiting.append(piece[start:])
            missing -= len(piece) - start
    if waiting:
        yield b"".join(waiting)


AnyPath = Path | RemotePath
"""A path on a disk or in an object store."""


def is_url(place: object) -> bool:
    """Return whether a place is a `RemotePath` or a URL (``scheme://...``, including ``file://``)."""
    return isinstance(place, RemotePath) or (isinstance(place, str) and _URL.match(place) is not None)


def as_path(place: str | os.PathLike[str] | RemotePath) -> AnyPath:
    """Convert a path to a ``Path``, or a URL to a `RemotePath`.

    Args:
        place: A path, or a URL. ``file://`` becomes a path.

    Raises:
        TypeError: If ``place`` is neither a path nor a URL.
        ValueError: If the URL is invalid.
    """
    if isinstance(place, RemotePath):
        return place
    if isinstance(place, str) and is_url(place):
        if place.lower().startswith("file://"):
            return Path(place[len("file://") :])
        return RemotePath(place)
    return Path(place)


def lexists(place: str | os.PathLike[str] | RemotePath) -> bool:
    """Return whether anything exists at a place, even a broken link.

    Args:
        place: A path, or a URL.
    """
    path = as_path(place)
    return path.exists() if isinstance(path, RemotePath) else os.path.lexists(path)


def absolute(place: str | os.PathLike[str] | RemotePath) -> AnyPath:
    """Convert a place as `as_path` does, and make local paths absolute.

    Args:
        place: A path, or a URL.
    """
    path = as_path(place)
    return path if isinstance(path, RemotePath) else Path(os.path.abspath(path))
