"""Download of weights from the web or from an object store."""

from __future__ import annotations

import hashlib
import re
import shutil
import urllib.parse
from pathlib import Path
from typing import Any

from ...common.messages import warn
from ...common.remote_path import RemotePath, is_url
from ..checkpoint import CheckpointNotFoundError

MAX_BYTES = 256 * 2**30
_PIECE = 2**20
_TIMEOUT = 60
_SHA256 = re.compile(r"[0-9a-f]{64}")
_WEB = ("http", "https", "file")


def find_in_store(source: object) -> RemotePath | None:
    """Return the location of a source in an object store; None for a path, or for an http, https or file URL.

    A source in an object store needs no digest, because the store controls who can write to it.
    """
    if not is_url(source) or str(source).partition("://")[0].lower() in _WEB:
        return None
    return RemotePath(str(source))


def fetch_from_store(source: RemotePath, folder: Path) -> Path:
    """Download a source from an object store to the local ``folder``, and return the local path.

    If the source is a folder, the objects in its subfolders are not downloaded.

    Raises:
        CheckpointNotFoundError: If the source does not exist.
        ValueError: If the source is not supported.
        OSError: If the object store reports an error.
    """
    if source.is_file():
        source.download(folder / source.name)
        return folder / source.name
    names = source.files()
    if not names:
        raise CheckpointNotFoundError(f"{source} does not exist or is empty. Check the URL.")
    for name in names:
        (source / name).download(folder / name)
    return folder


def check_digest(path: Path, sha256: str) -> None:
    """Raise a ValueError if ``sha256`` is malformed or is not the file's SHA-256 digest."""
    expected = _parse_digest(sha256)
    with path.open("rb") as file:
        _compare(path, hashlib.file_digest(file, "sha256").hexdigest(), expected)


def fetch(url: str, sha256: str | None, folder: Path) -> Path:
    """Download a file from the web, verify its digest, and return the local path. ``file://`` URLs are not copied.

    Without ``sha256``, a warning states the digest of a downloaded file.

    Raises:
        ValueError: If ``sha256`` is malformed or not the file's digest, if the file is too large, or if a ``file://``
            URL does not name a file on this machine.
        OSError: If the download failed.
    """
    expected = None if sha256 is None else _parse_digest(sha256)
    if url.lower().startswith("file:"):
        parts = urllib.parse.urlsplit(url)
        path = Path(urllib.parse.unquote(parts.path))
        if parts.netloc not in ("", "localhost") or not path.is_file():
            raise ValueError(f"{url} is not a file on this machine. Check the URL, or pass the file's path.")
        if sha256 is not None:
            check_digest(path, sha256)
        return path
    target = folder / "weights"
    try:
        actual = _download(url, target)
    except OSError as error:
        reason = error if hasattr(error, "code") else getattr(error, "reason", error)
        raise OSError(
            f"{url} can't be downloaded: {getattr(reason, 'strerror', None) or reason}. Check the URL and the network, "
            "or download the file yourself and pass its path."
        ) from error
    if expected is None:
        warn(f"{url} was read without a digest, so a replaced file is not noticed. Pass sha256={actual!r}.")
    else:
        _compare(url, actual, expected)
    return target


def _download(url: str, target: Path) -> str:
    import http.client
    import urllib.request as requests

    # Without urllib's own handlers of file:, ftp: and data:, to which a server could redirect.
    opener = requests.OpenerDirector()
    for handler in (
        *(requests.ProxyHandler, requests.HTTPHandler, requests.HTTPSHandler, requests.UnknownHandler),
        *(requests.HTTPRedirectHandler, requests.HTTPDefaultErrorHandler, requests.HTTPErrorProcessor),
    ):
        opener.add_handler(handler())
    digest, size = hashlib.sha256(), 0
    try:
        with opener.open(url, timeout=_TIMEOUT) as response, target.open("wb") as file:
            limit = min(MAX_BYTES, shutil.disk_usage(target.parent).free)
            _check_size(url, _read_declared_size(response), limit, target)
            while piece := response.read(_PIECE):
                size += len(piece)
                _check_size(url, size, limit, target)
                digest.update(piece)
                file.write(piece)
    except http.client.HTTPException as error:
        raise OSError(f"the server's response is not valid HTTP ({type(error).__name__}: {error})") from error
    return digest.hexdigest()


def _read_declared_size(response: Any) -> int:
    length = response.headers.get("Content-Length", "0")
    return int(length) if length.isdecimal() and len(length) < 20 else 0


def _check_size(url: str, size: int, limit: int, target: Path) -> None:
    if size > limit:
        raise ValueError(
            f"{url} has more than {limit:,} bytes, the limit for downloads to {target.parent}. Download the file "
            "yourself, and pass its path."
        )


def _parse_digest(sha256: object) -> str:
    if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256.lower()):
        raise ValueError(f"sha256={sha256!r:.100} must be the 64 hexadecimal digits that `sha256sum FILE` prints.")
    return sha256.lower()


def _compare(place: object, actual: str, expected: str) -> None:
    if actual != expected:
        raise ValueError(
            f"{place} has the digest sha256={actual}, not {expected}, so nothing in it was read. Copy or download the "
            "file again, or correct sha256."
        )
