"""Replacement and deletion of a checkpoint. During a replacement, a complete version always exists.

Three kinds of directories may exist next to a checkpoint ``last``. ``.last.<writer>.part`` is the next version until it
is put in place, ``.last.<writer>.old`` is a version that it replaces, and ``.last.<writer>.gone`` is a version that is
being deleted. ``<writer>`` identifies the process that commits the save (`identify_process`), so two runs that save to
one directory never share such a name, and a later run can tell whether the process still runs.

No lock is held, because locks are missing on some file systems and outlive a hung holder. Each change is a rename
that either succeeds or fails as a whole: if another run puts its version in place first, that version is replaced.

A checkpoint's own files are its manifest and the files that the manifest lists. Every other file in the directory of a
committed checkpoint, such as a tokenizer or a file of another checkpoint, is foreign and is not deleted. Foreign files
move into the next version. `take_away` refuses to delete a checkpoint that contains foreign files.

While the files of a checkpoint are being deleted, its manifest is named ``unfinished.json``. The directory then no
longer counts as a checkpoint, but its own files are still known. A file of this name also marks a ``.part`` into which
hooks write.
"""

import errno
import itertools
import os
import re
import time
import warnings
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from ...common.messages import abbreviate
from ...common.remote_path import AnyPath, RemotePath, absolute
from ...strategies.processes import IDENTITY, has_ended, identify_process, is_unfinished
from . import filesystem
from .one_file import is_checkpoint_file, is_replaceable_file, is_unfinished_file
from .parts import MANIFEST, is_checkpoint, read_manifest, verify

UNFINISHED = "unfinished.json"
"""Name of the file that marks a directory whose checkpoint is not complete yet or is being deleted."""

VERSION_NAME = re.compile(
    rf"\.(?P<name>.+?)\.(?P<writer>{IDENTITY})(-(?P<number>\d+))?\.(?P<kind>part|old|gone)", re.DOTALL
)
"""Pattern of the directory names that exist next to a checkpoint while it is replaced or deleted."""

_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.EISDIR, errno.ENOTDIR)
_TRIES = 100
"""Number of times that another run may put its own version of a checkpoint in place during a replacement."""
_PAUSE = 0.02  # seconds
_SWAP = 2.0  # seconds that a process on another machine gets for the two renames of a replacement
_ABANDONED = 3600.0
"""Seconds without a change after which another machine's unfinished save counts as abandoned."""


# The manifests of the checkpoints that this process has saved, by the checkpoint's path.
_saved: dict[Path, filesystem.Mark] = {}

SHARE_TARGET = "Save to a file system that all ranks share, and do not change the files during the save."
"""Fix for files that are missing or have changed when a save is committed, at the end of an error message."""


def get_version_path(target: Path | str, kind: str, writer: str = "") -> Path:
    """Return the path of the next (``part``), replaced (``old``) or deleted (``gone``) version of ``target``.

    ``writer`` is the process that commits it; the default is this process.
    """
    target = Path(os.path.abspath(target))
    return target.parent / f".{target.name}.{writer or identify_process()}.{kind}"


def list_versions(target: Path, *kinds: str) -> list[tuple[Path, str]]:
    """Return the paths of the versions next to a checkpoint, each with the name of its writer."""
    try:
        matches = [VERSION_NAME.fullmatch(name) for name in filesystem.list_names(target.parent)]
    except PermissionError:  # of a directory above the checkpoints
        return []
    return [
        (target.parent / match[0], match["writer"])
        for match in matches
        if match and match["name"] == target.name and match["kind"] in kinds
    ]


def is_being_written(target: Path) -> bool:
    """Return whether another process of this machine that runs is writing or replacing a checkpoint at a path."""
    return any(_runs(writer) for _, writer in list_versions(target, "part", "old"))


def check_target(target: Path) -> None:
    """Raise a ValueError if a checkpoint must not be written to a path; see `store.check_target`."""
    for _ in range(5):
        if not os.path.lexists(target) or is_empty(target) or _is_previous(target):
            return
        time.sleep(_PAUSE)  # another run may be replacing it
    raise ValueError(f"{target} exists and is not a checkpoint, so it isn't replaced. Move it, or save elsewhere.")


def swap_in(staging: Path, target: Path) -> None:
    """Put a complete checkpoint in place, move foreign files of the previous one into it, and delete the previous one.

    If a disk operation fails before the new checkpoint is durably in place, the previous one is put back if the disk
    permits; but a file that has replaced a file stays. A later failure only causes a warning.
    """
    aside = _choose_unused(target, "old")
    manifest, put = mark_version(staging), filesystem.replace if staging.is_file() else filesystem.rename
    replaces_file = False
    try:
        for attempt in range(_TRIES):
            if os.path.lexists(aside):  # by the attempt before
                aside = _choose_unused(target, "old")
            replaces_file = staging.is_file() and target.is_file()  # as one operation
            if not replaces_file:
                _set_aside(target, aside)
            try:
                put(staging, target)
                break
            except OSError as error:  # another run has put its version in place since
                if error.errno not in _TAKEN or attempt == _TRIES - 1:
                    raise
        filesystem.fsync(target.parent)
        _saved[target] = manifest
    except OSError:  # a save that is not certain does not count; a rename may have happened and still have failed
        with suppress(OSError):
            if not os.path.lexists(staging) and not replaces_file:
                filesystem.rename(target, staging)
            if os.path.lexists(aside) and not os.path.lexists(target):
                filesystem.rename(aside, target)
        if replaces_file and not os.path.lexists(staging):
            _saved[target] = manifest
        raise
    try:
        for path, writer in list_versions(target, "old", "gone"):
            if not _is_in_use(path, writer):
                retire(path, target)
    except OSError as error:
        warnings.warn(
            f"{target} is saved, but the checkpoint that it replaced can't be deleted: {error}. The next Trainer run "
            "in this folder, or the next save to this path, deletes it."
        )


def _set_aside(target: Path, aside: Path) -> None:
    """Rename a previous checkpoint, or delete an empty directory, if there is one.

    Raises:
        ValueError: If something other than a checkpoint is at the path.
    """
    if not os.path.lexists(target):
        return
    with suppress(FileNotFoundError):  # another run has just set it aside
        if is_empty(target):
            filesystem.rmdir(target)
        else:
            check_target(target)
            filesystem.rename(target, aside)


def _choose_unused(target: Path, kind: str) -> Path:
    """Return an unused path of this process for a version; an earlier version may not be deleted yet."""
    path, number = get_version_path(target, kind), 0
    while os.path.lexists(path):
        path, number = get_version_path(target, kind, f"{identify_process()}-{number}"), number + 1
    return path


def _runs(writer: str) -> bool:
    """Return whether a writer is another process of this machine, which is known to run."""
    return writer != identify_process() and has_ended(writer) is False


def _is_in_use(path: Path, writer: str) -> bool:
    """Return whether a process may be writing a version, or one other than this one renaming or deleting it.

    The processes of other machines cannot be seen from here, so their versions count as in use until nothing in them
    has changed for an hour.
    """
    if writer == identify_process():
        return is_unfinished(path)
    if has_ended(writer):
        return False
    changed = 0.0
    for file in (path, *(path / name for name in filesystem.list_leaves(path))):
        with suppress(FileNotFoundError):
            changed = max(changed, file.lstat().st_mtime, file.lstat().st_ctime)
    return _runs(writer) or time.time() - changed < _ABANDONED


def await_swap(path: Path, directories: Iterable[Path]) -> list[tuple[Path, Path]]:
    """Return the interrupted replacements of ``directories`` because of which ``path`` may be missing.

    A process that is replacing a checkpoint gets two seconds to finish. After that, it is assumed to be dead, unless it
    is another one that is known to run.

    Returns:
        Pairs of a directory and its ``.old`` version; empty if ``path`` exists.
    """
    end = time.monotonic() + _SWAP
    while not os.path.lexists(path):
        versions = [
            (directory, old, writer)
            for directory in directories
            for old, writer in list_versions(directory, "old")
            if _is_previous(old)
        ]
        # One of this process may be in progress in another thread.
        waits = any(writer == identify_process() or _is_in_use(old, writer) for _, old, writer in versions)
        if not waits or time.monotonic() >= end:
            return [(directory, old) for directory, old, writer in versions if not _runs(writer)]
        time.sleep(_PAUSE)
    return []


def recover_interrupted(path: AnyPath | str) -> None:
    """Restore the checkpoint at a path if its replacement, or that of a directory above it, was interrupted.

    Between the two renames of a replacement, no checkpoint exists at the path. A process that is replacing the
    checkpoint gets two seconds to finish. After that, it is assumed to be dead: the newer version is put in place if it
    is intact, and the older one otherwise.
    """
    target = absolute(path)
    if isinstance(target, RemotePath):  # in a store nothing is renamed
        return
    for directory, old in reversed(await_swap(target, [target, *target.parents])):
        try:
            warnings.warn(finish(directory, old))
        except OSError:
            if not os.path.lexists(directory):
                raise
            # Another process was faster.


def finish(target: Path, old: Path) -> str:
    """Complete or roll back an interrupted replacement whose ``.old`` has a manifest; return a message about it.

    If the new version is in place but damaged, both versions are kept.
    """
    match = VERSION_NAME.fullmatch(old.name)
    assert match is not None
    part = get_version_path(target, "part", match["writer"])
    if os.path.lexists(target):
        if not is_whole(target):
            return f"{target}: damaged; the checkpoint that it replaced is kept as {old.name}"
        retire(old, target)
        return f"{target}: removed the checkpoint that it replaced"
    if is_whole(part, digests=True):
        filesystem.rename(part, target)
        filesystem.fsync(target.parent)
        retire(old, target)
        return f"{target}: finished replacing it with the newer checkpoint"
    filesystem.rename(old, target)
    filesystem.fsync(target.parent)
    return f"{target}: restored, since its replacement was never completed"


def recover(target: Path) -> list[str]:
    """Complete or roll back interrupted saves and deletions, and return messages about what was done.

    Versions of a process that still runs are not changed.
    """
    done = []
    for _, old in await_swap(target, [target]):
        with suppress(FileNotFoundError):  # another process is doing the same
            done.append(finish(target, old))
    for path, writer in list_versions(target, "old", "gone", "part"):
        if _is_in_use(path, writer):
            continue
        if path.suffix == ".part":
            if is_staged(path):
                done.append(f"{target}: removed a checkpoint that was never completed")
                filesystem.delete(path, first=MANIFEST)
        elif path.suffix == ".old" and _is_previous(path):
            done.append(finish(target, path))
        elif retire(path, target) and path.suffix == ".gone":
            done.append(f"{target}: finished deleting it")
    return done


def take_away(path: Path) -> None:
    """Delete a checkpoint so that a failure halfway leaves nothing that counts as a checkpoint.

    Raises:
        ValueError: See `store.remove`.
    """
    manifest = read_manifest(path)
    listed_files = {*manifest.names, MANIFEST, UNFINISHED}
    if problem := explain_replaced(path, path):
        raise ValueError(problem)
    for gone, writer in list_versions(path, "gone"):
        if not _is_in_use(gone, writer):
            retire(gone, path)
    check_no_foreign_files(path, listed_files, "deleted")
    gone = _choose_unused(path, "gone")
    try:
        filesystem.rename(path, gone)
    except FileNotFoundError:  # another run has just deleted it
        _saved.pop(path, None)
        return
    if problem := explain_replaced(path, gone):  # at the last moment
        filesystem.rename(gone, path)
        raise ValueError(problem)
    _saved.pop(path, None)
    if manifest.records is not None:
        filesystem.unlink(gone)
    else:  # its files must not vanish before its name does
        filesystem.fsync(path.parent)
        _clear(gone, listed_files)


def check_no_foreign_files(path: Path, listed_files: Collection[str], action: str) -> None:
    """Raise a ValueError if a checkpoint's directory contains files that do not belong to it.

    ``action`` is what must not happen to the checkpoint, such as ``"deleted"``.
    """
    if others := list(_find_foreign_entries(path, listed_files)):
        raise ValueError(
            f"{path} contains files that do not belong to the checkpoint ({abbreviate(others, 5)}), so it isn't "
            f"{action}. Move them elsewhere, or delete the directory yourself."
        )


def forget_saved(directories: Iterable[AnyPath]) -> None:
    """Take the checkpoints in some directories as they are now for those of the run that begins there."""
    parents = set(directories)
    for path in [path for path in _saved if path.parent in parents]:
        del _saved[path]


def explain_replaced(path: Path, place: Path) -> str:
    """Return an error message if this process has saved ``path`` and another run has replaced it since; else "".

    ``place`` is where the checkpoint currently is.
    """
    with suppress(FileNotFoundError):
        if path in _saved and _saved[path] != mark_version(place):
            return (
                f"{path} was saved by this run, and another run has replaced it since. Use a separate directory for "
                "the checkpoints of each run."
            )
    return ""


def retire(path: Path, target: Path) -> bool:
    """Delete a replaced or partly deleted version of a checkpoint, and return True if anything was deleted.

    Foreign files in ``path`` move into ``target``, or stay if ``target`` is not a directory. Nothing is changed if
    ``path`` is not a version of a checkpoint.
    """
    if not _is_left(path):
        return False
    if path.is_symlink() or path.is_file():  # a link's target belongs to the user
        filesystem.unlink(path)
        return True
    listed_files = _read_listed_files(path, target)
    if listed_files is None:
        return False
    if _is_folder(target):
        _carry_over(path, target, listed_files)
    _clear(path, listed_files)
    return True


def mark_version(path: Path) -> filesystem.Mark:
    """Return the mark that tells one save of a checkpoint from another."""
    return filesystem.mark(path / MANIFEST if _is_folder(path) else path)


def is_empty(path: Path) -> bool:
    """Return whether the path is an empty directory, and not a link to one."""
    with suppress(OSError):
        return _is_folder(path) and not os.listdir(path)
    return False


def is_whole(path: Path, digests: bool = False) -> bool:
    """Return whether the path is a checkpoint whose files all exist with the sizes in its manifest.

    With ``digests``, their content is compared too.
    """
    try:
        verify(path, digests)
    except ValueError:
        return False
    return True


def is_staged(path: Path) -> bool:
    """Return whether the path is a file or directory that a save may have created.

    Such a directory is empty, or contains a file that is named like a checkpoint's own files.
    """
    with suppress(OSError):
        if path.is_file():
            return is_checkpoint_file(path) or is_unfinished_file(path)
        names = os.listdir(path) if _is_folder(path) else None
        return names is not None and (
            not names or any(filesystem.FILE.fullmatch(name) and os.path.isfile(path / name) for name in names)
        )
    return False


def _is_previous(path: Path) -> bool:
    """Return whether a version is one that a save replaces: a checkpoint, or a file of ``torch.save``."""
    return is_checkpoint(path) or is_replaceable_file(path)


def _is_left(path: Path) -> bool:
    if not os.path.lexists(path):  # the usual case, and faster to check than its content
        return False
    return is_empty(path) or _is_previous(path) or os.path.isfile(path / UNFINISHED)


def _is_folder(path: Path) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def _read_listed_files(path: Path, target: Path) -> Collection[str] | None:
    """Return the names of a checkpoint's own files; None if they cannot be determined.

    If the checkpoint's manifest cannot be read, the manifest of its replacement, ``target``, is used.
    """
    if is_empty(path):
        return ()
    for file in (path / MANIFEST, path / UNFINISHED, target / MANIFEST):
        with suppress(ValueError):
            return {*read_manifest(file.parent, file.name).names, MANIFEST, UNFINISHED}
    return None


def _find_foreign_entries(
    path: Path, listed_files: Collection[str], into: Path | None = None, inside: str = ""
) -> Iterator[str]:
    """Yield the foreign entries in a checkpoint's directory; a directory is one entry if everything in it is foreign.

    Directories without any file are ignored. If a directory also exists in ``into``, its contents are separate entries.
    """
    for name in filesystem.list_names(path / inside):
        entry = inside + name
        if not _is_folder(path / entry):
            if entry not in listed_files:
                yield entry
        elif any(file.startswith(f"{entry}/") for file in listed_files) or (
            into is not None and _is_folder(into / entry)
        ):
            yield from _find_foreign_entries(path, listed_files, into, f"{entry}/")
        elif any(True for _ in filesystem.list_leaves(path / entry)):
            yield entry


def _carry_over(path: Path, target: Path, listed_files: Collection[str]) -> None:
    """Move the foreign files of a checkpoint into its replacement. At any time, each file is in one of the two."""
    folders = set()
    for entry in list(_find_foreign_entries(path, listed_files, target)):
        place = target
        for name in entry.split("/")[:-1]:
            place = place / name if _is_folder(place / name) else _choose_free_path(place / name)
        filesystem.make_directory(place)
        place = _choose_free_path(place / os.path.basename(entry))
        if place.name != os.path.basename(entry):
            warnings.warn(f"{target} has a new {entry}, so the previous file with this name is kept as {place.name}.")
        with suppress(FileNotFoundError):  # another process is doing the same
            filesystem.rename(path / entry, place)
        folders.add(place.parent)
    for folder in sorted(folders):
        filesystem.fsync(folder)


def _choose_free_path(path: Path) -> Path:
    names = itertools.chain([path], (path.with_name(f"{path.name}.kept{n or ''}") for n in itertools.count()))
    return next(name for name in names if not os.path.lexists(name))


def _clear(path: Path, listed_files: Collection[str]) -> None:
    """Delete a checkpoint's own files, and its directory if it is empty afterwards. Another process may do the same."""
    mark = path / UNFINISHED
    with suppress(FileNotFoundError):
        if os.path.lexists(path / MANIFEST):
            filesystem.replace(path / MANIFEST, mark)
    for name in sorted(filesystem.list_leaves(path)):  # names from the manifest are not followed
        if name in listed_files and name != UNFINISHED:
            with suppress(FileNotFoundError):
                filesystem.unlink(path / name)
    for folder in filesystem.list_names(path):
        _drop_empty(path / folder)
    with suppress(FileNotFoundError):
        if os.path.lexists(mark):
            filesystem.unlink(mark)
        if is_empty(path):
            filesystem.rmdir(path)


def _drop_empty(path: Path) -> None:
    if _is_folder(path):
        for name in filesystem.list_names(path):
            _drop_empty(path / name)
        with suppress(FileNotFoundError):
            if is_empty(path):
                filesystem.rmdir(path)
