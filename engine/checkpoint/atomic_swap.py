"""How a checkpoint takes another's place, and how it goes: one of the two always stands, and nothing of others is lost.

Beside ``last`` there may stand ``.last.part``, the next one until it is complete; ``.last.old``, the one that it
replaces; and ``.last.gone``, one that is being deleted.

A checkpoint's own files are those that its manifest lists. All else in its directory is somebody else's, such as a
tokenizer, or another checkpoint: it moves into the next one, and a checkpoint that holds such things is not removed.
While one is deleted its manifest is called ``unfinished.json``, so that it does not count any more, and yet it is known
to the end what is its own. A file of this name also marks a ``.part`` into which others write.
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
"""The file that says of a directory: on its way to a checkpoint, or on its way from one."""

BESIDE = re.compile(r"\.(.+)\.(part|old|gone)")
"""The names of what stands beside a checkpoint while it is replaced or removed."""


def beside(target: Path | str, suffix: str) -> Path:
    """Where the next one (``part``), the replaced one (``old``) or the removed one (``gone``) of ``target`` stands."""
    target = Path(os.path.abspath(target))
    return target.parent / f".{target.name}.{suffix}"


def check_target(target: Path) -> None:
    """See that a checkpoint may be put here. Cheap; nothing is changed.

    Raises:
        ValueError: somebody else's directory stands here, or beside it under a name that is needed.
    """
    if os.path.lexists(target) and not os.path.isfile(target / MANIFEST) and not is_empty(target):
        raise ValueError(f"{target} exists and is not a checkpoint, so it isn't replaced. Move it, or save elsewhere.")
    for suffix in ("part", "old", "gone"):
        path = beside(target, suffix)
        if os.path.lexists(path) and not (is_staged(path) if suffix == "part" else _is_left(path)):
            raise ValueError(
                f"{path} stands where the checkpoint {target.name} is put together or replaced, and is no part of one, "
                "so it isn't deleted. Move it, or save elsewhere."
            )


def swap_in(staging: Path, target: Path) -> None:
    """Put a complete checkpoint in place; of the one that stood there, move what is not its own into it.

    Raises:
        OSError: the disk refused. What stood there stands there still.
    """
    old, gone, aside = beside(target, "old"), beside(target, "gone"), None
    if os.path.lexists(target) and is_empty(target):
        filesystem.rmdir(target)
    elif os.path.lexists(target):
        # If an earlier swap left both, the one that can be loaded stays until the new one is in place.
        aside = gone if os.path.lexists(old) and not is_whole(target) else old
        retire(aside, target)
    try:
        if aside is not None:
            filesystem.rename(target, aside)
        filesystem.rename(staging, target)
        filesystem.fsync(target.parent)
    except OSError:  # what was not saved for certain was not saved; a rename may have happened and yet have failed
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
        warnings.warn(f"{target} is saved, but what it replaced can't be deleted now: {error}. The next start will.")


def finish(target: Path) -> str:
    """Bring a swap to its end that was interrupted, whose ``.old`` has a manifest; returns what was done."""
    part, old = beside(target, "part"), beside(target, "old")
    if os.path.lexists(target):
        if not is_whole(target):
            return f"{target}: is damaged; the checkpoint it replaced is kept as {old.name}"
        retire(old, target)
        return f"{target}: removed the checkpoint it replaced"
    if is_whole(part, digests=True):
        filesystem.rename(part, target)
        filesystem.fsync(target.parent)
        retire(old, target)
        return f"{target}: finished replacing it by the newer checkpoint"
    filesystem.rename(old, target)
    filesystem.fsync(target.parent)
    return f"{target}: put back, as its replacement was never completed"


def recover(target: Path) -> list[str]:
    """Finish or roll back what a killed process left beside one checkpoint; returns what was done."""
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
    """Delete a checkpoint, whole: a failure half-way leaves nothing that counts as one.

    Raises:
        ValueError: it isn't one, or not all in it is its own; nothing is touched then.
        OSError: the disk refused.
    """
    listed_files = {*read_manifest(path).names, MANIFEST, UNFINISHED}
    gone = beside(path, "gone")
    retire(gone, path)
    if others := list(_find_foreign_entries(path, listed_files)):
        more = f" and {len(others) - 5} more" if len(others) > 5 else ""
        raise ValueError(
            f"{path} holds {', '.join(others[:5])}{more}, which it was not saved with, so it is left as it is. Move "
            "that elsewhere, or delete the directory yourself."
        )
    if os.path.lexists(gone):
        raise ValueError(f"{gone} is no part of a checkpoint, and stands where {path.name} is deleted. Move it.")
    filesystem.rename(path, gone)
    filesystem.fsync(path.parent)
    _clear(gone, listed_files)


def retire(path: Path, target: Path) -> bool:
    """Delete what is left of a checkpoint; what is not its own moves into ``target``, or stays if there is none.

    Returns:
        Whether there was anything. Somebody else's directory is left alone.
    """
    if not _is_left(path):
        return False
    if path.is_symlink():  # what it leads to is the user's
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
    """Whether it is a directory with nothing in it."""
    with suppress(OSError):
        return _is_folder(path) and not os.listdir(path)
    return False


def is_whole(path: Path, digests: bool = False) -> bool:
    """Whether it is a checkpoint with all its files; without digests only their sizes are looked at."""
    try:
        verify(path, digests)
    except ValueError:
        return False
    return True


def is_staged(path: Path) -> bool:
    """Whether a directory holds files that are written here, or nothing; whatever else is in it."""
    with suppress(OSError):
        names = os.listdir(path) if _is_folder(path) else None
        return names is not None and (
            not names or any(filesystem.FILE.fullmatch(name) and os.path.isfile(path / name) for name in names)
        )
    return False


def _is_left(path: Path) -> bool:
    """Whether it is what is left of a checkpoint, or an empty directory."""
    if not os.path.lexists(path):  # nearly always, and quicker to find out than what is in it
        return False
    return is_empty(path) or any(os.path.isfile(path / name) for name in (MANIFEST, UNFINISHED))


def _is_folder(path: Path) -> bool:
    return os.path.isdir(path) and not os.path.islink(path)


def _read_listed_files(path: Path, target: Path) -> Collection[str] | None:
    """The names of a checkpoint's own files. Where that can't be read, those of the one in its place; else None."""
    if is_empty(path):
        return ()
    for file in (path / MANIFEST, path / UNFINISHED, target / MANIFEST):
        with suppress(ValueError):
            return {*read_manifest(file.parent, file.name).names, MANIFEST, UNFINISHED}
    return None


def _find_foreign_entries(
    path: Path, listed_files: Collection[str], into: Path | None = None, inside: str = ""
) -> Iterator[str]:
    """What a checkpoint's directory holds beside its own files: a directory as a whole, if that is all in it.

    Directories without any file are nothing.
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
    """Move what is not a checkpoint's own into another one. Each of it is in one of the two at every moment."""
    folders = set()
    for entry in list(_find_foreign_entries(path, listed_files, target)):
        place = target
        for name in entry.split("/")[:-1]:
            place = place / name if _is_folder(place / name) else _choose_free_path(place / name)
        filesystem.make_directory(place)
        place = _choose_free_path(place / os.path.basename(entry))
        if place.name != os.path.basename(entry):
            warnings.warn(f"{target} has a {entry} of its own now; what was there under this name is {place.name}.")
        with suppress(FileNotFoundError):  # another process is at it too
            filesystem.rename(path / entry, place)
        folders.add(place.parent)
    for folder in sorted(folders):
        filesystem.fsync(folder)


def _choose_free_path(path: Path) -> Path:
    names = itertools.chain([path], (path.with_name(f"{path.name}.kept{n or ''}") for n in itertools.count()))
    return next(name for name in names if not os.path.lexists(name))


def _clear(path: Path, listed_files: Collection[str]) -> None:
    """Delete a checkpoint's own files, and its directory if nothing is left in it."""
    mark = path / UNFINISHED
    if os.path.lexists(path / MANIFEST):
        filesystem.replace(path / MANIFEST, mark)
    for name in sorted(filesystem.list_leaves(path)):  # no name from a manifest is followed anywhere
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
