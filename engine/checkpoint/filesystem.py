"""File operations of checkpoints: durable writes and checked reads.

Code that saves, recovers or deletes a checkpoint on a disk changes files through `mkdir`, `write_bytes`,
`write_tensors`, `write_stream`, `fsync`, `rename`, `replace`, `unlink` and `rmdir`, so a test can stop the process at
each of them.
"""

import errno
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, BinaryIO, NamedTuple

import torch
from xxhash import xxh3_128

from ...common.remote_path import AnyPath, RemotePath
from ...strategies.distributed import Whole, view_bytes

DIGEST = "xxh3_128"
"""Name of the digest in a manifest. It is as fast as reading memory, so it can be compared at every load.

It detects damage, not forgery, because anyone who can change a file can also change the manifest. Reading a checkpoint
never runs code.
"""

DTYPES: dict[str, torch.dtype] = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"C64": torch.complex64, "BOOL": torch.bool},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E4M3FNUZ": torch.float8_e4m3fnuz},
    **{"F8_E5M2": torch.float8_e5m2, "F8_E5M2FNUZ": torch.float8_e5m2fnuz},
}
"""Dtypes of a safetensors file by their codes: those that safetensors 0.8 writes and reads with torch.

It also writes float8_e8m0fnu, but can't read it back.
"""

CODES = {dtype: code for code, dtype in DTYPES.items()}
"""Codes of dtypes in a safetensors file."""

Entry = dict[str, Any]
"""A manifest's entry for a file: its size under ``bytes``, and its digest."""

Mark = tuple[int, int]
"""Size and time of a file, which reveal a change; see `mark`."""

_NO_LINKS = (errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.ENOSYS, errno.EXDEV, errno.EMLINK)
_PIECE = 2**22  # bytes that are digested and written while they are in the processor's cache


class TensorFile(NamedTuple):
    """Content of a safetensors file: tensors by name, and the text notes in its header."""

    tensors: dict[str, torch.Tensor]
    notes: dict[str, str]


Files = dict[str, bytes | TensorFile]
"""Content of each file, by its name."""

FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.(json|safetensors)")
"""Allowed names of a checkpoint's files. None of them can lead out of the directory."""


RESTORE = "Copy or download the checkpoint again, or use another checkpoint."
"""Fix for a damaged or incomplete checkpoint, at the end of an error message."""


def is_inside(name: str) -> bool:
    """Return whether a path, as `list_leaves` yields it, stays inside its directory on every operating system."""
    parts = {*PurePosixPath(name).parts, *PureWindowsPath(name).parts}
    plain = name == PurePosixPath(name).as_posix() and not PureWindowsPath(name).anchor
    return bool(parts) and plain and ".." not in parts and "\0" not in name


def mkdir(path: Path) -> None:
    """Create one directory, whose parent must exist."""
    os.mkdir(path)


def write_bytes(path: Path, data: bytes) -> Entry:
    """Write or overwrite a file, and return its entry for a manifest."""
    with _name_file_in_errors(path):
        path.write_bytes(data)
    return {"bytes": len(data), DIGEST: xxh3_128(data).hexdigest()}


def write_tensors(path: Path, tensors: Mapping[str, Whole], notes: dict[str, str]) -> Entry:
    """Write or overwrite a safetensors file, and return its entry for a manifest.

    The values of ``tensors`` may also be objects that read a tensor when they are indexed, such as `Stored`. Their
    dtypes must be in `CODES`. ``notes`` are written to ``__metadata__`` in the header.
    """
    size, pieces = serialize_tensors(tensors, notes)
    digested = Digested(pieces)
    with _name_file_in_errors(path), path.open("wb", buffering=2**20) as file:
        for piece in digested:
            file.write(piece)
    return digested.make_entry(size)


def write_stream(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Write or overwrite a file by a function that gets the open file."""
    with _name_file_in_errors(path), path.open("wb", buffering=2**20) as file:
        write(file)


Piece = bytes | memoryview


def serialize_tensors(tensors: Mapping[str, Whole], notes: dict[str, str]) -> tuple[int, Iterator[Piece]]:
    """Return the size of a safetensors file in bytes, and an iterator over its content; see `write_tensors`.

    The iterator copies tensors to the host one after the other. safetensors' own writer needs all tensors on the host
    at the same time, and its file would have to be read again for the digest.

    Source: https://huggingface.co/docs/safetensors (the format)
    """
    # Wide elements first, so that each tensor begins at a multiple of its element's size.
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": notes} if notes else {}
    end = 0
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + tensor.shape.numel() * tensor.dtype.itemsize
        header[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    text = len(text).to_bytes(8, "little") + text

    def iterate() -> Iterator[Piece]:
        yield text
        for name in names:
            yield from split_tensor(tensors[name][...])

    return len(text) + end, iterate()


class Digested:
    """Iterable over the pieces of a file that computes their digest while they are in the processor's cache."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._pieces = pieces
        self._digest = xxh3_128()

    def __iter__(self) -> Iterator[Piece]:
        for piece in self._pieces:
            self._digest.update(piece)
            yield piece

    def make_entry(self, size: int) -> Entry:
        """Return a manifest's entry for the file, which has ``size`` bytes. Call this method after the iteration."""
        return {"bytes": size, DIGEST: self._digest.hexdigest()}


@contextmanager
def _name_file_in_errors(path: Path) -> Iterator[None]:
    """Return a context that adds the file's name to an OSError that lacks it."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def split_tensor(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in pieces of at most 4 MiB, after a copy to the host if it is on a device."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    data = memoryview(view_bytes(plain).numpy())  # type: ignore[arg-type]
    for start in range(0, len(data), _PIECE):
        yield data[start : start + _PIECE]


def fsync(path: Path) -> None:
    """Wait until a file's content, or a directory's entries, are on the storage device.

    Directories are ignored on Windows and on file systems that do not support the call for them.
    """
    if os.name == "nt" and path.is_dir():  # Windows cannot open a directory
        return
    # A file written by a hook may be read-only; only Windows requires that it is opened for writing.
    descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems do not support the call for directories.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """Rename a directory or a file to an unused name on the same file system."""
    os.rename(source, target)


def replace(source: Path, target: Path) -> None:
    """Rename a file on the same file system, and replace an existing file at the target."""
    os.replace(source, target)


def link(source: Path, target: Path) -> None:
    """Give a file a second name on the same file system; copy it where the file system has one name per file."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.copyfile(source, target)
        fsync(target)


def unlink(path: Path) -> None:
    """Delete a file, or a link but not its target."""
    os.unlink(path)


def rmdir(path: Path) -> None:
    """Delete an empty directory."""
    os.rmdir(path)


def make_directory(path: Path) -> None:
    """Create a directory and its missing parents, and fsync their entries. Processes may call it concurrently."""
    if make_staging_directory(path):
        fsync(path.parent)


def make_staging_directory(path: Path) -> bool:
    """Create a directory and its missing parents, and return False if it existed before the call.

    The new directory's entry is durable only after an fsync of its parent.
    """
    if path.is_dir():
        return False
    make_directory(path.parent)
    try:
        mkdir(path)
    except FileExistsError:
        if not path.is_dir():
            raise
    return True


def delete(path: Path, first: str = "") -> None:
    """Delete a file, a link or a whole directory. A missing path is not an error, and links are not followed.

    In a directory, the name ``first`` is deleted before all others.
    """
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_dir():
        unlink(path)
        return
    for name in sorted(os.listdir(path), key=lambda name: (name != first, name)):
        delete(path / name)
    rmdir(path)


def list_names(directory: AnyPath) -> list[str]:
    """Return the sorted names in a directory, or an empty list if it is not a directory."""
    if isinstance(directory, RemotePath):
        return directory.names()
    try:
        return sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []


def list_leaves(directory: Path, inside: str = "") -> Iterator[str]:
    """Yield the relative paths of the files and links in a directory and its subdirectories, separated by ``/``.

    ``inside`` is put before each path.
    """
    for name in list_names(directory):
        path = directory / name
        if os.path.isdir(path) and not os.path.islink(path):
            yield from list_leaves(path, f"{inside}{name}/")
        else:
            yield inside + name


def describe(path: Path) -> Entry:
    """Return a manifest's entry for a file's current content, or for a link's target path."""
    if path.is_symlink():
        data = os.fsencode(os.readlink(path))
        return {"bytes": len(data), DIGEST: xxh3_128(data).hexdigest()}
    digest = xxh3_128()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
        return {"bytes": file.tell(), DIGEST: digest.hexdigest()}


def check_file(
    directory: Path, name: str, entry: Mapping[str, Any], digests: bool, links: bool = False, fix: str = RESTORE
) -> None:
    """Check one file of a checkpoint against its entry in the manifest.

    Without ``digests``, only the size is compared. With ``links``, links and files in subdirectories are allowed.
    ``fix`` is the advice at the end of the error message.

    Raises:
        ValueError: If the name is not valid, or the file cannot be read or differs from its entry.
    """
    if not (is_inside(name) if links else FILE.fullmatch(name)):
        raise ValueError(f"{directory}: {name!r:.80} is not a valid checkpoint file name. {fix}")
    try:
        is_link = links and (directory / name).is_symlink()
        actual: Entry = describe(directory / name) if is_link else {"bytes": _measure_file(directory / name)}
        if digests and not is_link and actual["bytes"] == entry["bytes"]:
            actual = describe(directory / name)
    except FileNotFoundError as error:
        raise ValueError(f"{directory}: {name} is missing. {fix}") from error
    except OSError as error:
        raise ValueError(f"{directory}: {name} can't be read: {error.strerror or error}. {fix}") from error
    if actual["bytes"] != entry["bytes"]:
        written = f"{entry['bytes']:,} were written"
        raise ValueError(f"{directory}: {name} has {actual['bytes']:,} bytes, but {written}. {fix}")
    if digests and actual[DIGEST] != entry[DIGEST]:
        raise ValueError(f"{directory}: {name} is not the file that was written (its digest differs). {fix}")


def mark(path: Path) -> Mark:
    """Return the size in bytes and the modification time in ns of a file, or of a link itself, to detect a change.

    The inode number is not included: some network file systems report a different one on each call.
    """
    status = path.lstat()
    return status.st_size, status.st_mtime_ns


def _measure_file(path: Path) -> int:
    status = path.lstat()  # a link may lead out of the directory, and a pipe would block forever
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a plain file")
    return status.st_size


def read_json(path: Path, limit: int) -> Any:
    """Read a JSON file.

    Raise a ValueError if it cannot be read, exceeds ``limit`` bytes, or is not valid JSON; see `parse_json`.
    """
    return parse_json(path, read_bytes(path, limit))


def read_bytes(path: Path, limit: int) -> bytes:
    """Read a whole file; raise a ValueError if it cannot be read, is not a plain file, or exceeds ``limit`` bytes."""
    with _wrap_read_errors(path):
        if _measure_file(path) > limit:
            raise ValueError(f"it is larger than {limit:,} bytes")
        return path.read_bytes()


def parse_json(path: AnyPath, data: bytes) -> Any:
    """Parse UTF-8 text as JSON; ``path`` is for error messages.

    Raises:
        ValueError: If the text is not valid JSON, is nested too deeply, or contains NaN, Infinity or duplicate keys.
    """
    with _wrap_read_errors(path):
        return json.loads(data.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_build_unique_dict)


@contextmanager
def _wrap_read_errors(path: AnyPath) -> Iterator[None]:
    """Return a context that converts errors of reading and parsing to a ValueError that names file and fix."""
    try:
        yield
    except FileNotFoundError as error:
        raise ValueError(
            f"{path.parent}: {path.name} is missing, so this is not a complete checkpoint. Pass the path of a complete "
            "checkpoint."
        ) from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(
            f"{path.parent}: {path.name} can't be read: {reason}. Check the file, its permissions and the disk."
        ) from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.parent}: {path.name} can't be read: {error}. {RESTORE}") from error


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not valid JSON")


def _build_unique_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    built = dict(pairs)
    if len(built) != len(pairs):
        raise ValueError("an object has the same key twice")
    return built


def explain_refusal(directory: Path, error: OSError) -> str:
    """Return why the disk refused to write to a directory, in more detail than the system's message."""
    obstacle = next((p for p in (directory, *directory.parents) if os.path.lexists(p)), directory)
    if isinstance(error, FileExistsError | NotADirectoryError) and not obstacle.is_dir():
        return f"{obstacle} is not a directory"
    if error.errno == errno.ENOSPC and hasattr(os, "statvfs"):
        status = os.statvfs(obstacle)
        if status.f_files and not status.f_favail:  # some file systems have no fixed number of files
            return f"the file system has no room for another file (inode), although {status.f_bavail:,} blocks are free"
    return error.strerror or str(error)


def probe(directory: Path, nbytes: int = 0) -> None:
    """Check before the run that checkpoints can be saved in a directory, by creating it and writing a file.

    Raises:
        OSError: If the directory cannot be created or written to, or fewer than ``nbytes`` bytes are free.
    """
    directory = Path(os.path.abspath(directory))
    file = directory / f".probe-{os.getpid()}-{os.urandom(4).hex()}"
    try:
        make_directory(directory)
        write_bytes(file, b"treadle")
        fsync(file)
        unlink(file)
        free = shutil.disk_usage(directory).free
    except OSError as error:
        reason = explain_refusal(directory, error)
        text = f"can't save checkpoints in {directory}: {reason}. Choose a directory that this process can write to."
        raise OSError(error.errno, text) from error
    if free < nbytes:
        text = (
            f"can't save checkpoints in {directory}: a checkpoint needs {nbytes:,} bytes, but only {free:,} are free. "
            "Free some space, or save to a larger disk."
        )
        raise OSError(errno.ENOSPC, text)
