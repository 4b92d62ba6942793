"""Local mirror of a folder in an object store, such as logs."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from .before_exit import before_exit
from .messages import warn
from .remote_path import AnyPath, RemotePath, as_path
from .temporary import keep, temporary_folder

SECONDS = 10.0
"""Longest time in seconds until the upload of a changed file begins."""
_MOST_BYTES = 2**30  # size of a file that is downloaded when its folder is opened

_mirrors: dict[RemotePath, _Mirror] = {}
_lock = threading.Lock()


def local_folder(place: str | os.PathLike[str] | AnyPath) -> Path:
    """Return the local folder for a path or URL: the path itself, or a folder that is mirrored to the URL.

    The first call for a URL downloads the files in its folder, but not files in subfolders or over 1 GiB. From then on,
    a thread of this process uploads each changed file and removes deleted files from the store; see `flush`. Files
    whose names begin with a dot or end in ``.tmp`` are neither downloaded nor uploaded.
    """
    path = as_path(place)
    if isinstance(path, Path):
        return path
    with _lock:
        around = next((folder for folder in (path, *path.parents) if folder in _mirrors), None)
        if around is None:
            _mirrors[path] = _Mirror(path)
            return _mirrors[path].open(path)
        return _mirrors[around].open(path)


def flush(place: str | os.PathLike[str] | AnyPath | None = None) -> None:
    """Upload the changed files of mirrored folders, remove deleted ones from the store, and wait until this is done.

    If a request fails, the local folder is kept when the process ends.

    Args:
        place: URL of a mirrored folder or of a place inside it. Default: all mirrored folders.
    """
    if not _mirrors:
        return
    path = None if place is None else as_path(place)
    for url, mirror in list(_mirrors.items()):
        if path is None or path == url or url in path.parents:
            mirror.flush()


class _Mirror:
    """Folder in a store and its local copy in this process."""

    def __init__(self, url: RemotePath) -> None:
        self._url = url
        self._here = temporary_folder(str(url))
        self._opened: set[RemotePath] = set()
        self._known: dict[str, tuple[int, int]] = {}  # by path: the mark of the file that is in the store
        self._uploading = threading.Lock()
        self._ended = threading.Event()
        self._failing = ""
        threading.Thread(target=self._follow, name="treadle-mirror", daemon=True).start()
        before_exit(self._finish)

    def open(self, url: RemotePath) -> Path:
        """Return the local folder for a URL. The first call for a URL downloads its files; see `local_folder`."""
        here = self._here / str(url).removeprefix(str(self._url)).strip("/")
        if url not in self._opened:
            here.mkdir(parents=True, exist_ok=True)
            for name, size in url.files().items():
                if size <= _MOST_BYTES and not (here / name).exists() and not _stays(name):
                    (url / name).download(here / name)
                    self._known[(here / name).relative_to(self._here).as_posix()] = _mark(here / name)
            self._opened.add(url)
        return here

    def flush(self) -> None:
        """Upload the changes. If this fails, warn once per error, and keep the local folder when the process ends."""
        try:
            self._upload_changes()
            self._failing = ""
        except OSError as error:
            keep(self._here)
            if str(error) != self._failing:
                self._failing = str(error)
                warn(f"the latest changes can't be uploaded to {self._url} ({error}). They are kept in {self._here}.")

    def _follow(self) -> None:
        while not self._ended.wait(SECONDS):
            with contextlib.suppress(OSError):  # `flush` reports the error if it persists
                self._upload_changes()

    def _finish(self) -> None:
        self._ended.set()
        self.flush()

    def _upload_changes(self) -> None:
        with self._uploading:
            present = set()
            for name, file in _files(self._here):
                present.add(name)
                with contextlib.suppress(FileNotFoundError):  # deleted in the meantime
                    if self._known.get(name) != (mark := _mark(file)):
                        (self._url / name).upload(file)
                        self._known[name] = mark
            for name in [name for name in self._known if name not in present]:
                (self._url / name).unlink()
                del self._known[name]


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    for parent, _, names in os.walk(folder):
        for name in names:
            if not _stays(name):
                file = Path(parent, name)
                yield file.relative_to(folder).as_posix(), file


def _stays(name: str) -> bool:
    return name.startswith(".") or name.endswith(".tmp")


def _mark(file: Path) -> tuple[int, int]:
    status = file.stat()
    return status.st_size, status.st_mtime_ns
