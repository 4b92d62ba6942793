"""A checkpoint that is being loaded: opened once, verified once, and passed on to all that read from it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from ...common.remote_path import AnyPath, RemotePath, StoreError, as_path
from ...strategies import World
from ...strategies.processes import identify_host
from . import filesystem, remote, store
from .manifest import MANIFEST, Manifest, read_manifest, read_source
from .parts import Part, has_part, list_part_files, open_files

T = TypeVar("T")


class OpenCheckpoint:
    """A committed checkpoint whose manifest is parsed, and whose files are verified and opened at most once.

    No file stays open: tensors are read when they are asked for. After `verify`, a file that is no longer the one that
    was verified is an error.

    Args:
        path: the checkpoint's directory or URL.
        manifest: its manifest, if that was read before.

    Attributes:
        path: the directory or URL.
        manifest: what the checkpoint says about itself.
        verified: all files are known to have the content that was committed.

    Raises:
        ValueError: it isn't a checkpoint, its manifest is damaged, or it was written by a newer Treadle.
    """

    def __init__(self, path: AnyPath | str, manifest: Manifest | None = None) -> None:
        self.path = as_path(path)
        if manifest is None:
            store.find_again(self.path)
            manifest = read_manifest(self.path)
        self.manifest = manifest
        self.verified = False
        self._marks: dict[str, filesystem.Mark] = {}
        self._parts: dict[str, Part] = {}
        self._download: remote.Download | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs; it opens the parts itself, and downloads files of its own."""
        marks = self._marks if isinstance(self.path, Path) else {}
        return {**vars(self), "_parts": {}, "_download": None, "_marks": marks}

    @property
    def folder(self) -> Path:
        """Where its files are: in it, or for a URL where they are downloaded to."""
        if isinstance(self.path, Path):
            return self.path / self.manifest.folder
        if self._download is None:
            self._download = remote.Download(self.path, self.manifest)
        return self._download.folder

    def fetch(self, names: Iterable[str]) -> None:
        """See that files are in `folder`, which takes time only if the checkpoint is at a URL.

        Raises:
            ValueError: one of them is missing, or has other content than was committed.
            OSError: the store or the disk refused.
        """
        folder = self.folder
        if self._download is not None:
            self._download.fetch(names)
            for name in names:
                self._marks.setdefault(name, filesystem.mark(folder / name))

    def has(self, name: str) -> bool:
        """Return whether the checkpoint has a part of this name."""
        return has_part(self.manifest.files, name)

    def open_part(self, name: str) -> Any:
        """Return a part's state, its tensors unread (`Stored`); see `parts.encode_part` for the names.

        Raises:
            ValueError: there is no such part, or its content is damaged.
        """
        return self.part(name).unread()

    def read_part(self, name: str) -> Any:
        """Return a part's state with its tensors in memory; see `open_part`."""
        return self.part(name).read()

    def part(self, name: str) -> Part:
        """Return a part with its files opened, the same object each time."""
        if name not in self._parts:
            names = list_part_files(name, self.manifest.files)
            self.fetch(names)
            self._check_marks(names)
            self._parts[name] = open_files(self.path, self.manifest.files, name, self.folder, self)
        return self._parts[name]

    def check_unchanged(self) -> None:
        """See that no other save was committed to this path since the checkpoint was opened.

        Raises:
            ValueError: it was replaced, or is gone.
        """
        try:
            source = read_source(self.path)
        except ValueError:
            source = b""
        self._compare(source)

    def _compare(self, source: bytes) -> None:
        if source != self.manifest.source:
            raise ValueError(f"{self.path} was replaced while it was read. Nothing is changed; load it again.")

    def verify(self, world: World | None = None) -> None:
        """See that every file has the content that was committed; each byte is read once. A second call does nothing.

        Args:
            world: the processes that load the checkpoint, all of which must call it. Those that see the same file
                system share out the files. Without it, this process reads all of them.

        Raises:
            ValueError: the same on every process: a file is missing, of another size or of other content, or the
                checkpoint was replaced since it was opened.
        """
        if self.verified:
            return
        rank = 0 if world is None else world.rank
        # Looked at before anyone begins to read: what changes from here on is not what was verified.
        marks = _run_on_every_rank(world, self._check_and_mark)
        peers = [peer for peer, mark in enumerate(marks) if mark == marks[rank]]
        entries = self.manifest.files | self.manifest.others
        largest_first = sorted(entries, key=lambda name: (-entries[name]["bytes"], name))
        shares = {peer: largest_first[number :: len(peers)] for number, peer in enumerate(peers)}
        if isinstance(self.path, RemotePath):
            folders = _run_on_every_rank(world, lambda: self._fetch_share(shares[rank]))
            _run_on_every_rank(world, lambda: self._adopt({folders[peer]: share for peer, share in shares.items()}))
        else:
            _run_on_every_rank(world, lambda: self._check(shares[rank], digests=True))
        self.verified = True

    def _check_and_mark(self) -> tuple[Any, ...]:
        """Check names and sizes and note each file's mark; returns what tells the file system of this process."""
        self._compare(read_source(self.path))  # a path that is wrong on this process alone is an error of its own
        if isinstance(self.path, RemotePath):
            remote.check_files(self.path, self.manifest)
            return socket.gethostname(), identify_host()  # processes of one machine share what is downloaded
        names = [*self.manifest.files, *self.manifest.others]
        self._check(names, digests=False)
        self._marks = {name: filesystem.mark(self.folder / name) for name in names}
        # The file's number is not the same where each machine has a copy of its own.
        status = (self.path / MANIFEST).stat()
        return status.st_ino, status.st_mtime_ns, status.st_size

    def _fetch_share(self, names: list[str]) -> Path:
        self.fetch(names)
        return self.folder

    def _adopt(self, shares: dict[Path, list[str]]) -> None:
        """Take over what other processes of this machine have fetched, into their folders."""
        assert self._download is not None
        for folder, names in shares.items():
            if folder.is_dir():  # else the machine's processes have temporary folders that others don't see
                self._download.adopt(folder, names)
            self.fetch(names)

    def _check(self, names: list[str], digests: bool) -> None:
        files, of_hooks = self.manifest.files, self.manifest.others
        for name in names:
            entry = files[name] if name in files else of_hooks[name]
            filesystem.check_file(self.folder, name, entry, digests, links=name in of_hooks)

    def _check_marks(self, names: list[str]) -> None:
        for name in names if self.verified else ():
            path = self.folder / name
            if (
                path.exists() and filesystem.mark(path) != self._marks[name]
            ):  # one that is missing is an error elsewhere
                raise ValueError(f"{self.path}: {name} was changed after it was verified. Load the checkpoint again.")


def open_together(world: World, path: AnyPath | str | os.PathLike[str]) -> OpenCheckpoint:
    """Open the checkpoint of a path on all processes. Rank zero parses the manifest; nothing is verified yet.

    Args:
        world: the processes; all must call it.
        path: the checkpoint, as this process reaches it.

    Raises:
        ValueError: it is no checkpoint; a RuntimeError on the processes other than rank zero.
    """
    opened: OpenCheckpoint | None = None
    with world.together():
        if world.is_main:
            opened = OpenCheckpoint(as_path(path))
    shared: OpenCheckpoint = world.broadcast(opened)
    shared.path = as_path(path)
    return shared


def find_first_intact(world: World, candidates: Iterator[OpenCheckpoint], skipped: list[str]) -> OpenCheckpoint | None:
    """Verify candidates until one is intact; returns that one on every process, or None.

    Args:
        world: the processes; all must call it.
        candidates: in order of preference; only rank zero's are looked at.
        skipped: gets one sentence for each candidate that is damaged.
    """
    while True:
        candidate: OpenCheckpoint | None = None
        with world.together():
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


def _run_on_every_rank(world: World | None, work: Callable[[], T]) -> list[T]:
    """Do some work on every process, here alone without a world; returns the results in order of ranks.

    Raises:
        ValueError: on every process, with the words of the lowest rank that met a ValueError or an OSError.
        StoreError: on every process, if that is what it met: it says nothing of the checkpoint.
    """
    if world is None:
        return [work()]
    result: T | None = None
    problem: tuple[type[Exception], str] | None = None
    with world.together():  # of what else may fail, such as a lack of memory, the others hear as well
        try:
            result = work()
        except StoreError as error:
            problem = StoreError, str(error)
        except (OSError, ValueError) as error:
            problem = ValueError, str(error)
    every: list[tuple[T, tuple[type[Exception], str] | None]] = world.gather_objects((result, problem))
    for _, problem in every:
        if problem is not None:
            kind, text = problem
            raise kind(text)
    return [value for value, _ in every]
