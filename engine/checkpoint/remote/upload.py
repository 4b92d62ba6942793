"""Save to an object store: every process uploads its files, and one process commits them with a manifest."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ....common.remote_path import RemotePath
from ....common.temporary import temporary_folder
from ....strategies.processes import forget_unfinished, note_unfinished
from .. import filesystem
from ..atomic_swap import UNFINISHED, explain_refused_file
from ..manifest import MANIFEST, Manifest, read_source
from ..parts import Files, serialize, write_file
from .folder import check_target, compare_sizes, delete, delete_superseded, find_next_sequence

_AT_ONCE = 4  # files uploaded concurrently; a large one already takes several requests


class Upload:
    """Save to a checkpoint's URL. Every process uploads its own files, and one process commits them.

    ``folder`` is the name of the folder for the checkpoint's files, the same on all processes; see `new_folder`.

    Attributes:
        staging: The folder in which this process assembles its files; hooks write into it too.
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

        return dict(zip(files, _run_side_by_side(transfer, list(files)), strict=True))

    def commit(self, files: Mapping[str, Mapping[str, Any]], info: Mapping[str, Any], others: bool) -> None:
        """Commit the files that all processes have uploaded; see `store.commit`.

        Raises:
            ValueError: If the target, a file, the manifest or a file of a hook is not valid.
            TypeError: If ``info`` contains a tensor, an array or something that is not data.
            OSError: If a request to the store fails. An earlier checkpoint remains, unless the new manifest was written
                although the store did not confirm it.
        """
        target = self._target
        check_target(target)
        entries = {name: dict(files[name]) for name in sorted(files)}
        written = self._upload_others(set(files)) if others else {}
        manifest = Manifest.build(entries, info, find_next_sequence(target.parent), written, self._folder)
        data = manifest.to_json()
        compare_sizes(target, manifest, target.sizes(), "Save again, to a URL that no other job writes to.")
        self._may_be_committed = True
        try:
            (target / MANIFEST).write_bytes(data)
        except OSError:
            # The request may have succeeded although its response was lost, so the store is asked. If it does not
            # answer, nothing is deleted.
            self._may_be_committed = self._is_committed(data)
            if not self._may_be_committed:
                raise
        delete_superseded(target, self._folder)

    def _is_committed(self, manifest: bytes) -> bool:
        try:
            return read_source(self._target) == manifest
        except ValueError:
            return False

    def _upload_others(self, files: set[str]) -> dict[str, filesystem.Entry]:
        """Upload the files that hooks wrote in addition to ``files``, and return their entries for a manifest."""
        names = [name for name in filesystem.list_leaves(self.staging) if name not in files and name != UNFINISHED]
        for name in names:
            if name == MANIFEST or not (self.staging / name).is_file():
                raise ValueError(explain_refused_file(name))

        def transfer(name: str) -> filesystem.Entry:
            file = (self.staging / name).resolve()  # a store does not support links
            (self._target / self._folder / name).upload(file)
            return filesystem.describe(file)

        return dict(zip(names, _run_side_by_side(transfer, names), strict=True))

    def discard(self, is_main: bool) -> None:
        """Delete this process's local files and, on rank zero, the uploaded files, unless these may be committed."""
        clear_staging(self._target)
        if is_main and not self._may_be_committed:
            delete(self._target, (name for name in self._target.sizes() if name.startswith(f"{self._folder}/")))


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


def _run_side_by_side(work: Any, names: list[str]) -> list[Any]:
    """Call a function with each name, several concurrently. An error is raised once all calls have ended."""
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="treadle-upload") as pool:
        return [future.result() for future in [pool.submit(work, name) for name in names]]
