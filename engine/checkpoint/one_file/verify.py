"""Check of a checkpoint that is one file: every byte is what was written, and both sides name the same weights.

A file that was made to deceive could show ``torch.load`` other weights than Treadle. For this check, the pickle for
other programs is scanned: nothing in it is imported or called, and nothing is loaded from it; see `pickle_reader`.
"""

import io
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from xxhash import xxh3_128

from ..filesystem import CODES, DIGEST, DTYPES, RESTORE, Entry
from . import pickle_reader
from .contents import ALIASES, CONSTANTS, DOCUMENT_RECORD, KINDS, WEIGHTS, name_table
from .pickle_reader import MAX_BYTES, Name, UnbuiltCall
from .zip_reader import MANIFEST_RECORD, Records, open_file, read_exactly, read_record, take_manifest
from .zip_writer import (
    ROOT,
    make_descriptor,
    make_directory_entry,
    make_header,
    make_tail,
)

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
            if name in CONSTANTS and entry[DIGEST] != xxh3_128(CONSTANTS[name]).hexdigest():
                raise ValueError(f"{path}: {name} is not what Treadle writes. {RESTORE}")
            if name == DOCUMENT_RECORD:
                _check_both_sides(path, records, document)


def _check_structure(path: Path, file: Any, records: Records, tail: bytes) -> None:
    """Check that the file has the listed records, and otherwise exactly what `zip_writer` writes between them.

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
