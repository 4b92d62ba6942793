"""Checkpoints in a folder of an object store: listing, checks, deletion, and removal of leftover objects.

A checkpoint's URL contains ``manifest.json`` and one folder of files, ``data-<random>``, which the manifest names. A
new save to the same URL writes its files to a new folder and does not change the existing checkpoint before the commit.
The one request that replaces the manifest is the commit. Folders that the manifest does not name belong to a save in
progress, or are left over from a killed or an earlier save. Other objects are foreign and are not deleted.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

from ....common.messages import warn
from ....common.remote_path import RemotePath
from ..filesystem import RESTORE
from ..manifest import FOLDER, MANIFEST, Manifest, read_manifest


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


def find_checkpoints(directory: RemotePath) -> tuple[list[tuple[Manifest, RemotePath]], list[str]]:
    """Return a folder's committed checkpoints, latest last, and a message for each unreadable manifest."""
    checkpoints, problems = [], []
    for name in directory.names():
        path = directory / name
        if name.startswith(".") or not (path / MANIFEST).is_file():
            continue
        try:
            checkpoints.append((read_manifest(path), path))
        except ValueError as error:
            problems.append(str(error))
    return sorted(checkpoints, key=lambda pair: (pair[0].step, pair[0].sequence, pair[1].name)), problems


def find_next_sequence(directory: RemotePath) -> int:
    """Return a sequence number higher than those of all readable manifests in a folder.

    The process remembers the number, so later calls need not list the folder again.
    """
    highest = _known_sequences(directory)
    if not highest:
        highest.append(max((manifest.sequence for manifest, _ in find_checkpoints(directory)[0]), default=0))
    highest[0] += 1
    return highest[0]


@lru_cache(maxsize=8)
def _known_sequences(directory: RemotePath) -> list[int]:
    """Return the list that stores a folder's highest sequence number; empty until this process lists the folder."""
    return []


def check_files(path: RemotePath, manifest: Manifest) -> None:
    """Raise a ValueError unless a checkpoint's objects exist, with the sizes in its manifest."""
    compare_sizes(path, manifest, path.sizes())


def compare_sizes(path: RemotePath, manifest: Manifest, objects: Mapping[str, int], fix: str = RESTORE) -> None:
    """Raise a ValueError unless ``objects`` has a checkpoint's files, with the sizes in its manifest.

    ``objects`` contains the size of each object in bytes, by its path relative to ``path``. ``fix`` is the advice at
    the end of the error message.
    """
    for name, entry in {**manifest.files, **manifest.others}.items():
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
        more = f" and {len(others) - 5} more" if len(others) > 5 else ""
        raise ValueError(
            f"{path} contains files that do not belong to the checkpoint ({', '.join(others[:5])}{more}), so it isn't "
            "deleted. Move them elsewhere, or delete the folder yourself."
        )
    (path / MANIFEST).unlink()
    delete(path, (name for name in objects if name != MANIFEST))


def delete(path: RemotePath, names: Iterable[str]) -> None:
    """Delete objects in a folder. ``names`` are their paths relative to it."""
    for name in sorted(names):
        (path / name).unlink()


def delete_superseded(target: RemotePath, folder: str) -> None:
    """Delete the objects of earlier saves under a checkpoint's URL, but not the new checkpoint's ``folder``.

    If the store rejects a request, this only causes a warning.
    """
    try:
        delete(target, (name for name in target.sizes() if _is_data(name) and name.partition("/")[0] != folder))
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
            delete(path, stale)
            done.append(f"{path}: removed a checkpoint that was never completed")
    return done


def _is_data(name: str) -> bool:
    """Return whether an object, given by its path in a checkpoint, is in a folder named like those of `Upload`."""
    folder, _, inside = name.partition("/")
    return bool(inside) and re.fullmatch(FOLDER, folder) is not None


def _find_foreign(objects: Iterable[str]) -> list[str]:
    """Return the names of the objects under a checkpoint's URL that no save has written."""
    return [name for name in objects if name != MANIFEST and not _is_data(name)]
