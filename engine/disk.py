"""What checkpoints ask of a disk: a few durable operations, and reading back only what was checked.

Every change on disk goes through seven small functions: `mkdir`, `write_bytes`, `write_tensors`, `fsync`, `rename`,
`unlink` and `rmdir`. They are called by way of this module, so that a test can stop the process at each of them.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.(json|safetensors)")
"""The names a checkpoint's files may have. None of them can lead out of the directory."""


def mkdir(path: Path) -> None:
    """Make one directory."""
    os.mkdir(path)


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file."""
    path.write_bytes(data)


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], notes: dict[str, str]) -> None:
    """Write a safetensors file from tensors on any device and of any layout.

    Args:
        path: The file.
        tensors: The tensors by name.
        notes: The text that goes into the file's header.

    Raises:
        OSError: The disk refused, a full one too.
    """
    storable: dict[str, torch.Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        if tensor.untyped_storage().data_ptr() in storages:
            tensor = tensor.clone()  # another view of the same memory, which safetensors refuses
        storages.add(tensor.untyped_storage().data_ptr())
        storable[name] = tensor
    try:
        save_file(storable, path, metadata=notes)
    except SafetensorError as error:
        raise OSError(f"{path}: can't write the tensors: {error}") from error
    # safetensors 0.8 makes its files readable by their owner alone. The directory shows what the umask allows.
    os.chmod(path, stat.S_IMODE(path.parent.stat().st_mode) & 0o666)


def fsync(path: Path) -> None:
    """Wait until a file's content, or a directory's entries, are on the disk itself."""
    is_dir = path.is_dir()
    if is_dir and os.name == "nt":  # Windows can't open a directory
        return
    descriptor = os.open(path, os.O_RDONLY if is_dir else os.O_RDWR)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not is_dir or error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems lack the call
            raise
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """Rename a directory to a name that is free."""
    os.rename(source, target)


def unlink(path: Path) -> None:
    """Delete a file, or a link itself."""
    os.unlink(path)


def rmdir(path: Path) -> None:
    """Delete an empty directory."""
    os.rmdir(path)


def make_directory(path: Path) -> None:
    """Make a directory and its parents, durably. Several processes may do so at once."""
    if path.is_dir():
        return
    make_directory(path.parent)
    try:
        mkdir(path)
    except FileExistsError:
        if not path.is_dir():
            raise
    fsync(path.parent)


def delete(path: Path, first: str = "") -> None:
    """Delete a file, a link or a whole directory. Nothing there is no error, links are not followed.

    Args:
        path: What to delete.
        first: The name in the directory that goes before all others.
    """
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_dir():
        unlink(path)
        return
    for name in sorted(os.listdir(path), key=lambda name: (name != first, name)):
        delete(path / name)
    rmdir(path)


def names(directory: Path) -> list[str]:
    """What is in a directory, sorted; nothing if it isn't one."""
    try:
        return sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []


def describe(path: Path) -> dict[str, Any]:
    """A file's entry for a manifest: its size and the digest of what now stands in it, read in small pieces."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}


def check_file(directory: Path, name: str, entry: Mapping[str, Any], digests: bool) -> None:
    """Check one file of a directory against its entry.

    Args:
        directory: The directory.
        name: The file's name.
        entry: Its ``bytes`` and ``sha256``.
        digests: Also read it and compare the digest.

    Raises:
        ValueError: It is missing, not a plain file, of another size or of other content.
    """
    if not FILE.fullmatch(name):
        raise ValueError(f"{directory}: {name!r:.80} is not a name of a checkpoint's file.")
    try:
        found: dict[str, Any] = {"bytes": _size(directory / name)}
        if digests and found["bytes"] == entry["bytes"]:
            found = describe(directory / name)
    except FileNotFoundError as error:
        raise ValueError(f"{directory}: {name} is missing.") from error
    except OSError as error:
        raise ValueError(f"{directory}: {name} can't be read: {error.strerror or error}.") from error
    if found["bytes"] != entry["bytes"]:
        raise ValueError(f"{directory}: {name} has {found['bytes']:,} bytes, {entry['bytes']:,} were written.")
    if digests and found["sha256"] != entry["sha256"]:
        raise ValueError(f"{directory}: {name} has other content than was written (its sha256 differs).")


def _size(path: Path) -> int:
    status = path.lstat()  # a link may lead out of the directory, a pipe would block for ever
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a plain file")
    return status.st_size


def read_json(path: Path, limit: int) -> Any:
    """Read a JSON file, strictly: no nan, no key twice.

    Args:
        path: The file.
        limit: The most bytes to read.

    Raises:
        ValueError: It is missing, too large, or isn't JSON.
    """
    try:
        if _size(path) > limit:
            raise ValueError(f"it is larger than {limit:,} bytes")
        text = path.read_bytes().decode("utf-8")
        return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_unique)
    except FileNotFoundError as error:
        raise ValueError(f"{path.parent}: {path.name} is missing, so it is not a complete checkpoint.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path.parent}: {path.name} can't be read: {error}. Use another checkpoint.") from error


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    built = dict(pairs)
    if len(built) != len(pairs):
        raise ValueError("an object has the same key twice")
    return built


def read_tensors(path: Path, device: str, mapped: bool) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Read a safetensors file.

    Args:
        path: The file.
        device: Where the tensors go.
        mapped: On the CPU, leave them mapped onto the file instead of copying them.

    Returns:
        The tensors by name, and the text in the header.

    Raises:
        ValueError: It isn't a whole safetensors file.
    """
    try:
        with safe_open(path, framework="pt", device=device) as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
            notes = dict(file.metadata() or {})
    except (SafetensorError, OSError, KeyError) as error:
        raise ValueError(f"{path.parent}: {path.name} can't be read: {error}. Use another checkpoint.") from error
    if not mapped and torch.device(device).type == "cpu":
        # A mapped tensor changes with its file, and kills the process once a network disk has dropped that file.
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    return tensors, notes


def probe(directory: Path | str, nbytes: int = 0) -> None:
    """Find out before the run whether checkpoints can be saved in a directory, by making it and writing a file.

    Args:
        directory: Where checkpoints will stand. Made if it isn't there, parents too.
        nbytes: What one checkpoint needs, in bytes.

    Raises:
        OSError: It can't be made or written to, or has less than ``nbytes`` free. The text says which.
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
        reason = error.strerror or str(error)
        text = f"can't save checkpoints in {directory}: {reason}. Choose a directory that this process can write to."
        raise OSError(error.errno, text) from error
    if free < nbytes:
        text = (
            f"can't save checkpoints in {directory}: one needs {nbytes:,} bytes and {free:,} are free. Make room there."
        )
        raise OSError(errno.ENOSPC, text)
