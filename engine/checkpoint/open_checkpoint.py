"""Checkpoint to load, which is opened once, verified once, and shared by its readers."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ...common.remote_path import AnyPath, RemotePath, StoreError, as_path
from ...strategies import World
from ...strategies.processes import identify_host
from . import filesystem, remote
from .atomic_swap import recover_interrupted
from .parts import (
    MANIFEST,
    CheckpointNotFoundError,
    Manifest,
    Part,
    check_files,
    has_part,
    list_part_files,
    open_files,
    read_manifest,
    read_source,
)

T = TypeVar("T")


class OpenCheckpoint:
    """Committed checkpoint whose manifest is parsed, and whose files or records are opened on demand.

    After `verify`, opening a part whose files have changed raises an error.

    Args:
        path: The checkpoint's file, directory or URL.
        manifest: The checkpoint's manifest. Default: read from the path.

    Attributes:
        path: The file, directory or URL.
        manifest: The parsed manifest of the checkpoint.
        verified: True once `verify` has succeeded.

    Raises:
        ValueError: If the path is not a checkpoint, or its manifest cannot be read.
        OSError: If the object store or the disk reports an error.
    """

    def __init__(self, path: AnyPath | str, manifest: Manifest | None = None) -> None:
        self.path = as_path(path)
        if manifest is None:
            recover_interrupted(self.path)
            manifest = read_manifest(self.path)
        self.manifest = manifest
        self.verified = False
        self._marks: dict[str, filesystem.Mark] = {}
        self._parts: dict[str, Part] = {}
        self._download: remote.Download | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to send to another process, which opens the parts and downloads the files itself."""
        marks = self._marks if isinstance(self.path, Path) else {}
        return {**vars(self), "_parts": {}, "_download": None, "_marks": marks}

    @property
    def folder(self) -> Path:
        """Folder that contains the files; for a URL, the folder that they are downloaded to; or the one file itself."""
        if isinstance(self.path, Path):
            return self.path / self.manifest.folder if self.manifest.records is None else self.path
        if self._download is None:
            self._download = remote.Download(self.path, self.manifest)
        return self._download.folder

    def fetch(self, names: Iterable[str]) -> None:
        """Make files available in `folder`. For a URL, this downloads them.

        Args:
            names: Names of the files, as listed in the manifest.

        Raises:
            ValueError: If a file is missing or damaged.
            OSError: If a request to the store or a disk operation fails.
        """
        folder = self.folder
        if self._download is not None:
            self._download.fetch(names)
            for name in names:
                self._marks.setdefault(name, filesystem.mark(folder / name))

    def has(self, name: str) -> bool:
        """Return whether the checkpoint has a part called ``name``.

        Args:
            name: The name of the part, such as ``"model"``.
        """
        return has_part(self.manifest.files, name)

    def open_part(self, name: str) -> Any:
        """Return a part's state with `Stored` tensors, which are read on demand.

        Args:
            name: The name of the part, such as ``"model"``.

        Raises:
            ValueError: If the checkpoint does not have the part, or the part is damaged or was changed.
            OSError: If a file of a URL cannot be downloaded.
        """
        return self.part(name).unread()

    def read_part(self, name: str) -> Any:
        """Return a part's state with its tensors in memory; see `open_part`.

        Args:
            name: The name of the part, such as ``"model"``.
        """
        return self.part(name).read()

    def part(self, name: str) -> Part:
        """Return a part with the headers of its files read; see `open_part`.

        Args:
            name: The name of the part, such as ``"model"``. Each call with the same name returns the same object.
        """
        if name not in self._parts:
            names = list_part_files(name, self.manifest.files)
            self.fetch(names)
            self._check_marks(names)
            self._parts[name] = open_files(self.path, self.manifest, name, self.folder, self)
        return self._parts[name]

    def check_unchanged(self) -> None:
        """Check that no other save was committed to this path since the checkpoint was opened.

        Raises:
            ValueError: If the checkpoint was replaced or deleted.
            OSError: If the object store cannot be reached.
        """
        try:
            source = read_source(self.path)
        except ValueError:
            source = b""
        self._compare(source)

    def _compare(self, source: bytes) -> None:
        if source != self.manifest.source:
            raise ValueError(
                f"{self.path} was replaced or deleted while it was being read. Nothing was loaded from it. If it "
                "still exists, load it again. Otherwise, load another checkpoint."
            )

    def verify(self, world: World | None = None) -> None:
        """Check that every file has the committed content. For a URL, all files are downloaded.

        Args:
            world: The processes that load the checkpoint, all of which call the method. Those with the same file system
                (for a URL, on the same machine) divide the files among them. Default: this process reads all files.

        Raises:
            ValueError: On every process, if a file is missing or damaged, or the checkpoint was replaced or deleted.
            OSError: On every process, if the object store cannot be reached.
        """
        if self.verified:
            return
        rank = 0 if world is None else world.rank
        # Recorded before any rank reads: the content after a later change would not be the verified one.
        marks = _run_on_every_rank(world, self._check_and_mark)
        peers = [peer for peer, mark in enumerate(marks) if mark == marks[rank]]
        entries = self.manifest.checked
        largest_first = sorted(entries, key=lambda name: (-entries[name]["bytes"], name))
        shares = {peer: largest_first[number :: len(peers)] for number, peer in enumerate(peers)}
        if isinstance(self.path, RemotePath):
            folders = _run_on_every_rank(world, lambda: self._fetch_share(shares[rank]))
            _run_on_every_rank(world, lambda: self._adopt({folders[peer]: share for peer, share in shares.items()}))
        else:
            _run_on_every_rank(world, partial(check_files, self.path, self.manifest, True, shares[rank]))
        self.verified = True

    def _check_and_mark(self) -> tuple[Any, ...]:
        """Check names and sizes, record marks of local files, and return an identifier of the process's file system."""
        self._compare(read_source(self.path))  # a path that is wrong only on this process is an error of its own
        if isinstance(self.path, RemotePath):
            remote.check_files(self.path, self.manifest)
            return socket.gethostname(), identify_host()  # processes on one machine share downloaded files
        if self.manifest.records is not None:
            self._marks, status = {"": filesystem.mark(self.path)}, self.path.stat()
        else:
            check_files(self.path, self.manifest, digests=False)
            self._marks = {name: filesystem.mark(self.folder / name) for name in self.manifest.checked}
            status = (self.path / MANIFEST).stat()
        # The inode is not the same if each machine has a copy of its own.
        return status.st_ino, status.st_mtime_ns, status.st_size

    def _fetch_share(self, names: list[str]) -> Path:
        self.fetch(names)
        return self.folder

    def _adopt(self, shares: dict[Path, list[str]]) -> None:
        """Link or copy the files that other processes of this machine have downloaded, and download the rest."""
        assert self._download is not None
        for folder, names in shares.items():
            if folder.is_dir():  # otherwise the processes on the machine have temporary folders that others cannot see
                self._download.adopt(folder, names)
            self.fetch(names)

    def _check_marks(self, names: list[str]) -> None:
        if not self.verified:
            return
        if self.manifest.records is not None:
            names = [""]
        for name in names:
            path = self.folder / name
            if path.exists() and filesystem.mark(path) != self._marks[name]:  # a missing file is reported elsewhere
                changed = f"{self.path}: {name} was" if name else f"{self.path} was"
                raise ValueError(f"{changed} changed after it was verified. Load the checkpoint again.")


def open_together(world: World, path: AnyPath | str | os.PathLike[str]) -> OpenCheckpoint:
    """Open the checkpoint at a path on all processes. Rank zero parses the manifest; nothing is verified yet.

    If there is nothing at the path, all ranks raise the same error, so that each can start from scratch.
    """
    opened: OpenCheckpoint | CheckpointNotFoundError | None = None
    with world.failing_together():
        if world.is_main:
            try:
                opened = OpenCheckpoint(as_path(path))
            except CheckpointNotFoundError as error:
                opened = error.with_traceback(None)
    shared: OpenCheckpoint | CheckpointNotFoundError = world.broadcast(opened)
    if isinstance(shared, CheckpointNotFoundError):
        raise shared
    shared.path = as_path(path)
    return shared


def find_first_intact(world: World, candidates: Iterator[OpenCheckpoint], skipped: list[str]) -> OpenCheckpoint | None:
    """Verify rank zero's candidates until one is intact, and return it on every process, or None if none is."""
    while True:
        candidate: OpenCheckpoint | None = None
        with world.failing_together():
            if world.is_main:
                candidate = next(candidates, None)
        candidate = world.broadcast(candidate)
        if candidate is None:
            return None
        try:
            candidate.verify(world)
        except ValueError as error:
            skipped.append(str(error))
        else:
            return candidate


def read_part(path: Path | str, name: str) -> Any:
    """Return one part of a committed checkpoint with its tensors in memory. Only what is read is verified."""
    return OpenCheckpoint(Path(path), read_manifest(path)).read_part(name)


def _run_on_every_rank(world: World | None, work: Callable[[], T]) -> list[T]:
    """Run a function on every process, or only on this one if ``world`` is None; return the results in rank order.

    An OSError becomes a ValueError on every process, but a StoreError does not, because it does not mean that the
    checkpoint is damaged.
    """
    if world is None:
        return [work()]
    result: Any = None
    with world.failing_together():  # the other ranks also learn of any other failure, such as a lack of memory
        try:
            result = work()
        except (OSError, ValueError) as error:
            result = StoreError(str(error)) if isinstance(error, StoreError) else ValueError(str(error))
    results: list[Any] = world.gather_objects(result)
    if failures := [value for value in results if isinstance(value, Exception)]:
        raise failures[0]
    return results
