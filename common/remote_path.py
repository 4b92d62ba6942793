"""Paths in object storage, such as ``s3://bucket/run``: what Treadle asks of a store, by way of fsspec.

An object store has no directories, no rename and no fsync. An object appears whole, by the request that ends its
upload; what has one prefix is called a folder here. A request that fails is made again some times, as networks fail.
"""

from __future__ import annotations

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
"""How often a request is made, on top of what the store's own package repeats."""
_PAUSES = (0.5, 2.0, 8.0)  # seconds before each further attempt

_FILE_PART_BYTES = 16 * 2**20
"""Bytes of a request of a large upload of a file to S3 or GCS; their packages' 50 MiB leave too few to send at once."""
_PART_BYTES = 8 * 2**20
"""Bytes of a part that is uploaded by itself, those of boto3."""
_MOST_PARTS = 10_000
"""Parts that S3 makes one object of."""
_PARTS_AT_ONCE = 8
"""Parts of one object that are on their way; as many are kept in memory."""

# What a further attempt can't change. A missing bucket is a FileNotFoundError.
_FINAL = (FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError, ImportError)
# The same, of packages that need not be installed: botocore's and google-auth's.
_FINAL_NAMES = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "DefaultCredentialsError")


class StoreError(OSError):
    """A store refused a request, or could not be reached, several times in a row."""


class RemotePath:
    """A place in an object store, which behaves as a ``pathlib.Path`` as far as Treadle needs it.

    It is no ``os.PathLike``: what opens local files raises a TypeError instead of making a folder called ``s3:``.
    Addresses and secrets come from where the store's package looks for them, such as ``AWS_ENDPOINT_URL`` and
    ``AWS_PROFILE``, or from fsspec's own configuration (``FSSPEC_S3_...``).

    Args:
        url: ``scheme://bucket/path``.

    Raises:
        ValueError: the URL has no place in it, leads upwards, or is of a kind that can't be written.
    """

    def __init__(self, url: str) -> None:
        match = _URL.fullmatch(url)
        if match is None:
            raise ValueError(f"{url!r} is no URL: write scheme://bucket/path, such as s3://bucket/run.")
        self.scheme = match[1].lower()
        parts = [part for part in match[2].split("/") if part not in ("", ".")]
        if self.scheme in _READ_ONLY:
            raise ValueError(f"{url}: nothing can be written to {self.scheme}://. Give a folder, or s3://bucket/path.")
        if not parts or ".." in parts or any(c in match[2] for c in "?#*[\n\0"):
            raise ValueError(f"{url!r} must be scheme://bucket/path, without '..' and any of ? # * [.")
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
        """The last part."""
        return self._parts[-1]

    @property
    def parents(self) -> tuple[RemotePath, ...]:
        """The folders around it, the nearest first, the bucket last."""
        texts = ("/".join(self._parts[:end]) for end in range(len(self._parts) - 1, 0, -1))
        return tuple(RemotePath(f"{self.scheme}://{text}") for text in texts)

    @property
    def parent(self) -> RemotePath:
        """The folder around it; a bucket's is itself."""
        return next(iter(self.parents), self)

    def relative_to(self, folder: RemotePath) -> PurePosixPath:
        """Return the path from a folder to here.

        Raises:
            ValueError: it is not in the folder.
        """
        return PurePosixPath(*self._parts).relative_to(PurePosixPath(*folder._parts))

    def is_relative_to(self, folder: RemotePath) -> bool:
        """Return whether it is in a folder, or the folder itself."""
        return self.scheme == folder.scheme and self._parts[: len(folder._parts)] == folder._parts

    # -- requests ------------------------------------------------------------------------------------------------

    @cached_property
    def _store(self) -> Any:
        """fsspec's filesystem, without its cache of listings, which hides what other processes write."""
        import fsspec

        try:
            return fsspec.filesystem(self.scheme, use_listings_cache=False)
        except ImportError as error:
            package, extra = _EXTRAS.get(self.scheme, (error.name or "", ""))
            if not package:
                raise
            raise ModuleNotFoundError(
                f"{self} needs the package {package!r}, which is not installed: pip install 'treadle[{extra}]', or "
                f"pip install {package}.",
                name=package,
            ) from error
        except ValueError as error:
            known = sorted(fsspec.available_protocols())
            raise ValueError(
                f"{self}: {self.scheme}:// is no kind of store that fsspec knows.{nearest(self.scheme, known)}"
            ) from error

    @property
    def _key(self) -> str:
        return str(self._store._strip_protocol(str(self)))

    def _ask(self, action: str, request: Callable[[], T]) -> T:
        """Make a request, again if it fails.

        Raises:
            StoreError: the store refused each time, with its reason.
        """
        store = self._store
        for attempt in range(ATTEMPTS):
            try:
                return request()
            except PermissionError as error:
                raise PermissionError(error.errno, f"{self}: can't {action}: {error.strerror or error}") from error
            except _FINAL:
                raise
            except Exception as error:
                # Packages of stores raise what they like; what is above here knows errors of files.
                reason = str(error) or type(error).__name__
                if type(error).__name__ in _FINAL_NAMES:
                    raise StoreError(f"{self}: can't {action}: {reason}") from error
                if attempt == ATTEMPTS - 1:
                    raise StoreError(f"{self}: can't {action}, tried {ATTEMPTS} times: {reason}") from error
                store.invalidate_cache()
                time.sleep(_PAUSES[min(attempt, len(_PAUSES) - 1)])
        raise AssertionError

    def exists(self) -> bool:
        """Return whether there is an object or a folder."""
        return bool(self._ask("look", lambda: self._store.exists(self._key)))

    def is_file(self) -> bool:
        """Return whether there is an object."""
        return bool(self._ask("look", lambda: self._store.isfile(self._key)))

    def is_dir(self) -> bool:
        """Return whether there is a folder."""
        return bool(self._ask("look", lambda: self._store.isdir(self._key)))

    def names(self) -> list[str]:
        """Return the names of what is in the folder, sorted; nothing if it is none."""
        return sorted({path.partition("/")[0] for path in self._list(depth=1)})

    def files(self) -> dict[str, int]:
        """Return the objects in the folder, but not in those below: the bytes of each by its name."""
        return {name: int(e["size"] or 0) for name, e in self._list(depth=1).items() if e["type"] == "file"}

    def sizes(self) -> dict[str, int]:
        """Return the objects in the folder and in those below: the bytes of each by its path from here."""
        return {path: int(entry["size"] or 0) for path, entry in self._list().items() if entry["type"] == "file"}

    def _list(self, depth: int | None = None) -> dict[str, Any]:
        def request() -> dict[str, Any]:
            found = self._store.find(self._key, maxdepth=depth, withdirs=depth is not None, detail=True)
            return {str(path): entry for path, entry in found.items()}

        try:
            entries = self._ask("list it", request)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        start = f"{self._key.rstrip('/')}/"
        return {path[len(start) :]: entry for path, entry in entries.items() if len(path) > len(start)}

    def version(self) -> tuple[Any, ...]:
        """Return what changes when an object is replaced.

        Raises:
            FileNotFoundError: there is none.
        """
        entry = self._ask("look", lambda: self._store.info(self._key))
        return tuple(str(entry.get(name)) for name in ("ETag", "etag", "LastModified", "created", "mtime", "size"))

    def age(self) -> float:
        """Return how many seconds ago an object was written, by the store's clock and this machine's.

        Raises:
            FileNotFoundError: there is none.
        """
        return float(time.time() - self._ask("look", lambda: self._store.modified(self._key)).timestamp())

    def read_bytes(self, limit: int | None = None) -> bytes:
        """Return an object's content.

        Args:
            limit: the most bytes to read.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it is larger.
        """
        if limit is not None and int(self._ask("look", lambda: self._store.size(self._key)) or 0) > limit:
            raise ValueError(f"it is larger than {limit:,} bytes")
        return bytes(self._ask("read it", lambda: self._store.cat_file(self._key)))

    def write_bytes(self, data: bytes, exclusive: bool = False) -> None:
        """Put an object into the place of what may be there.

        Args:
            data: its content.
            exclusive: only where there is none.

        Raises:
            FileExistsError: ``exclusive``, and there is one.
        """
        mode = "create" if exclusive else "overwrite"
        self._write("write it", lambda: self._store.pipe_file(self._key, data, mode=mode))

    def _write(self, action: str, request: Callable[[], Any]) -> None:
        try:
            self._ask(action, request)
        except FileNotFoundError as error:  # no bucket
            raise StoreError(f"{self}: can't {action}: {error}") from error

    def upload(self, file: Path) -> None:
        """Put a local file's content into an object, a large one in several requests at once."""
        options = {"chunksize": _FILE_PART_BYTES} if self.scheme in _EXTRAS else {}
        self._write("upload it", lambda: self._store.put_file(str(file), self._key, **options))

    @property
    def takes_parts(self) -> bool:
        """Whether the store's package uploads parts by themselves, as that of S3 does, and not files alone."""
        return self.scheme in ("s3", "s3a") and hasattr(self._store, "call_s3")

    def upload_parts(self, pieces: Iterable[bytes | memoryview], size: int) -> None:
        """Put content into an object while it is being made, several parts at once; see `takes_parts`.

        Args:
            pieces: The content. Each piece must stay as it is until a few more are asked for.
            size: Its size in bytes.

        Raises:
            StoreError: The store refused. No object is there then.
        """
        if size <= _PART_BYTES:
            self.write_bytes(b"".join(pieces))
            return
        part_bytes = max(_PART_BYTES, -(-size // _MOST_PARTS))
        bucket, key, _ = self._store.split_path(self._key)
        place = {"Bucket": bucket, "Key": key}
        place["UploadId"] = self._call_s3("create_multipart_upload", **place)["UploadId"]
        slots = threading.Semaphore(_PARTS_AT_ONCE)

        def upload(number: int, body: bytes) -> dict[str, Any]:
            try:
                answer = self._call_s3("upload_part", **place, PartNumber=number, Body=body)
                return {"PartNumber": number, "ETag": answer["ETag"]}
            finally:
                slots.release()

        try:
            with ThreadPoolExecutor(_PARTS_AT_ONCE, thread_name_prefix="treadle-part") as pool:
                futures: list[Future[dict[str, Any]]] = []
                for number, body in enumerate(_join_pieces(pieces, part_bytes), start=1):
                    slots.acquire()
                    if failed := [future for future in futures if future.done() and future.exception()]:
                        failed[0].result()
                    futures.append(pool.submit(upload, number, body))
                parts = {"Parts": [future.result() for future in futures]}
            self._complete(place, parts, size)
        except BaseException:
            with suppress(OSError):  # a store removes parts that belong to no object, as its bucket says
                self._call_s3("abort_multipart_upload", **place)
            raise

    def _complete(self, place: dict[str, Any], parts: dict[str, Any], size: int) -> None:
        """Make an object of its parts. Where the answer to a request was lost, the next one finds no upload."""
        try:
            self._call_s3("complete_multipart_upload", **place, MultipartUpload=parts)
        except OSError:
            if not self.is_file() or int(self._ask("look", lambda: self._store.size(self._key)) or 0) != size:
                raise

    def _call_s3(self, method: str, **options: Any) -> Any:
        answers: list[Any] = []
        self._write("upload it", lambda: answers.append(self._store.call_s3(method, **options)))
        return answers[-1]

    def download(self, file: Path) -> None:
        """Put an object's content into a local file.

        Raises:
            FileNotFoundError: there is no such object.
        """
        self._ask("download it", lambda: self._store.get_file(self._key, str(file)))

    def unlink(self, missing_ok: bool = True) -> None:
        """Delete an object."""
        try:
            self._ask("delete it", lambda: self._store.rm_file(self._key))
        except FileNotFoundError:
            if not missing_ok:
                raise


def _join_pieces(pieces: Iterable[bytes | memoryview], size: int) -> Iterator[bytes]:
    """Yield the content of pieces again, ``size`` bytes at a time; the last ones may be fewer."""
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
"""A place on a disk or in an object store."""


def is_url(place: object) -> bool:
    """Return whether a place is written as a URL, ``scheme://...``; a path of a disk is not."""
    return isinstance(place, RemotePath) or (isinstance(place, str) and _URL.match(place) is not None)


def as_path(place: str | os.PathLike[str] | RemotePath) -> AnyPath:
    """Return a place as what can be asked about it: a ``Path``, or a `RemotePath` for a URL.

    Args:
        place: a path, or a URL. ``file://`` leads to a path.

    Raises:
        TypeError: it is neither.
        ValueError: it is a URL that is no place in a store.
    """
    if isinstance(place, RemotePath):
        return place
    if isinstance(place, str) and is_url(place):
        if place.lower().startswith("file://"):
            return Path(place[len("file://") :])
        return RemotePath(place)
    return Path(place)


def lexists(place: str | os.PathLike[str] | RemotePath) -> bool:
    """Return whether there is anything at a place, even a link that leads nowhere."""
    path = as_path(place)
    return path.exists() if isinstance(path, RemotePath) else os.path.lexists(path)


def absolute(place: str | os.PathLike[str] | RemotePath) -> AnyPath:
    """As `as_path`, with a path made absolute."""
    path = as_path(place)
    return path if isinstance(path, RemotePath) else Path(os.path.abspath(path))
