"""Zip format of ``torch.save``: its writer, with a digest of every byte, and its reader, which never reads the pickle.

All records are stored, not compressed, and each begins at a multiple of 64 bytes. The layout equals that of torch's own
writer byte for byte where a reader depends on it, such as torch's option ``config.load.calculate_storage_offsets``. The
records' CRC-32 are correct, because ``zipfile`` and ``unzip`` check them. zlib-ng computes them at 20 GiB/s where the
zlib of Python takes a quarter of the time of a save.

Source: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT (the zip format)
"""

import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from xxhash import xxh3_128
from zlib_ng.zlib_ng import crc32

from ..filesystem import DIGEST, RESTORE, Entry, Piece

ROOT = "checkpoint"
"""Folder that contains all records in the zip file. torch takes any name, from the first record."""

ALIGNMENT = 64  # bytes
_WIDE = 0xFFFFFFFF
"""Sizes and positions from this value on are written in the fields of ZIP64."""
_SIZE_FOLLOWS = 0x0808  # flags of a record: UTF-8 name; CRC and size come after the content
_EMPTY = 0x0800  # a record of no bytes with the other flag is refused by unzip as a "zip bomb"
_COMMENT = struct.Struct("<8sQQ32s")
_SIGNATURE = b"treadle1"
_UNKNOWN = b"0" * 32
TAIL_BYTES = _COMMENT.size
"""Length of the zip file's comment, with which the file ends."""


class ZipWriter:
    """Writer of a zip file, which needs only the ``write`` method of ``stream``.

    Args:
        stream: The binary file to write to.

    Attributes:
        records: Entry of each record: its position under ``at``, its size under ``bytes``, and its digest.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self.records: dict[str, Entry] = {}
        self._stream = stream
        self._at = 0
        self._directory: list[bytes] = []
        self._gaps = xxh3_128()  # of all bytes outside the records' content

    def add(self, name: str, size: int, pieces: Iterable[Piece]) -> Entry:
        """Write a record of ``size`` bytes, and return its entry."""
        path, start = f"{ROOT}/{name}".encode(), self._at
        self._write_gap(make_header(path, size, start))
        entry: Entry = {"at": self._at, "bytes": size}
        digest, crc = xxh3_128(), 0
        for piece in pieces:
            digest.update(piece)
            crc = crc32(piece, crc)
            self._stream.write(piece)
            self._at += len(piece)
        if self._at != entry["at"] + size:
            raise ValueError(f"{name} has {self._at - entry['at']:,} bytes, but {size:,} were announced")
        self._write_gap(make_descriptor(crc, size, start))
        self._directory.append(make_directory_entry(path, crc, size, start))
        self.records[name] = entry | {DIGEST: digest.hexdigest()}
        return self.records[name]

    @property
    def end(self) -> int:
        """Number of bytes written so far."""
        return self._at

    def _write_gap(self, data: bytes) -> None:
        self._gaps.update(data)
        self._stream.write(data)
        self._at += len(data)

    @property
    def gaps(self) -> str:
        """Digest of all bytes written so far that are not the content of a record."""
        return self._gaps.hexdigest()

    def close(self, name: str, content: bytes) -> None:
        """Write the last record and the end of the file, whose comment has the digest of all bytes from there on."""
        self._stream.write(make_tail(self._directory, name, content, self._at))


def make_header(path: bytes, size: int, start: int) -> bytes:
    """Return the header of a record, padded so that the content begins at a multiple of 64 bytes."""
    wide = b"".join(
        struct.pack("<Q", value) for value, known in ((0, size), (0, size), (start, start)) if known >= _WIDE
    )
    wide = struct.pack("<HH", 1, len(wide)) + wide if wide else b""
    padding = -(start + 30 + len(path) + len(wide) + 4) % ALIGNMENT
    extra = wide + struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    flags, later = (_SIZE_FOLLOWS if size else _EMPTY), (_WIDE if size >= _WIDE else 0)
    fields = struct.pack("<4s5H3I2H", b"PK\3\4", 0, flags, 0, 0, 0, 0, later, later, len(path), len(extra))
    return fields + path + extra


def make_descriptor(crc: int, size: int, start: int) -> bytes:
    """Return the CRC and size that follow the content of a record."""
    if not size:
        return b""
    return struct.pack("<4sI" + ("QQ" if start >= _WIDE or size >= _WIDE else "II"), b"PK\7\x08", crc, size, size)


def make_directory_entry(path: bytes, crc: int, size: int, start: int) -> bytes:
    """Return the entry of a record in the zip file's directory."""
    values = [size, size] * (size >= _WIDE) + [start] * (start >= _WIDE)
    extra = struct.pack(f"<HH{len(values)}Q", 1, 8 * len(values), *values) if values else b""
    short, flags = min(size, _WIDE), (_SIZE_FOLLOWS if size else _EMPTY)
    fields = struct.pack(
        "<4s6H3I5H2I",
        *(b"PK\1\2", 0, 0, flags, 0, 0, 0, crc, short, short, len(path), len(extra), 0, 0, 0, 0, min(start, _WIDE)),
    )
    return fields + path + extra


def make_tail(directory: list[bytes], name: str, content: bytes, start: int) -> bytes:
    """Return the last bytes of a file, from the header of its last record on.

    Args:
        directory: The directory's entries for the records before.
        name: Name of the last record.
        content: Content of the last record.
        start: Position of its header.
    """
    path, crc = f"{ROOT}/{name}".encode(), crc32(content)
    header = make_header(path, len(content), start)
    record = header + content + make_descriptor(crc, len(content), start)
    entries = [*directory, make_directory_entry(path, crc, len(content), start)]
    end = _make_end(len(entries), b"".join(entries), start + len(record))
    place = start, start + len(header), len(content)
    digest = xxh3_128(record + end + _make_comment(*place, _UNKNOWN)).hexdigest().encode()
    return record + end + _make_comment(*place, digest)


def _make_end(count: int, directory: bytes, start: int) -> bytes:
    """Return the zip file's directory and the records that end it, except its comment."""
    at = start + len(directory)
    wide = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, len(directory), start)
    place = struct.pack("<4sIQI", b"PK\6\7", 0, at, 1)
    short = min(count, 0xFFFF), min(count, 0xFFFF), min(len(directory), _WIDE), min(start, _WIDE)
    return directory + wide + place + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, *short, TAIL_BYTES)


def _make_comment(start: int, at: int, size: int, digest: bytes) -> bytes:
    """Return the comment: where the last record's header and content begin, and the digest from its header on.

    The header's length is less than 2**16, so one field holds both positions.
    """
    return _COMMENT.pack(_SIGNATURE, start << 16 | at - start, size, digest)


def read_comment(comment: bytes) -> tuple[int, int, int, bytes] | None:
    """Return the arguments of `_make_comment` from the last bytes of a file, or None if they are no such comment."""
    if len(comment) != TAIL_BYTES or not comment.startswith(_SIGNATURE):
        return None
    _, places, size, digest = _COMMENT.unpack(comment)
    start = places >> 16
    return start, start + (places & 0xFFFF), size, digest


def digest_tail(tail: bytes, start: int, at: int, size: int) -> bytes:
    """Return the digest that the comment of a file with these last bytes must have."""
    return xxh3_128(tail[:-TAIL_BYTES] + _make_comment(start, at, size, _UNKNOWN)).hexdigest().encode()


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
