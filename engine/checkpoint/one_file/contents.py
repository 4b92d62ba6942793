"""Content of a checkpoint that is one file: its records, the tensors that they share, and the check of every byte.

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
"""

import io
import json
import pickle
import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from xxhash import xxh3_128

from ...parameter_names import make_view_key
from .. import filesystem
from ..filesystem import CODES, DIGEST, DTYPES, RESTORE, Entry, Files, TensorFile, split_tensor
from ..safetensors_file import ALIASES
from . import pickle_reader
from .pickle_reader import MAX_BYTES, Name, UnbuiltCall
from .zip_format import (
    ALIGNMENT,
    FIRST,
    MANIFEST_RECORD,
    ROOT,
    Records,
    ZipWriter,
    make_descriptor,
    make_directory_entry,
    make_header,
    make_tail,
    open_file,
    read_exactly,
    read_record,
    take_manifest,
)

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
        records = Records(writer.records, writer.gaps, writer.end)
        writer.close(MANIFEST_RECORD, make_manifest(entries, records))

    filesystem.write_stream(path, write_records)


def _add_file(writer: ZipWriter, file: str, content: Any, keys: dict[str, dict[str, str]]) -> Entry:
    """Add the record of one file, and return the file's entry for the manifest."""
    if isinstance(content, bytes):
        record = writer.add(f"treadle/{file}", len(content), [content])
        return {"bytes": record["bytes"], DIGEST: record[DIGEST]}
    tensors = {name: [CODES[t.dtype], list(t.shape), keys[file][name]] for name, t in content.tensors.items()}
    text = json.dumps({"notes": content.notes, "tensors": tensors}, separators=(",", ":")).encode()
    record = writer.add(name_table(file), len(text), [text])
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
