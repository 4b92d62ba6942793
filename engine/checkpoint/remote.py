"""Checkpoints in an object store, each uploaded next to the previous one and committed by one request.

A checkpoint's URL contains ``manifest.json`` and one folder of files, ``data-<random>``, which the manifest names. A
new save to the same URL writes its files to a new folder and does not change the existing checkpoint before the commit.
The one request that replaces the manifest is the commit. Folders that the manifest does not name belong to a save in
progress, or are left over from a killed or an earlier save. Other objects are foreign and are not deleted.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from ...common.messages import abbreviate, warn
from ...common.remote_path import RemotePath
from ...common.temporary import temporary_folder
from ...strategies.processes import forget_unfinished, note_unfinished
from . import filesystem
from .parts import FOLDER, MANIFEST, Files, Manifest, read_manifest, read_manifests, read_source, serialize, write_file

T = TypeVar("T")

_AT_ONCE = 4  # files transferred concurrently; a large one already takes several requests


def check_target(target: RemotePath) -> None:
    """Check that a checkpoint may be written to a URL.

    Raises:
        ValueError: If something other than a checkpoint exists at the URL.
    """
    objects = target.sizes()
    if MANIFEST not in objects and (foreign := _find_foreign(objects)):
        raise ValueError(
            f"{target} contains {foreign[0]} and is not a checkpoint, so it isn't replaced. Move its files, or save "
            "elsewhere."
        )
    if not objects and target.is_file():
        raise ValueError(f"{target} is an object, but a checkpoint needs a folder. Save elsewhere.")


def check_writable(directory: RemotePath) -> None:
    """Check before a run that checkpoints can be saved, by writing an object and deleting it again.

    Raises:
        OSError: If checkpoints cannot be saved. The text gives the reason.
    """
    probe = directory / f".probe-{os.urandom(8).hex()}"
    try:
        probe.write_bytes(b"treadle")
        probe.unlink()
    except OSError as error:
        reason = error.strerror or str(error)
        raise OSError(
            error.errno,
            f"can't save checkpoints in {directory}: {reason}. Check the bucket and the permissions of this job.",
        ) from error


def list_checkpoints(directory: RemotePath) -> Iterator[RemotePath]:
    """Yield the URLs of the committed checkpoints in a folder, including damaged ones."""
    for name in directory.names():
        if not name.startswith(".") and (directory / name / MANIFEST).is_file():
            yield directory / name


def _find_next_sequence(directory: RemotePath) -> int:
    """Return a sequence number higher than those of all readable manifests in a folder.

    The process remembers the number, so later calls need not list the folder again.
    """
    if directory not in _known_sequences:
        manifests = [manifest for manifest, _ in read_manifests(list_checkpoints(directory))[0]]
        _known_sequences[directory] = max((manifest.sequence for manifest in manifests), default=0)
    _known_sequences[directory] += 1
    return _known_sequences[directory]


_known_sequences: dict[RemotePath, int] = {}
"""Highest sequence number in each folder that this process has saved to."""


def check_files(path: RemotePath, manifest: Manifest, fix: str = filesystem.RESTORE) -> None:
    """Raise a ValueError unless a checkpoint's objects exist, with the sizes in its manifest.

    ``fix`` is the advice at the end of the error message.
    """
    objects = path.sizes()
    for name, entry in manifest.checked.items():
        size = objects.get(manifest.path_of(name))
        if size is None:
            raise ValueError(f"{path}: {name} is missing. {fix}")
        if size != entry["bytes"]:
            raise ValueError(f"{path}: {name} has {size:,} bytes, but {entry['bytes']:,} were written. {fix}")


def remove(path: RemotePath) -> None:
    """Delete a committed checkpoint. The manifest is deleted first; without it, no checkpoint exists at the URL.

    Raises:
        ValueError: If no checkpoint with a readable manifest exists at the URL, or the URL contains foreign objects. In
            these cases, nothing is changed.
    """
    manifest, objects = read_manifest(path), path.sizes()
    if others := [name for name in _find_foreign(objects) if name not in manifest.names]:
        raise ValueError(
            f"{path} contains files that do not belong to the checkpoint ({abbreviate(others, 5)}), so it isn't "
            "deleted. Move them elsewhere, or delete the folder yourself."
        )
    (path / MANIFEST).unlink()
    _delete(path, (name for name in objects if name != MANIFEST))


def _delete(path: RemotePath, names: Iterable[str]) -> None:
    """Delete objects in a folder. ``names`` are their paths relative to it."""
    for name in sorted(names):
        (path / name).unlink()


def _delete_superseded(target: RemotePath, folder: str) -> None:
    """Delete the objects of earlier saves under a checkpoint's URL, but not the new checkpoint's ``folder``.

    If the store rejects a request, this only causes a warning.
    """
    try:
        _delete(target, (name for name in target.sizes() if _is_data(name) and name.partition("/")[0] != folder))
    except OSError as error:
        warn(
            f"{target} is saved, but the checkpoint that it replaced can't be deleted: {error}. The next Trainer run "
            "in this folder, or the next save to this path, deletes it."
        )


def recover(directory: RemotePath) -> list[str]:
    """Delete the objects that killed and earlier saves left in a folder, except next to an unreadable manifest.

    Return a message for each checkpoint's URL where objects were deleted.
    """
    left: dict[str, list[str]] = {}
    objects = directory.sizes()
    for name in objects:
        checkpoint, _, inside = name.partition("/")
        if _is_data(inside):
            left.setdefault(checkpoint, []).append(inside)
    done = []
    for checkpoint, names in sorted(left.items()):
        path, folder = directory / checkpoint, None
        if f"{checkpoint}/{MANIFEST}" in objects:
            try:
                folder = read_manifest(path).folder
            except ValueError:
                continue  # its own entries cannot be determined
        if stale := [name for name in names if name.partition("/")[0] != folder]:
            _delete(path, stale)
            done.append(f"{path}: removed a checkpoint that was never completed")
    return done


def _is_data(name: str) -> bool:
    """Return whether an object, given by its path in a checkpoint, is in a folder named like those of `Upload`."""
    folder, _, inside = name.partition("/")
    return bool(inside) and re.fullmatch(FOLDER, folder) is not None


def _find_foreign(objects: Iterable[str]) -> list[str]:
    """Return the names of the objects under a checkpoint's URL that no save has written."""
    return [name for name in objects if name != MANIFEST and not _is_data(name)]


class Download:
    """Downloaded files of a checkpoint, which are compared with their digests.

    The folder is deleted when this object is garbage-collected.

    Attributes:
        folder: The local folder with the downloaded files.
    """

    def __init__(self, source: RemotePath, manifest: Manifest) -> None:
        self._source, self._manifest = source, manifest
        self._entries = manifest.checked
        self._here: set[str] = set()
        self.folder = Path(tempfile.mkdtemp(dir=temporary_folder("downloads")))
        (self.folder / MANIFEST).write_bytes(manifest.source)
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)

    def fetch(self, names: Iterable[str]) -> None:
        """Download the files that are not downloaded yet.

        Raises:
            ValueError: If a file is missing, or its content differs from the committed content.
            OSError: If a request to the store or a disk operation fails.
        """
        missing = [name for name in names if name not in self._here]
        for name in missing:
            if not filesystem.is_inside(name):
                raise ValueError(
                    f"{self._source}: {name!r:.80} is not a valid checkpoint file name. {filesystem.RESTORE}"
                )
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        _run_concurrently(self._fetch, missing)

    def _fetch(self, name: str) -> None:
        file = self.folder / name
        with suppress(FileNotFoundError):  # `check_file` reports that it is missing
            (self._source / self._manifest.path_of(name)).download(file)
        try:
            filesystem.check_file(self.folder, name, self._entries[name], digests=True, links=True)
        except ValueError as error:
            file.unlink(missing_ok=True)
            raise ValueError(str(error).replace(str(self.folder), str(self._source))) from error
        self._here.add(name)

    def adopt(self, folder: Path, names: Iterable[str]) -> None:
        """Link or copy files that another process of this machine has downloaded and verified in ``folder``."""
        for name in names:
            if name not in self._here:
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                try:
                    os.link(folder / name, self.folder / name)
                except OSError:  # a file system that does not support links
                    shutil.copyfile(folder / name, self.folder / name)
                self._here.add(name)


class Upload:
    """Save to a checkpoint's URL. Every process uploads its own files, and one process commits them.

    ``folder`` is the name of the folder for the checkpoint's files, the same on all processes; see `new_folder`.

    Attributes:
        staging: The folder in which this process assembles its files.
    """

    def __init__(self, target: RemotePath, folder: str) -> None:
        self._target, self._folder = target, folder
        self.staging = open_staging(target)
        self._may_be_committed = False

    @staticmethod
    def new_folder() -> str:
        """Return a random folder name, ``data-<random>``."""
        return f"data-{os.urandom(8).hex()}"

    def write(self, files: Files) -> dict[str, filesystem.Entry]:
        """Write and upload this process's files, and return their entries for the manifest."""

        def transfer(name: str) -> filesystem.Entry:
            target = self._target / self._folder / name
            if target.takes_parts:
                size, pieces = serialize(files[name])
                digested = filesystem.Digested(pieces)
                target.upload_parts(digested, size)
                return digested.make_entry(size)
            entry = write_file(self.staging / name, files[name])
            target.upload(self.staging / name)
            (self.staging / name).unlink()
            return entry

        return dict(zip(files, _run_concurrently(transfer, list(files)), strict=True))

    def commit(self, files: Mapping[str, Mapping[str, Any]], info: Mapping[str, Any], hooked: bool) -> None:
        """Commit the files that all processes have uploaded; see `store.DiskSave.commit`.

        Raises:
            ValueError: If the target, a file or the manifest is not valid.
            TypeError: If ``info`` contains a tensor, an array or something that is not data.
            OSError: If a request to the store fails. An earlier checkpoint remains, unless the new manifest was written
                although the store did not confirm it.
        """
        target = self._target
        check_target(target)
        assert not hooked  # hooks need a directory on a disk
        entries = {name: dict(files[name]) for name in sorted(files)}
        manifest = Manifest.build(entries, info, _find_next_sequence(target.parent), folder=self._folder)
        check_files(target, manifest, "Save again, to a URL that no other job writes to.")
        self._may_be_committed = True
        try:
            (target / MANIFEST).write_bytes(manifest.source)
        except OSError:
            # The request may have succeeded although its response was lost, so the store is asked. If it does not
            # answer, nothing is deleted.
            self._may_be_committed = self._is_committed(manifest.source)
            if not self._may_be_committed:
                raise
        _delete_superseded(target, self._folder)

    def _is_committed(self, manifest: bytes) -> bool:
        try:
            return read_source(self._target) == manifest
        except ValueError:
            return False

    def discard(self, is_main: bool) -> None:
        """Delete this process's local files and, on rank zero, the uploaded files, unless these may be committed."""
        clear_staging(self._target)
        if is_main and not self._may_be_committed:
            _delete(self._target, (name for name in self._target.sizes() if name.startswith(f"{self._folder}/")))


def open_staging(target: RemotePath) -> Path:
    """Return the folder, created if necessary, in which this process assembles files for a checkpoint's URL."""
    folder = temporary_folder(str(target))
    note_unfinished(folder)  # if the process is killed, the last process of the job deletes it
    return folder


def clear_staging(target: RemotePath) -> None:
    """Delete this process's folder for a checkpoint's URL, which `open_staging` returned."""
    folder = temporary_folder(str(target))
    shutil.rmtree(folder, ignore_errors=True)
    forget_unfinished(folder)


def _run_concurrently(work: Callable[[str], T], names: list[str]) -> list[T]:
    """Call a function with each name, several concurrently. An error is raised once all calls have ended."""
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="treadle-transfer") as pool:
        return [future.result() for future in [pool.submit(work, name) for name in names]]
