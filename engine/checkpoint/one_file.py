"""Checkpoint that is one file, in the zip format of ``torch.save``: its writer, its reader and the check of every byte.

The records, in this order, all in the folder ``checkpoint/`` of the zip file:

===========================  ========================================================================================
``treadle/format``           makes a truncated file recognizable
``data.pkl``                 a dict in Lightning's layout, for ``torch.load`` and other programs. Treadle never loads it
``.format_version``, ...     what torch's readers expect (`CONSTANTS`)
``data/0``, ``data/1``, ...  the bytes of each tensor, stored once although both sides name it
``treadle/model.tensors``    for each file of tensors that a directory would have (`parts`), its tensors: dtype, shape
                             and the number of the record in ``data``; and the notes of the file
``treadle/state.json``, ...  the JSON files that a directory would have
``treadle/manifest.json``    the manifest, with the position and digest of every record above
===========================  ========================================================================================

A file that was made to deceive could show ``torch.load`` other weights than Treadle. For the check, the pickle for
other programs is scanned: nothing in it is imported or called, and nothing is loaded from it; see `pickle_reader`.

All records are stored, not compressed, and each begins at a multiple of 64 bytes. The layout equals that of torch's own
writer byte for byte where a reader depends on it, such as torch's option ``config.load.calculate_storage_offsets``. The
records' CRC-32 are correct, because ``zipfile`` and ``unzip`` check them. zlib-ng computes them at 20 GiB/s where the
zlib of Python takes a quarter of the time of a save.

Source: https://pkware.cachefly.net/webdocs/casestudies/APPNOTE.TXT (the zip format)
"""

import io
import json
import os
import pickle
import re
import struct
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from xxhash import xxh3_128
from zlib_ng.zlib_ng import crc32

from ...strategies.distributed import make_view_key
from .. import pickle_reader
from ..pickle_reader import MAX_BYTES, Name, UnbuiltCall
from . import filesystem
from .filesystem import CODES, DIGEST, DTYPES, RESTORE, Entry, Files, Piece, TensorFile, split_tensor
from .safetensors_file import ALIASES

# -- zip format ----------------------------------------------------------------------------------------------------

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
    values = [0, 0] * (size >= _WIDE) + [start] * (start >= _WIDE)
    wide = struct.pack(f"<HH{len(values)}Q", 1, 8 * len(values), *values) if values else b""
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

    @classmethod
    def parse(cls, document: Any) -> "Records":
        """Return the records for a manifest's entry, which contains their attributes.

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


# -- content -------------------------------------------------------------------------------------------------------

DOCUMENT = "document.safetensors"
"""Name among a checkpoint's files for the tensors that only the dict for other programs contains."""

WEIGHTS = "model.safetensors"
"""Name among a checkpoint's files for the weights."""

DOCUMENT_RECORD = "data.pkl"
"""Record with the dict for other programs."""

CONSTANTS = {
    FIRST: b"1",
    ".format_version": b"1",
    ".storage_alignment": str(ALIGNMENT).encode(),
    "byteorder": b"little",
    "version": b"3\n",
    ".data/serialization_id": b"0" * 40,
}
"""Content of the records that are the same in every file; the last two come after the tensors, as in torch's files."""

KINDS: dict[torch.dtype, type] = {
    **{torch.float64: torch.DoubleStorage, torch.float32: torch.FloatStorage, torch.float16: torch.HalfStorage},
    **{torch.bfloat16: torch.BFloat16Storage, torch.int64: torch.LongStorage, torch.int32: torch.IntStorage},
    **{torch.int16: torch.ShortStorage, torch.int8: torch.CharStorage, torch.uint8: torch.ByteStorage},
    **{torch.bool: torch.BoolStorage, torch.complex64: torch.ComplexFloatStorage},
    torch.complex128: torch.ComplexDoubleStorage,
}
"""Classes by which a pickle of torch names the dtype of a storage. Newer dtypes have none."""


@dataclass(frozen=True)
class _Storage:
    """Record of a tensor's bytes, as a pickle names it."""

    key: str
    kind: type
    count: int


@dataclass(frozen=True)
class Layout:
    """Assignment of tensors to records; see `lay_out`.

    Attributes:
        document: The content of ``data.pkl``.
        places: For each record of ``data``, the file and the name of the tensor that it contains.
        keys: For each file of tensors, the number of the record of each of its tensors, by name.
    """

    document: bytes
    places: list[tuple[str, str]]
    keys: dict[str, dict[str, str]]


def lay_out(files: Files, document: dict[str, Any]) -> Layout:
    """Assign the tensors of a checkpoint's files and of the dict for other programs to records.

    Its ``state_dict`` gets the weights of ``files``, because a model may return new tensors from each call of
    ``state_dict``. Other tensors of ``document`` that are the same memory as one of ``files`` share its record, and the
    rest are added to ``files`` as a further file, `DOCUMENT`. Copies of the tensors may then be written in their place.

    Args:
        files: The checkpoint's files, on which this process alone has all tensors.
        document: The dict for other programs, of types that ``torch.load(weights_only=True)`` reads.
    """
    keys: dict[tuple[Any, ...], str] = {}
    places: list[tuple[str, str]] = []
    by_file: dict[str, dict[str, str]] = {}

    def find(tensor: Tensor, file: str, name: str) -> str:
        view = make_view_key(tensor) if tensor.numel() else (tensor.dtype,)
        if view not in keys:
            keys[view] = str(len(places))
            places.append((file, name))
        return keys[view]

    for file, content in files.items():
        if not isinstance(content, bytes):
            by_file[file] = {name: find(tensor, file, name) for name, tensor in content.tensors.items()}
    extra: dict[str, Tensor] = {}

    def find_extra(tensor: Tensor) -> str:
        number, name = len(places), str(len(places))
        key = find(tensor, DOCUMENT, name)
        if len(places) > number:
            extra[name] = tensor
        return key

    stream = io.BytesIO()
    _Pickler(stream, find_extra).dump(document | {"state_dict": _take_weights(document["state_dict"], files)})
    if extra:
        files[DOCUMENT] = TensorFile(extra, {})
        by_file[DOCUMENT] = {name: name for name in extra}
    return Layout(stream.getvalue(), places, by_file)


def _take_weights(state: dict[str, Any], files: Files) -> dict[str, Any]:
    """Return a state dict for other programs whose tensors are exactly the weights that a checkpoint contains."""
    model = files.get(WEIGHTS)
    if not isinstance(model, TensorFile):  # a hook has removed them
        return state
    weights = dict(model.tensors)
    weights |= {alias: weights[name] for alias, name in json.loads(model.notes.get(ALIASES, "{}")).items()}
    kept = {name: value for name, value in state.items() if name in weights or not isinstance(value, Tensor)}
    return {**kept, **weights}


class _Pickler(pickle.Pickler):
    """Pickler that names each tensor's record in place of its bytes, as torch.save does."""

    def __init__(self, stream: io.BytesIO, find: Any) -> None:
        # The protocol that torch.save uses by default.
        super().__init__(stream, protocol=2)
        self._find = find

    def reducer_override(self, obj: Any) -> Any:
        """Reduce a tensor to a contiguous view of its record."""
        if not isinstance(obj, Tensor):
            return NotImplemented
        tensor = obj.detach()
        kind = KINDS.get(tensor.dtype, torch.UntypedStorage)
        count = tensor.numel() if tensor.dtype in KINDS else tensor.nbytes
        storage = _Storage(self._find(tensor), kind, count)
        shape = tuple(tensor.shape)
        view: tuple[Any, ...] = (storage, 0, shape, torch.empty(shape, device="meta").stride(), False, OrderedDict())
        if tensor.dtype in KINDS:
            return torch._utils._rebuild_tensor_v2, view
        # torch.save, too, names the dtype itself where no storage class does, such as for float8.
        return torch._utils._rebuild_tensor_v3, (*view, tensor.dtype, None)

    def persistent_id(self, obj: Any) -> Any:
        """Return torch's name of a storage; None for any other object."""
        if isinstance(obj, _Storage):
            return ("storage", obj.kind, obj.key, "cpu", obj.count)
        return None


def write(path: Path, layout: Layout, files: Files, make_manifest: Any) -> None:
    """Write a checkpoint to a new file, without an fsync.

    Args:
        path: The path of the file.
        layout: The assignment of its tensors to records.
        files: The checkpoint's files; their tensors may be copies of those that the layout was made for. Files that
            it does not know come from other processes.
        make_manifest: Function from the entries of the files, and from the records, to the content of the manifest.
    """
    places, keys = list(layout.places), dict(layout.keys)
    for file, content in files.items():
        if not isinstance(content, bytes) and file not in keys:
            keys[file] = {name: str(len(places) + number) for number, name in enumerate(content.tensors)}
            places += [(file, name) for name in content.tensors]

    def write_records(stream: BinaryIO) -> None:
        writer = ZipWriter(stream)
        first, *others = CONSTANTS.items()
        for name, text in (first, (DOCUMENT_RECORD, layout.document), *others[:-2]):
            writer.add(name, len(text), [text])
        for key, (file, name) in enumerate(places):
            content = files[file]
            assert isinstance(content, TensorFile)
            tensor = content.tensors[name]
            writer.add(f"data/{key}", tensor.nbytes, split_tensor(tensor))
        for name, text in others[-2:]:
            writer.add(name, len(text), [text])
        entries = {file: _add_file(writer, file, content, keys) for file, content in files.items()}
        writer.close(MANIFEST_RECORD, make_manifest(entries, Records(writer.records, writer.gaps, writer.end)))

    filesystem.write_stream(path, write_records)


def _add_file(writer: ZipWriter, file: str, content: Any, keys: dict[str, dict[str, str]]) -> Entry:
    """Add the record of one file, and return the file's entry for the manifest."""
    if isinstance(content, bytes):
        record = writer.add(f"treadle/{file}", len(content), [content])
        return {"bytes": record["bytes"], DIGEST: record[DIGEST]}
    tensors = {name: [CODES[t.dtype], list(t.shape), keys[file][name]] for name, t in content.tensors.items()}
    text = json.dumps({"notes": content.notes, "tensors": tensors}, separators=(",", ":")).encode()
    record = writer.add(name_table(file), len(text), [text])
    # The digest covers the tensors' bytes, too, which are in records of their own.
    data = [writer.records[f"data/{key}"] for key in keys[file].values()]
    digest = xxh3_128("".join(entry[DIGEST] for entry in (record, *data)).encode()).hexdigest()
    return {"bytes": record["bytes"] + sum(entry["bytes"] for entry in data), DIGEST: digest}


def name_table(file: str) -> str:
    """Return the name of the record that lists the tensors of a file, such as ``treadle/model.tensors``."""
    return f"treadle/{file.removesuffix('.safetensors')}.tensors"


_PIECE = 2**22  # bytes
_NAMES = re.compile(r"treadle/[\w.-]+$|data/\d+$")
"""Names of the other records. torch takes a file with some further ones for a TorchScript module."""
_DTYPES = {f"{kind.__module__}.{kind.__name__}": dtype for dtype, kind in KINDS.items()}


STRUCTURE = "zip structure"
"""Name under which `list_checked` lists all bytes between the records."""


def list_checked(records: Records) -> Mapping[str, Entry]:
    """Return an entry with its size in ``bytes`` for each part of the file that `check` reads, by name."""
    between = records.end - sum(entry["bytes"] for entry in records.entries.values())
    return {**records.entries, STRUCTURE: {"bytes": between}}


def check(path: Path, records: Records, names: list[str], tail: bytes) -> None:
    """Check the digests of records, and of the bytes between all records for the name `STRUCTURE`.

    ``tail`` is the result of `read_tail`.

    Raises:
        ValueError: If one differs or cannot be read.
    """
    with open_file(path) as file:
        for name in names:
            if name == STRUCTURE:
                _check_structure(path, file, records, tail)
                continue
            entry = records.entries[name]
            document = bytearray() if name == DOCUMENT_RECORD and entry["bytes"] <= MAX_BYTES else None
            if _digest(file, entry["at"], entry["bytes"], document) != entry[DIGEST]:
                raise ValueError(f"{path}: {name} is not what was written (its digest differs). {RESTORE}")
            # The manifest of a file that was made to deceive may list the digest of any content.
            if name in CONSTANTS and entry[DIGEST] != xxh3_128(CONSTANTS[name]).hexdigest():
                raise ValueError(f"{path}: {name} is not what Treadle writes. {RESTORE}")
            if name == DOCUMENT_RECORD:
                _check_both_sides(path, records, document)


def _check_structure(path: Path, file: Any, records: Records, tail: bytes) -> None:
    """Check that the file has the listed records, and otherwise exactly what `ZipWriter` writes between them.

    So torch finds the same records at the same places, also in a file that was made to deceive.
    """
    unknown = [name for name in records.entries if name not in (*CONSTANTS, DOCUMENT_RECORD) and not _NAMES.match(name)]
    is_written = not unknown and {*CONSTANTS, DOCUMENT_RECORD} <= records.entries.keys()
    digest, directory = xxh3_128(), list[bytes]()
    before, start, size, position = b"", 0, 0, 0  # name, header, size and end of the record before
    places = [(name, entry["at"], entry["bytes"]) for name, entry in records.entries.items()]
    for name, at, length in (*places, ("", records.end, 0)):
        file.seek(position)
        gap = read_exactly(file, at - position)
        digest.update(gap)
        crc = int.from_bytes(gap[4:8], "little") if size else 0
        if before:
            directory.append(make_directory_entry(before, crc, size, start))
        between = make_descriptor(crc, size, start)
        before, start, size = f"{ROOT}/{name}".encode(), position + len(between), length
        between += make_header(before, size, start) if name else b""
        is_written = is_written and gap == between
        position = at + length
    is_written = is_written and tail == make_tail(directory, MANIFEST_RECORD, take_manifest(tail), records.end)
    if not is_written or digest.hexdigest() != records.gaps:
        raise ValueError(f"{path}: the zip structure between its records is damaged. {RESTORE}")


def _digest(file: Any, at: int, size: int, kept: bytearray | None) -> str:
    """Return the digest of a part of a file, whose content is appended to ``kept``."""
    digest, left = xxh3_128(), size
    file.seek(at)
    while left and (piece := file.read(min(left, _PIECE))):
        digest.update(piece)
        left -= len(piece)
        if kept is not None:
            kept += piece
    return digest.hexdigest()


def _check_both_sides(path: Path, records: Records, document: bytearray | None) -> None:
    table = name_table(WEIGHTS)
    if table not in records.entries:  # a hook has removed the model
        return
    try:
        if document is None:
            raise ValueError(f"it is larger than {MAX_BYTES:,} bytes")
        difference = explain_difference(document, json.loads(read_record(path, records, table, MAX_BYTES)))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        difference = str(error) if isinstance(error, ValueError) else f"{type(error).__name__} {error}"
    if difference:
        raise ValueError(
            f"{path}: {DOCUMENT_RECORD}, which other programs read, does not agree with what Treadle reads: "
            f"{difference.rstrip('.')}. Do not use the file; get the checkpoint from another source."
        )


def explain_difference(document: bytes | bytearray, table: dict[str, Any]) -> str:
    """Return how the weights of the dict for other programs differ from those of Treadle's records; "" if they do not.

    Args:
        document: The record ``data.pkl``.
        table: The content of the record ``treadle/model.tensors``.

    Raises:
        ValueError: If the pickle is damaged or harmful.
    """
    content = pickle_reader.read(io.BytesIO(document))
    state = content.get("state_dict") if isinstance(content, dict) else None
    state = state.pairs if isinstance(state, UnbuiltCall) else state
    if not isinstance(state, dict):
        return "it has no state_dict"
    found = {name: place for name, value in state.items() if (place := _read_place(value)) is not None}
    wanted = {name: (DTYPES[code], tuple(shape), key) for name, (code, shape, key) in table["tensors"].items()}
    wanted |= {alias: wanted[name] for alias, name in json.loads(table["notes"].get(ALIASES, "{}")).items()}
    if found == wanted:
        return ""
    names = sorted({*found, *wanted}, key=str)
    return f"they name other values for {next(str(n) for n in names if found.get(n) != wanted.get(n)):.80}"


def _read_place(value: Any) -> tuple[torch.dtype | None, Any, Any] | None:
    """Return dtype, shape and record of a tensor in the scanned pickle; None if it is not a tensor."""
    if not isinstance(value, UnbuiltCall) or not value.name.startswith("torch."):
        return None
    storage, offset, shape, stride, *rest = value.args if len(value.args) >= 6 else (None,) * 6
    named = storage.args[0] if isinstance(storage, UnbuiltCall) and storage.name == "persistent" else ()
    if offset != 0 or not isinstance(named, tuple) or len(named) != 5 or not isinstance(named[1], Name):
        return None, None, None
    dtype = _DTYPES.get(named[1].path)
    if dtype is None and len(rest) > 2 and isinstance(rest[2], Name):
        dtype = next((known for known in CODES if str(known) == rest[2].path), None)
    is_whole = isinstance(shape, tuple) and stride == torch.empty(shape, device="meta").stride()
    return dtype, shape if is_whole else None, named[2]
