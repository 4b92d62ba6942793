"""Temporary folders of a process for files that are uploaded to an object store or downloaded from one."""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path


def temporary_folder(name: str) -> Path:
    """Return this process's temporary folder for a name, which is created if it does not exist.

    It is deleted when the process exits normally, unless `keep` excludes it.
    """
    label = "".join(c if c.isalnum() or c in "-_." else "-" for c in name)[-60:]
    folder = _own_folder(os.getpid()) / f"{hashlib.sha256(name.encode()).hexdigest()[:12]}-{label}"
    folder.mkdir(exist_ok=True)
    return folder


@lru_cache(maxsize=1)
def _own_folder(pid: int) -> Path:
    """Return the folder of a process. A forked process has its own ID and therefore its own folder."""
    folder = Path(tempfile.mkdtemp(prefix=f"treadle-{pid}-"))
    atexit.register(_remove, folder, pid)
    return folder


def keep(folder: Path) -> None:
    """Keep a folder of `temporary_folder` on disk when the process ends."""
    _kept.add(folder)


_kept: set[Path] = set()


def _remove(folder: Path, pid: int) -> None:
    if os.getpid() != pid or not folder.is_dir():  # a process that was forked from the folder's owner
        return
    for path in folder.iterdir():
        if path not in _kept:
            shutil.rmtree(path, ignore_errors=True)
    if not any(folder.iterdir()):
        folder.rmdir()
