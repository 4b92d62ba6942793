"""Files of a checkpoint in an object store, downloaded to a folder of this process and compared with the manifest."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from ....common.remote_path import RemotePath
from ....common.temporary import temporary_folder
from .. import filesystem
from ..manifest import MANIFEST, Manifest

_AT_ONCE = 4  # files downloaded concurrently; a large one already takes several requests


class Download:
    """Downloaded files of a checkpoint, which are compared with their digests.

    The folder is deleted when this object is garbage-collected.

    Attributes:
        folder: The local folder with the downloaded files.
    """

    def __init__(self, source: RemotePath, manifest: Manifest) -> None:
        self._source, self._manifest = source, manifest
        self._entries = {**manifest.files, **manifest.others}
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
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="treadle-download") as pool:
            for future in [pool.submit(self._fetch, name) for name in missing]:
                future.result()

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
