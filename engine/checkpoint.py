"""The checkpoint store: what is on disk, and when it counts as complete. It knows neither states' meaning nor ranks.

A checkpoint is a directory of parts (see `parts`) and a ``manifest.json``: ``model``, ``optimizer``, ``state``, and
``rank-00000`` for each process. Tensors are safetensors, the rest is JSON, nothing is pickled. Every process writes its
own files, the caller waits for all of them, and one process calls `commit`. What is on disk at each moment of saving to
``last``:

1. Parts go to ``.last.part``, each fsynced; then the manifest, fsynced; then that directory's entries are fsynced. A
   failure up to here leaves only ``.last.part``, which never counts.
2. If ``last`` exists it is renamed to ``.last.old``. A failure here leaves two complete checkpoints under other names:
   `find` lists the old one, `recover` puts the new one in place, or the old one if the new one fails its digests.
3. ``.last.part`` is renamed to ``last`` and the parent's entries are fsynced. This is the commit.
4. ``.last.old`` is deleted, its manifest first. A failure here leaves leftovers that don't count.

Deleting a checkpoint starts with one rename too, to ``.last.gone``. `recover` clears all these names away.
"""

import os
import re
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from . import disk
from .manifest import MANIFEST, Manifest, read_manifest, verify
from .parts import encode_part, open_part, read_part, write_files

__all__ = [
    "MANIFEST",
    "CheckpointStore",
    "Manifest",
    "beside",
    "commit",
    "discard",
    "encode_part",
    "find_again",
    "open_part",
    "read_manifest",
    "read_part",
    "remove",
    "verify",
    "write_files",
    "write_part",
]

_BESIDE = re.compile(r"\.(.+)\.(part|old|gone)")


def write_part(target: Path | str, name: str, state: Any) -> dict[str, disk.Entry]:
    """Write one part of a checkpoint beside its target, durably. Processes may do so at once, each its own names.

    Args:
        target: Where the checkpoint will be committed.
        name: See `parts.encode_part`.
        state: What to store. Tensors may be on any device; those tied to each other are stored once.

    Returns:
        Size and digest by file name, for `commit`.

    Raises:
        TypeError: The state holds something that isn't data; nothing is written then.
        ValueError: A name that can't be a file name, or a state without an end.
        OSError: The disk is full or not writable.
    """
    return write_files(beside(target), encode_part(name, state))


def beside(target: Path | str) -> Path:
    """Where the parts of a checkpoint are until `commit` moves them all at once."""
    return _beside(target, "part")


def commit(
    target: Path | str, files: Mapping[str, Mapping[str, Any]], info: Mapping[str, Any], others: bool = False
) -> Path:
    """Make the written parts a checkpoint, by one rename. One process calls it, after all have written their parts.

    A checkpoint that already stands at the target is replaced; at every moment one of the two can be loaded.

    Args:
        target: Where the checkpoint is to stand. A directory there that is neither empty nor a checkpoint is refused.
        files: The entries of every `write_part`, of all processes, in one dict.
        info: What the manifest notes: the counts ``step`` (optimizer steps done, default 0), ``epoch`` (0), ``samples``
            (global samples seen, 0) and ``world_size`` (processes, 1), and anything else but tensors, such as a metric.
        others: Keep what else was put `beside` since `discard` was called; the manifest does not list it.

    Returns:
        The target, as an absolute path.

    Raises:
        ValueError: A listed file is not there or of another size (do all processes write to one file system?), a
            count is negative, or the target is somebody else's directory.
        TypeError: ``info`` holds a tensor or something that isn't data.
        OSError: The disk refused. The checkpoint that stood at the target stands there still, the parts are deleted.
    """
    target, source = Path(os.path.abspath(target)), beside(target)
    if os.path.lexists(target) and not (target / MANIFEST).is_file() and not _is_empty(target):
        raise ValueError(f"{target} exists and is not a checkpoint, so it isn't replaced. Move it, or save elsewhere.")
    sequence = 1 + max((manifest.sequence for manifest, _ in _scan(target.parent)[0]), default=0)
    entries = {name: dict(files[name]) for name in sorted(files)}
    data = Manifest.of(entries, info, sequence).to_json()
    for name, entry in entries.items():
        disk.check_file(source, name, entry, digests=False)
    for stray in sorted(set(os.listdir(source)) - set(files)):  # of a killed attempt: its manifest, perhaps
        if not others:
            disk.delete(source / stray)
    try:
        disk.write_bytes(source / MANIFEST, data)
        disk.fsync(source / MANIFEST)
        disk.fsync(source)
        _swap_in(source, target)
    except OSError:
        with suppress(OSError):
            _delete(source)
        raise
    return target


def _swap_in(staging: Path, target: Path) -> None:
    old, gone, aside = _beside(target, "old"), _beside(target, "gone"), None
    if os.path.lexists(target) and _is_empty(target):
        disk.rmdir(target)
    elif os.path.lexists(target):
        # If an earlier swap left both, the one that can be loaded stays until the new one is in place.
        aside = gone if os.path.lexists(old) and not _is_whole(target) else old
        _delete(aside)
    try:
        if aside is not None:
            disk.rename(target, aside)
        disk.rename(staging, target)
        disk.fsync(target.parent)
    except OSError:  # what was not saved for certain was not saved; a rename may have happened and yet have failed
        with suppress(OSError):
            if not os.path.lexists(staging):
                disk.rename(target, staging)
            if aside is not None and not os.path.lexists(target):
                disk.rename(aside, target)
        raise
    try:
        _delete(old)
        _delete(gone)
    except OSError as error:
        warnings.warn(f"{target} is saved, but what it replaced can't be deleted now: {error}. The next start will.")


def discard(target: Path | str) -> None:
    """Remove what `write_part` wrote for a target that will not be committed. Nothing there is no error.

    Args:
        target: As given to `write_part`. A checkpoint that stands there is not touched.
    """
    _delete(beside(target))


def find_again(path: Path | str) -> None:
    """See to it that a checkpoint stands under its name, if one was being replaced there.

    Between two renames there is none. A process that is at it now has a moment to finish; one that was killed there has
    left both, and the better one is put in place. One process calls it, before the checkpoint is read.

    Args:
        path: The checkpoint's directory. One that stands, or that nobody replaces, is left alone.
    """
    target, old = Path(os.path.abspath(path)), _beside(path, "old")
    for _ in range(20):
        if os.path.lexists(target) or not (old / MANIFEST).is_file():
            return
        time.sleep(0.1)
    warnings.warn(_finish_swap(target, beside(target), old))


def remove(path: Path | str) -> None:
    """Delete a committed checkpoint, whole: a failure half-way leaves nothing that counts as one.

    Args:
        path: The checkpoint's directory.

    Raises:
        ValueError: It isn't a checkpoint, or a link to one; nothing is touched then.
        OSError: The disk refused.
    """
    path = Path(os.path.abspath(path))
    if path.is_symlink():
        raise ValueError(f"{path} is a link, not a checkpoint; remove what it points to, or unlink it yourself.")
    read_manifest(path)
    gone = _beside(path, "gone")
    _delete(gone)
    disk.rename(path, gone)
    disk.fsync(path.parent)
    _delete(gone)


class CheckpointStore:
    """The checkpoints in one directory.

    Args:
        directory: Where they stand, each a directory of its own. It need not exist yet.
    """

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(os.path.abspath(directory))

    def find(self) -> list[Path]:
        """The committed checkpoints, the newest last: by step, then by order of commit, never by clock.

        One whose replacement was interrupted is listed under its ``.name.old`` until `recover` is called.
        """
        return [path for _, path in _scan(self.directory)[0]]

    def latest(self, verify: bool = True) -> tuple[Path | None, list[str]]:
        """The newest checkpoint that is intact.

        Args:
            verify: Compare digests, not only names and sizes.

        Returns:
            Its path, or ``None``; and one sentence for each checkpoint that had to be skipped, with the reason.
        """
        found, skipped = _scan(self.directory)
        for manifest, path in reversed(found):
            try:
                for name, entry in manifest.files.items():
                    disk.check_file(path, name, entry, digests=verify)
            except ValueError as error:
                skipped.append(str(error))
            else:
                return path, skipped
        return None, skipped

    def probe(self, nbytes: int = 0) -> None:
        """Find out before a run whether it can save here, by making the directory and writing a file.

        Args:
            nbytes: What one checkpoint needs, in bytes.

        Raises:
            OSError: The directory can't be made or written to, or has less than ``nbytes`` free.
        """
        disk.probe(self.directory, nbytes)

    def recover(self) -> list[str]:
        """Finish or roll back what a killed process left, and clear leftovers away.

        Call it once at start, in the one process that commits here, before anything is saved here.

        Returns:
            What was done, one sentence each; empty if there was nothing to do.
        """
        matches = [_BESIDE.fullmatch(name) for name in disk.names(self.directory)]
        done: list[str] = []
        for name in sorted({match[1] for match in matches if match}):
            target = self.directory / name
            part, old, gone = (_beside(target, suffix) for suffix in ("part", "old", "gone"))
            if os.path.lexists(gone):
                done.append(f"{target}: finished deleting it")
                _delete(gone)
            if (old / MANIFEST).is_file():
                done.append(_finish_swap(target, part, old))
            elif _is_ours(old):
                _delete(old)
            if _is_ours(part):
                done.append(f"{target}: removed a checkpoint that was never completed")
                _delete(part)
        return done


def _finish_swap(target: Path, part: Path, old: Path) -> str:
    if os.path.lexists(target):
        if not _is_whole(target):
            return f"{target}: is damaged; the checkpoint it replaced is kept as {old.name}"
        _delete(old)
        return f"{target}: removed the checkpoint it replaced"
    if _is_whole(part, digests=True):
        disk.rename(part, target)
        disk.fsync(target.parent)
        _delete(old)
        return f"{target}: finished replacing it by the newer checkpoint"
    disk.rename(old, target)
    disk.fsync(target.parent)
    return f"{target}: put back, as its replacement was never completed"


def _scan(directory: Path) -> tuple[list[tuple[Manifest, Path]], list[str]]:
    """The readable manifests, the newest last, and what is wrong with the others."""
    found, problems = [], []
    for name in disk.names(directory):
        path, beside = directory / name, _BESIDE.fullmatch(name)
        if path.is_symlink() or not path.is_dir() or (name.startswith(".") and not (beside and beside[2] == "old")):
            continue
        if beside and _is_whole(directory / beside[1]):
            continue  # replaced, and about to be deleted
        if not (path / MANIFEST).exists() and not any(file.endswith(".safetensors") for file in disk.names(path)):
            continue  # somebody else's directory
        try:
            found.append((read_manifest(path), path))
        except ValueError as error:
            problems.append(str(error))
    return sorted(found, key=lambda pair: (pair[0].step, pair[0].sequence, pair[1].name)), problems


def _beside(target: Path | str, suffix: str) -> Path:
    target = Path(os.path.abspath(target))
    return target.parent / f".{target.name}.{suffix}"


def _delete(directory: Path) -> None:
    disk.delete(directory, first=MANIFEST)


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink() and not os.listdir(path)


def _is_whole(path: Path, digests: bool = False) -> bool:
    try:
        verify(path, digests)
    except ValueError:
        return False
    return True


def _is_ours(path: Path) -> bool:
    """Whether a directory holds only files that are written here; ``.tmp...`` is safetensors' half-written file."""
    if path.is_symlink() or not path.is_dir():
        return False
    inside = [path / name for name in disk.names(path)]
    return all(file.is_file() and (disk.FILE.fullmatch(file.name) or file.name.startswith(".tmp")) for file in inside)
