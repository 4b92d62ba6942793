"""Reader of a checkpoint that is one file. It reads JSON records and the bytes of tensors, and never the pickle."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..filesystem import DIGEST, RESTORE, Entry
from .zip_writer import ROOT, TAIL_BYTES, digest_tail, make_header, read_comment

FIRST = "treadle/format"
"""First record, from which a file is recognized even if its end is missing."""
MANIFEST_RECORD = "treadle/manifest.json"
"""Last record."""
_START = make_header(f"{ROOT}/{FIRST}".encode(), 1, 0)
_NAME = slice(30, 30 + len(f"{ROOT}/{FIRST}"))  # in `_START`


@dataclass(frozen=True)
class Records:
    """Records of a checkpoint file, from its manifest.

    Attributes:
        entries: Position, size and digest of each record by its name, in the order of the file.
        gaps: Digest of all bytes before ``end`` that are not the content of a record.
        end: Position of the manifest's header.
    """

    entries: dict[str, Entry]
    gaps: str
    end: int

    def to_json(self) -> dict[str, Any]:
        """Return the entry of the manifest from which `parse` makes the records."""
        return {"entries": self.entries, "gaps": self.gaps, "end": self.end}

    @classmethod
    def parse(cls, document: Any) -> "Records":
        """Return the records for a manifest's entry.

        Raises:
            ValueError: If it is not valid.
        """
        document = document if isinstance(document, dict) else {}
        entries, gaps, end = (document.get(name) for name in ("entries", "gaps", "end"))
        if not (isinstance(entries, dict) and isinstance(gaps, str) and type(end) is int):
            raise ValueError("its entry 'records' is not valid")
        position = 0
        for name, entry in entries.items():
            entry = entry if isinstance(entry, dict) else {}
            at, size, digest = entry.get("at"), entry.get("bytes"), entry.get(DIGEST)
            if not (type(at) is int and type(size) is int and size >= 0 and isinstance(digest, str) and at >= position):
                raise ValueError(f"the entry of the record {name:.80} is not valid")
            position = at + size
        if position > end:
            raise ValueError("its records extend beyond their end")
        return cls(entries, gaps, end)


def is_checkpoint_file(path: Path | str) -> bool:
    """Return whether a path is a file that begins or ends like a checkpoint of Treadle, which may be damaged."""
    ends = _read_ends(path)
    return ends is not None and (ends[0][_NAME] == _START[_NAME] or read_comment(ends[1]) is not None)


def is_unfinished_file(path: Path | str) -> bool:
    """Return whether a path is a file that a save has begun, of which only the first bytes may have been written."""
    ends = _read_ends(path)
    return ends is not None and _START.startswith(ends[0][: len(_START)])


def is_replaceable_file(path: Path | str) -> bool:
    """Return whether a save may replace a file: it is empty, a checkpoint, or begins like one of ``torch.save``."""
    ends = _read_ends(path)
    return ends is not None and (not ends[0] or b"/data.pkl" in ends[0] or is_checkpoint_file(path))


def _read_ends(path: Path | str) -> tuple[bytes, bytes] | None:
    """Return the first and last bytes of a file; None if the path is not a file, such as a pipe, or cannot be read."""
    try:
        if os.path.isfile(path):
            with open(path, "rb", buffering=0) as file:
                start = file.read(128)
                file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
                return start, file.read(TAIL_BYTES)
    except OSError:
        pass
    return None


def read_tail(path: Path, limit: int) -> bytes:
    """Return the last bytes of a checkpoint file, from the header of its manifest on, whose digest is checked.

    Raises:
        ValueError: If the file is not a checkpoint, is truncated or damaged, or they are more than ``limit`` bytes.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - TAIL_BYTES))
            place = read_comment(file.read())
            if place is None:
                if is_checkpoint_file(path):
                    raise ValueError(f"{path} is truncated, or its end is damaged. {RESTORE}")
                raise ValueError(
                    f"{path} is a file, but not a checkpoint that Treadle can resume from. Pass a checkpoint of "
                    "Treadle. To load weights from a file of another library, use TaskModule.load_from_checkpoint or "
                    "treadle.load_weights."
                )
            start, at, length, digest = place
            if not start < at or at + length > size or size - start > limit:
                raise ValueError(f"{path}: its end is damaged. {RESTORE}")
            file.seek(start)
            tail = read_exactly(file, size - start)
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror or error}. Check the file and the disk.") from error
    if digest_tail(tail, start, at, length) != digest:
        raise ValueError(f"{path}: its manifest or its list of records is damaged. {RESTORE}")
    return tail


def take_manifest(tail: bytes) -> bytes:
    """Return the content of the manifest in the last bytes of a checkpoint file; see `read_tail`."""
    start, at, length, _ = read_comment(tail[-TAIL_BYTES:]) or (0, 0, 0, b"")
    return tail[at - start :][:length]


def read_exactly(file: Any, size: int) -> bytes:
    """Read from an unbuffered file, one call of which returns at most 2 GB."""
    data = bytearray()
    while len(data) < size:
        piece = file.read(size - len(data))
        if not piece:
            break
        data += piece
    return bytes(data)


def read_record(path: Path, records: Records, name: str, limit: int) -> bytes:
    """Return the content of a record.

    Raises:
        ValueError: If the record is missing, exceeds ``limit`` bytes or cannot be read.
    """
    entry = records.entries.get(name)
    if entry is None:
        raise ValueError(f"{path}: the record {name} is missing. {RESTORE}")
    if entry["bytes"] > limit:
        raise ValueError(f"{path}: the record {name} is larger than {limit:,} bytes. {RESTORE}")
    with open_file(path) as file:
        file.seek(entry["at"])
        data = read_exactly(file, entry["bytes"])
    if len(data) < entry["bytes"]:
        raise ValueError(f"{path} is truncated: it ends within the record {name}. {RESTORE}")
    return data


def open_file(path: Path) -> Any:
    """Open a checkpoint file for unbuffered reads; raise a ValueError if that is impossible."""
    try:
        return open(path, "rb", buffering=0)
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror or error}. Check the file and the disk.") from error
