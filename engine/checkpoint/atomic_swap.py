"""Replacement and deletion of a checkpoint. During a replacement, a complete version always exists.

Three directories may exist next to a checkpoint ``last``. ``.last.part`` is the next version until it is put in place,
``.last.old`` is the version that it replaces, and ``.last.gone`` is a version that is being deleted.

A checkpoint's own files are its manifest and the files that the manifest lists. Every other file in the directory of a
committed checkpoint, such as a tokenizer or a file of another checkpoint, is foreign and is not deleted. Foreign files
move into the next version. `take_away` refuses to delete a checkpoint that contains foreign files.

While the files of a checkpoint are being deleted, its manifest is named ``unfinished.json``. The directory then no
longer counts as a checkpoint, but its own files are still known. A file of this name also marks a ``.part`` into which
hooks write.
"""

import itertools
import os
import re
import warnings
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from . import filesystem
from .manifest import MANIFEST, read_manifest, verify

UNFINISHED = "unfinished.json"
"""Name of the file that marks a directory whose checkpoint is not complete yet or is being deleted."""

BESIDE = re.compile(r"\.(.+)\.(part|old|gone)")
"""Pattern of the directory names that exist next to a checkpoint while it is replaced or deleted."""


SHARE_TARGET = "Save to a file system that all ranks share, and do not change the files during the save."
"""Fix for files that are missing or have changed when a save is committed, at the end of an error message."""


def explain_refused_file(name: str) -> str:
    """Return the error message for a path that a save_state pre-hook must not write into a checkpoint."""
    if name == MANIFEST:
        reason = "but this name is reserved for the checkpoint's own file. Use another name"
    else:
        reason = "which is neither a file nor a link. Write only files"
    return f"a save_state pre-hook wrote {name}, {reason}."


def beside(target: Path | str, suffix: str) -> Path:
    """Return the path of the next (``part``), replaced (``old``) or deleted (``gone``) version of ``target``."""
    target = Path(os.path.abspath(target))
    return target.parent / f".{target.name}.{suffix}"


def check_target(target: Path) -> None:
    """Raise a ValueError if a checkpoint must not be written to a path; see `store.check_target`."""
    if os.path.lexists(target) and not os.path.isfile(target / MANIFEST) and not is_empty(target):
        raise ValueError(f"{target} exists and is not a checkpoint, so it isn't replaced. Move it, or save elsewhere.")
    for suffix in ("part", "old", "gone"):
        path = beside(target, suffix)
        if os.path.lexists(path) and not (is_staged(path) if suffix == "part" else _is_left(path)):
            raise ValueError(
                f"saving the checkpoint {target.name} needs the path {path}, which exists but was not created by "
                "Treadle. Move it, or save elsewhere."
            )


def swap_in(staging: Path, target: Path) -> None:
    """Put a complete checkpoint in place, move foreign files of the previous one into it, and delete the previous one.

    If a disk operation fails before the new checkpoint is durably in place, the previous one is put back if the disk
    permits. A later failure only causes a warning.
    """
    old, gone, aside = beside(target, "old"), beside(target, "gone"), None
    if os.path.lexists(target) and is_empty(target):
        filesystem.rmdir(target)
    elif os.path.lexists(target):
        # If an earlier swap left both, the one that can be loaded remains until the new one is in place.
        aside = gone if os.path.lexists(old) and not is_whole(target) else old
        retire(aside, target)
    try:
        if aside is not None:
            filesystem.rename(target, aside)
        filesystem.rename(staging, target)
        filesystem.fsync(target.parent)
    except OSError:  # a save that is not certain does not count; a rename may have happened and still have failed
        with suppress(OSError):
            if not os.path.lexists(staging):
                filesystem.rename(target, staging)
            if aside is not None and not os.path.lexists(target):
                filesystem.rename(aside, target)
        raise
    try:
        retire(old, target)
        retire(gone, target)
    except OSError as error:
        warnings.warn(
            f"{target} is saved, but the checkpoint that it replaced can't be deleted: {error}. The next Trainer run "
            "in this folder, or the next save to this path, deletes it."
        )


def finish(target: Path) -> str:
    """Complete or roll back an interrupted replacement whose ``.old`` has a manifest; return a message about it.

    If the new version is in place but damaged, both versions are kept.
    """
    part, old = beside(target, "part"), beside(target, "old")
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
    """Complete or roll back an interrupted save or deletion, and return messages about what was done."""
    part, old, gone = (beside(target, suffix) for suffix in ("part", "old", "gone"))
    done = []
    if os.path.isfile(old / MANIFEST):
        done.append(finish(target))
    else:
        retire(old, target)
    if retire(gone, target):
        done.append(f"{target}: finished deleting it")
    if is_staged(part):
        done.append(f"{target}: removed a checkpoint that was never completed")
        filesystem.delete(part, first=MANIFEST)
    return done


def take_away(path: Path) -> None:
    """Delete a checkpoint so that a failure halfway leaves nothing that counts as a checkpoint.

    Raises:
        ValueError: See `store.remove`.
    """
    listed_files = {*read_manifest(path).names, MANIFEST, UNFINISHED}
    gone = beside(path, "gone")
    retire(gone, path)
    if others := list(_find_foreign_entries(path, listed_files)):
        more = f" and {len(others) - 5} more" if len(others) > 5 else ""
        raise ValueError(
            f"{path} contains files that do not belong to the checkpoint ({', '.join(others[:5])}{more}), so it isn't "
            "deleted. Move them elsewhere, or delete the directory yourself."
        )
    if os.path.lexists(gone):
        raise ValueError(
            f"deleting {path.name} needs the path {gone}, which exists but was not created by Treadle. Move it."
        )
    filesystem.rename(path, gone)
    filesystem.fsync(path.parent)
    _clear(gone, listed_files)


def retire(path: Path, target: Path) -> bool:
    """Delete a replaced or partly deleted version of a checkpoint, and return True if anything was deleted.

    Foreign files in ``path`` move into ``target``, or stay if ``target`` is not a directory. Nothing is changed if
    ``path`` is not a version of a checkpoint.
    """
    if not _is_left(path):
        return False
    if path.is_symlink():  # its target belongs to the user
        filesystem.unlink(path)
        return True
    listed_files = _read_listed_files(path, target)
    if listed_files is None:
        return False
    if _is_folder(target):
        _carry_over(path, target, listed_files)
    _clear(path, listed_files)
    return True


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
    """Return whether the path is a directory that a save may have created.

    Such a directory is empty, or contains a file that is named like a checkpoint's own files.
    """
    with suppress(OSError):
        names = os.listdir(path) if _is_folder(path) else None
        return names is not None and (
            not names or any(filesystem.FILE.fullmatch(name) and os.path.isfile(path / name) for name in names)
        )
    return False


def _is_left(path: Path) -> bool:
    if not os.path.lexists(path):  # the usual case, and faster to check than its content
        return False
    return is_empty(path) or any(os.path.isfile(path / name) for name in (MANIFEST, UNFINISHED))


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
    """Delete a checkpoint's own files, and its directory if it is empty afterwards."""
    mark = path / UNFINISHED
    if os.path.lexists(path / MANIFEST):
        filesystem.replace(path / MANIFEST, mark)
    for name in sorted(filesystem.list_leaves(path)):  # names from the manifest are not followed
        if name in listed_files and name != UNFINISHED:
            filesystem.unlink(path / name)
    for folder in filesystem.list_names(path):
        _drop_empty(path / folder)
    if os.path.lexists(mark):
        filesystem.unlink(mark)
    if is_empty(path):
        filesystem.rmdir(path)


def _drop_empty(path: Path) -> None:
    if _is_folder(path):
        for name in filesystem.list_names(path):
            _drop_empty(path / name)
        if is_empty(path):
            filesystem.rmdir(path)
