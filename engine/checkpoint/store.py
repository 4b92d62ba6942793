"""Store that writes, commits, finds and deletes checkpoints, regardless of what their parts contain.

A checkpoint is one file (see `one_file`) or a directory. A file is written by one process to ``.last.<writer>.part``,
fsynced and renamed to ``last``, and then the parent directory is fsynced; an earlier file is replaced by the rename.

A directory consists of parts (see `parts`), such as ``model``, ``optimizer``, ``state``, and ``rank-00000`` for
each process, and a ``manifest.json``. Tensors are stored as safetensors and other state as JSON; nothing is pickled.
Every process writes its own files, the caller waits for all of them, and one process calls `commit`. The state of the
disk at each stage of a save to ``last``:

1. Parts are written to ``.last.<writer>.part``, each fsynced; then the manifest, fsynced; then that directory is
   fsynced. A failure up to this point leaves at most this directory, which is not listed as a checkpoint.
2. If ``last`` is a checkpoint, it is renamed to ``.last.<writer>.old``. If the process is killed here, two complete
   checkpoints exist under other names: `CheckpointStore.find` lists the old one, and `CheckpointStore.recover`
   puts the new one in place, or the old one if the digests of the new one do not match.
3. ``.last.<writer>.part`` is renamed to ``last`` and the parent directory is fsynced. This is the commit. If another
   run has committed its own ``last`` since stage 2, that one is replaced too.
4. Files in ``.last.<writer>.old`` that its manifest does not list are moved into ``last``.
5. ``.last.<writer>.old`` is deleted. A failure here leaves files that do not count as a checkpoint.

The deletion of a checkpoint also starts with one rename, to ``.last.<writer>.gone``. `CheckpointStore.recover`
completes or rolls back interrupted saves and deletions of processes that have ended. See `atomic_swap`.
"""

import errno
import os
import shutil
import stat
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from ...common.remote_path import AnyPath, RemotePath, absolute
from ...strategies import World
from ...strategies.processes import forget_unfinished, identify_process, note_unfinished
from . import atomic_swap, filesystem, remote
from .atomic_swap import UNFINISHED
from .one_file import Layout, is_checkpoint_file, is_replaceable_file
from .one_file import write as write_one_file
from .parts import (
    MANIFEST,
    Files,
    Manifest,
    check_files,
    estimate_size,
    pack,
    read_manifest,
    read_manifests,
    unpack,
    write_files,
)
from .parts import is_checkpoint as is_checkpoint
from .parts import verify as verify


def check_target(target: AnyPath) -> None:
    """Check that a checkpoint may be written to a path, without changing any file.

    Raises:
        ValueError: If something other than a checkpoint or an empty directory exists at the path.
        OSError: If the object store cannot be reached or rejects a request.
    """
    if isinstance(target, RemotePath):
        remote.check_target(target)
    else:
        atomic_swap.check_target(target)


def get_staging_path(target: Path | str, writer: str = "") -> Path:
    """Return the directory that contains a checkpoint's parts until `commit`.

    ``writer`` is the process that will call `commit` (`identify_process`); the default is this process.
    """
    return atomic_swap.get_version_path(target, "part", writer)


def _put_in_place(source: Path, target: Path, sequence: int) -> None:
    if problem := atomic_swap.explain_replaced(target, target):
        warnings.warn(f"{problem} This save replaces it again.")
    forget_unfinished(source)  # the checkpoint is complete: after a failure below, `recover` decides
    version = atomic_swap.mark_version(source)
    atomic_swap.swap_in(source, target)
    _known_sequences[target] = version, sequence


def _sync_added_files(source: Path, files: set[str]) -> dict[str, filesystem.Entry]:
    """Fsync the files that hooks wrote next to the parts' ``files``, and return their entries for the manifest."""
    entries = {}
    folders = {source}
    for name in filesystem.list_leaves(source):
        path = source / name
        if name in files or name == UNFINISHED:
            continue
        mode = path.lstat().st_mode
        if name == MANIFEST or not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
            raise ValueError(
                f"a save_state pre-hook wrote {name}, which is neither a file nor a link, or has a name that is "
                "reserved for the checkpoint's own file. Write only files, under other names."
            )
        if stat.S_ISREG(mode):
            filesystem.fsync(path)
        entries[name] = filesystem.describe(path)
        folders |= {source / parent for parent in Path(name).parents}
    for folder in sorted(folders - {source}):
        filesystem.fsync(folder)
    return entries


def begin(target: Path | str) -> Path:
    """Create an empty directory at `get_staging_path`, into which hooks write files, and return it."""
    discard(target)
    source = get_staging_path(target)
    filesystem.make_staging_directory(source)
    note_unfinished(source)
    # So that the directory is recognized as a checkpoint's even if no other file is written.
    filesystem.write_bytes(source / UNFINISHED, b"{}")
    return source


def discard(target: Path | str) -> None:
    """Delete the files that were written at `get_staging_path` but not committed.

    An existing checkpoint at the target is not changed.
    """
    staging = get_staging_path(target)
    if atomic_swap.is_staged(staging):
        filesystem.delete(staging, first=MANIFEST)
    forget_unfinished(staging)


@contextmanager
def discarding_on_failure(target: AnyPath | None) -> Iterator[None]:
    """Return a context that calls `discard` if the block fails; None and a URL discard nothing."""
    try:
        yield
    except BaseException:
        if isinstance(target, Path):
            with suppress(OSError):  # a remainder is deleted at the next start
                discard(target)
        raise


def remove(path: AnyPath | str) -> None:
    """Delete a committed checkpoint so that a failure halfway leaves nothing that counts as a checkpoint.

    Raises:
        ValueError: If the path is not a checkpoint with a readable manifest, is a link, or contains files that
            do not belong to it, or if this process has saved it and another run has replaced it since. In these cases,
            no file of the checkpoint is deleted.
        OSError: If a disk operation or a request to the object store fails.
    """
    path = absolute(path)
    if isinstance(path, RemotePath):
        remote.remove(path)
        return
    if path.is_symlink():
        raise ValueError(f"{path} is a link, not a checkpoint. Pass its target, or delete the link yourself.")
    atomic_swap.take_away(path)


def link(path: Path | str, target: Path | str) -> None:
    """Give a checkpoint that is a file a second name, instead of a checkpoint that has it.

    It is a hard link, so it stays when the first name is deleted. A file system without such links gets a copy.

    Raises:
        ValueError: If something other than a checkpoint exists at ``target``.
        OSError: If a disk operation fails.
    """
    path, target = Path(os.path.abspath(path)), Path(os.path.abspath(target))
    atomic_swap.check_target(target)
    if not (target.exists() and path.samefile(target)):  # renaming one of two names of a file does nothing
        filesystem.delete(get_staging_path(target))
        filesystem.link(path, get_staging_path(target))
        _put_in_place(get_staging_path(target), target, read_manifest(path).sequence)


class Save(Protocol):
    """One way to save a checkpoint: each process writes, and then one commits."""

    staging: Path
    """Path of what is not committed yet."""

    def write(self, files: Files) -> dict[str, Any]:
        """Write this process's files, and return what `commit` must know of each."""

    def commit(self, files: dict[str, Any], info: Mapping[str, Any], hooked: bool) -> None:
        """Commit the checkpoint, with the results of `write` on all processes."""

    def discard(self, is_main: bool) -> None:
        """Delete what is not committed; ``is_main`` is True on rank zero."""


class DiskSave:
    """Save to a directory: every process writes its own files, and one commits them. `remote.Upload` saves to a URL.

    Args:
        target: Path of the checkpoint.
        writer: The process that commits it (`identify_process`). Default: this process.
    """

    def __init__(self, target: Path, writer: str = "") -> None:
        self._target, self.staging = Path(os.path.abspath(target)), get_staging_path(target, writer)

    def write(self, files: Files) -> dict[str, filesystem.Entry]:
        """Write this process's files, fsync them, and return their entries for the manifest."""
        return write_files(self.staging, files)

    def commit(self, files: Mapping[str, Mapping[str, Any]], info: Mapping[str, Any], hooked: bool) -> None:
        """Commit the written files as a checkpoint by one rename, after all processes have written theirs.

        An existing checkpoint at the target is replaced; at every moment, at least one of the two is complete on the
        disk.

        Args:
            files: The results of `write` on all processes.
            info: Metadata for the manifest.
            hooked: Make the files that hooks wrote to `staging` part of the checkpoint. If False, they are deleted.

        Raises:
            ValueError: If a listed file is missing or has the wrong size, or the manifest, a file of a hook or the
                target is not valid.
            TypeError: If ``info`` contains a tensor, an array, or a value that cannot be encoded as JSON.
            OSError: If a disk operation fails. An earlier checkpoint at the target is not lost.
        """
        target, source = self._target, self.staging
        atomic_swap.check_target(target)
        sequence = _find_next_sequence(target.parent)
        entries = {name: dict(files[name]) for name in sorted(files)}
        written = _sync_added_files(source, set(files)) if hooked else {}
        data = Manifest.build(entries, info, sequence, written).source
        for name, entry in entries.items():
            filesystem.check_file(source, name, entry, digests=False, fix=atomic_swap.SHARE_TARGET)
        for stray in sorted(set(os.listdir(source)) - set(files)):  # left by a killed attempt, such as its manifest
            if not hooked:
                filesystem.delete(source / stray)
        filesystem.write_bytes(source / MANIFEST, data)
        filesystem.fsync(source / MANIFEST)
        if hooked:
            filesystem.delete(source / UNFINISHED)
        filesystem.fsync(source)
        _put_in_place(source, target, sequence)

    def discard(self, is_main: bool) -> None:
        """Delete the files of an uncommitted save. ``is_main`` is True on rank zero, which deletes them."""
        if is_main:
            discard(self._target)
        else:
            forget_unfinished(self.staging)


class JoinedSave:
    """Base class of saves in which rank zero writes the files of all processes. ``is_main`` is True on rank zero."""

    def __init__(self, staging: Path, is_main: bool) -> None:
        self.staging = staging
        self._is_main = is_main
        self._files: Files = {}

    def write(self, files: Files) -> dict[str, Any]:
        """Return this process's files for `commit`, unless this is rank zero. They are small, and sent as bytes."""
        if self._is_main:
            self._files = files
            return {}
        return {name: content if isinstance(content, bytes) else pack(content) for name, content in files.items()}

    def join(self, files: Mapping[str, Any]) -> Files:
        """Return the files of all processes, for the results of `write` on all of them."""
        return self._files | {name: c if isinstance(c, bytes) else unpack(c) for name, c in files.items()}


class FileSave(JoinedSave):
    """Save to one file.

    Args:
        target: Path of the checkpoint.
        writer: The process that commits it (`identify_process`).
        layout: The assignment of rank zero's tensors to records; None on other ranks.
    """

    def __init__(self, target: Path, writer: str, layout: Layout | None) -> None:
        super().__init__(get_staging_path(target, writer), layout is not None)
        self._target, self._layout = target, layout

    def commit(self, files: Mapping[str, Any], info: Mapping[str, Any], hooked: bool) -> None:
        """Write the checkpoint with ``files`` of the other ranks, and put it in place; see `DiskSave.commit`."""
        assert self._layout is not None
        assert not hooked  # files of hooks need a directory
        target, source = self._target, self.staging
        atomic_swap.check_target(target)
        if target.is_dir() and not atomic_swap.is_empty(target):
            own_files = {*read_manifest(target).names, MANIFEST, UNFINISHED}
            atomic_swap.check_no_foreign_files(target, own_files, "replaced by a file")
        filesystem.make_directory(target.parent)
        sequence = _find_next_sequence(target.parent)
        filesystem.write_bytes(source, b"")
        note_unfinished(source)
        write_one_file(
            source,
            self._layout,
            self.join(files),
            lambda entries, records: Manifest.build(entries, info, sequence, records=records).source,
        )
        filesystem.fsync(source)
        _put_in_place(source, target, sequence)

    def save(self, files: Files, info: Mapping[str, Any]) -> None:
        """Write and commit a checkpoint that one process saves alone."""
        self.commit(self.write(files), info, False)

    def discard(self, is_main: bool) -> None:
        """Delete an uncommitted file. ``is_main`` is True on rank zero, which wrote it."""
        if is_main:
            discard(self._target)


def write_and_commit(
    world: World,
    target: AnyPath,
    files: Files,
    info: dict[str, Any],
    hooked: bool = False,
    make_save: Callable[[Path, str], Save] | None = None,
) -> None:
    """Write the files of `content.collect`, wait for all processes, and commit the checkpoint. Call it on all ranks.

    ``make_save`` makes the `Save` for a target and the name of its writer. The default writes a directory or uploads.

    If a disk operation or a request to the store fails, an earlier checkpoint remains, unless the store's response to
    the commit was lost. If someone deletes the directory during the save, it is created and written again, once.
    """
    error, is_deleted = _try_to_commit(world, target, files, info, hooked, make_save)
    if any(world.gather_objects(is_deleted)) and not hooked:
        error, _ = _try_to_commit(world, target, files, info, hooked, make_save)
    world.raise_together(error)


def _try_to_commit(
    world: World,
    target: AnyPath,
    files: Files,
    info: dict[str, Any],
    hooked: bool,
    make_save: Callable[[Path, str], Save] | None,
) -> tuple[Exception | None, bool]:
    """Return the error of this process, if any, and whether the reason is that its files have been deleted."""
    entries: dict[str, Any] = {}
    error: Exception | None = None
    # Before the block below, whose errors are raised together.
    name = world.broadcast(identify_process() if isinstance(target, Path) else remote.Upload.new_folder())
    save: Save = (make_save or DiskSave)(target, name) if isinstance(target, Path) else remote.Upload(target, name)
    try:
        if hooked and (clashing := [name for name in files if os.path.lexists(save.staging / name)]):
            raise ValueError(
                f"a save_state pre-hook wrote {clashing[0]}, but this name is reserved for the checkpoint's own file. "
                "Use another name."
            )
        entries = save.write(files)
    except Exception as caught:
        error = _explain_error(caught, target, files)
    of_ranks = world.gather_objects((entries, error is None))
    if world.is_main:
        try:
            if all(written for _, written in of_ranks):
                merged = {name: entry for written, _ in of_ranks for name, entry in written.items()}
                save.commit(merged, info, hooked)
        except Exception as caught:
            error = error or _explain_error(caught, target, files)
    is_deleted = (
        isinstance(error, FileNotFoundError | ValueError)
        and isinstance(target, Path)
        and bool(files)
        and not os.path.lexists(save.staging)
    )
    with suppress(OSError):  # a remainder is deleted at the next start
        save.discard(world.is_main)  # nothing of the commit remains
    return error, is_deleted


def _explain_error(error: Exception, target: AnyPath, files: Files) -> Exception:
    """Return an error with the reason or the required bytes if the disk refuses the files, or the error itself."""
    if not isinstance(error, OSError):
        return error
    if isinstance(target, Path) and (reason := filesystem.explain_refusal(target.parent, error)) != error.strerror:
        text = f"can't save {target}: {reason}. Earlier checkpoints are kept. Delete or move files, or save elsewhere."
        return OSError(error.errno, text)
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return error
    needed = f"This process needs {sum(estimate_size(content) for content in files.values()):,} bytes"
    folder = get_staging_path(target) if isinstance(target, Path) else remote.open_staging(target)
    with suppress(OSError):
        existing = next(parent for parent in folder.parents if os.path.exists(parent))
        needed += f", but only {shutil.disk_usage(existing).free:,} are free"
    fix = "Free some space, or save to a larger disk"
    if isinstance(target, RemotePath):
        needed += f" in {folder.parent.parent}, where the files are assembled"
        fix = "Set TMPDIR to a folder on a larger disk"
    text = f"can't save {target}: {error.strerror}. {needed}. Earlier checkpoints are kept. {fix}."
    return OSError(error.errno, text)


class CheckpointStore:
    """Store that finds, verifies and recovers the checkpoints in one directory or under one URL.

    Args:
        directory: Path or URL of the directory that contains the checkpoints. It need not exist yet.

    Raises:
        ValueError: If the URL is invalid or its scheme is read-only.
        TypeError: If ``directory`` is neither a path nor a URL.

    Examples:
        >>> import treadle
        >>> from treadle.engine import CheckpointStore
        >>> accelerator = treadle.Accelerator(cpu=True)
        >>> path = accelerator.save_state("checkpoints/first")
        >>> latest, skipped = CheckpointStore("checkpoints").latest()
        >>> latest.name, skipped
        ('first', [])
    """

    def __init__(self, directory: AnyPath | str) -> None:
        self.directory = absolute(directory)

    def find(self) -> list[AnyPath]:
        """Return the committed checkpoints, sorted by step and then by order of commit.

        The latest checkpoint is last. Timestamps are not used. A checkpoint whose replacement was interrupted may be
        listed as ``.name.old``.

        Raises:
            OSError: If the directory or the object store cannot be read.
        """
        return [path for _, path in self.scan()[0]]

    def scan(self) -> tuple[list[tuple[Manifest, AnyPath]], list[str]]:
        """Return the same checkpoints as `find`, with their manifests, and a message for each unreadable manifest.

        Raises:
            OSError: If the directory or the object store cannot be read.
        """
        directory = self.directory
        if isinstance(directory, RemotePath):
            return read_manifests(remote.list_checkpoints(directory))
        return read_manifests(_iterate_checkpoints(directory))

    def latest(self, verify: bool = True) -> tuple[AnyPath | None, list[str]]:
        """Return the latest intact checkpoint.

        Args:
            verify: Compare the digests of the files, not only their names and sizes. For a URL, this downloads the
                files. Default: True.

        Returns:
            The path of the checkpoint (``None`` if no checkpoint is intact), and messages about damaged checkpoints.

        Raises:
            OSError: If the directory or the object store cannot be read.
        """
        checkpoints, skipped = self.scan()
        for manifest, path in reversed(checkpoints):
            try:
                if isinstance(path, Path):
                    check_files(path, manifest, digests=verify)
                elif verify:
                    remote.Download(path, manifest).fetch(manifest.checked)
                else:
                    remote.check_files(path, manifest)
            except ValueError as error:
                skipped.append(str(error))
            else:
                return path, skipped
        return None, skipped

    def probe(self, nbytes: int = 0) -> None:
        """Check before a run that checkpoints can be saved.

        The method creates the directory if necessary, and writes and deletes a small file there. For a URL, it writes
        and deletes an object.

        Args:
            nbytes: The size of one checkpoint in bytes; ignored for a URL. Default: 0.

        Raises:
            OSError: If the directory or URL cannot be written to, or fewer than ``nbytes`` bytes are free on the disk.
        """
        if isinstance(self.directory, Path):
            filesystem.probe(self.directory, nbytes)
        else:
            remote.check_writable(self.directory)

    def recover(self) -> list[str]:
        """Complete or roll back interrupted saves and deletions of checkpoints, and delete leftover files.

        Another run that is saving to the directory is not disturbed. Unfinished saves of other machines are deleted
        only after an hour without a change.

        Call this method before the first save, and only in the process that commits checkpoints to this directory.

        Returns:
            Messages about what was done; empty if there was nothing to do.

        Raises:
            OSError: If a disk operation or a request to the object store fails.
        """
        if isinstance(self.directory, RemotePath):
            return remote.recover(self.directory)
        matches = [atomic_swap.VERSION_NAME.fullmatch(name) for name in filesystem.list_names(self.directory)]
        names = sorted({match["name"] for match in matches if match})
        return [sentence for name in names for sentence in atomic_swap.recover(self.directory / name)]


def _iterate_checkpoints(directory: Path) -> Iterator[Path]:
    """Yield the paths of the checkpoints in a directory, including damaged ones."""
    return filter(_looks_like_checkpoint, _iterate_entries(directory))


def _iterate_entries(directory: Path) -> Iterator[Path]:
    """Yield the entries of a directory that may be checkpoints."""
    for name in filesystem.list_names(directory):
        path, match = directory / name, atomic_swap.VERSION_NAME.fullmatch(name)
        if name.startswith(".") and not (match and match["kind"] == "old"):
            continue
        if os.path.islink(path):
            continue
        if match and atomic_swap.is_whole(directory / match["name"]):
            continue  # it is replaced, and about to be deleted
        yield path


# The version and the sequence number of each checkpoint that a commit has found next to its own. With many kept
# checkpoints, reading their manifests each time took longer than the save itself.
_known_sequences: dict[Path, tuple[filesystem.Mark, int]] = {}


def _find_next_sequence(directory: Path) -> int:
    """Return one more than the highest sequence number in a directory; unreadable manifests are ignored."""
    present = {}
    for path in _iterate_entries(directory):
        with suppress(ValueError, OSError):
            version = atomic_swap.mark_version(path)
            entry = _known_sequences.get(path)
            if entry is None or entry[0] != version:
                entry = version, read_manifest(path).sequence if _looks_like_checkpoint(path) else 0
            present[path] = entry
    for path in list(_known_sequences):  # copied to a list, because asynchronous saves commit in threads
        if path.parent == directory and path not in present:
            _known_sequences.pop(path, None)  # deleted checkpoints would accumulate throughout a long run
    _known_sequences.update(present)
    return max((sequence for _, sequence in present.values()), default=0) + 1


def _looks_like_checkpoint(path: Path) -> bool:
    if is_checkpoint_file(path) or (path.suffix == ".ckpt" and is_replaceable_file(path)):
        return True  # an empty file, or one of another library, is named among those that are skipped
    with suppress(OSError):  # an unreadable directory is not a checkpoint of this run
        return os.path.isfile(path / MANIFEST) or any(
            file.endswith(".safetensors") for file in filesystem.list_names(path)
        )
    return False
