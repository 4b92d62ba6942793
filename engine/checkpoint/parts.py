"""Parts of a checkpoint, each of which stores one state: encoding as files, writing, opening and reading.

A part named ``state`` consists of ``state.json`` and, if it has tensors, ``state.safetensors``. A model is a flat dict
of tensors and needs no JSON: ``model.safetensors`` is a file that any safetensors reader can load. If tensors are
sharded, each process writes its shards to a file of its own, such as ``model-shard-00001.safetensors``; tensors that
are not sharded are in rank zero's file. A shard that several processes hold is written by one of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from ...common.messages import name_type
from ...common.remote_path import AnyPath
from ...strategies.distributed import is_sharded, local, piece_of
from ...strategies.processes import note_unfinished
from ..parameter_names import split_tied
from . import filesystem
from .filesystem import Files, TensorFile
from .json_codec import check_tensor, decode, encode
from .manifest import Manifest
from .one_file import Records, name_table, read_record
from .safetensors_file import ALIASES, OFFSETS, SHAPES, FilePiece, Stored, add_aliases, open_tensors, read_mark

_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_SHARD = re.compile(r"(.+)-shard-\d{5,}")
_MODEL = re.compile(r"model(-\d+)?")
_MAX_JSON_BYTES = 512 * 2**20  # far above any real state; limits what is read of a malicious file


def encode_part(name: str, state: Any, rank: int = 0, notes: Mapping[str, str] | None = None) -> Files:
    """Return the content of the files that this process writes for a state, by file name. Tensors are not copied.

    Args:
        name: ``"model"`` (or ``"model-1"``, ...) for a flat dict of tensors; another name for a state that
            `json_codec.encode` accepts.
        state: The state to store. If several processes write one part, their states may differ only in their shards of
            tensors. Tied tensors are stored once.
        rank: The rank of this process. Rank zero writes everything that is not sharded. Default: 0.
        notes: Text by name for the headers of safetensors files. Default: none.

    Raises:
        TypeError: If the state contains something that cannot be stored, or a model is not a flat dict of tensors.
        ValueError: If a name is not valid or the state cannot be encoded.
    """
    if not _PART.fullmatch(name) or name == "manifest" or _SHARD.fullmatch(name):
        raise ValueError(
            f"the part name {name!r:.80} is not valid. A name must consist of letters, digits, '_', '-' and '.', and "
            "must not begin with '-' or '.'. The name 'manifest' and names with a suffix such as '-shard-00001' are "
            "reserved. Rename the part."
        )
    files: Files = {}
    header = {"format": "pt", **(notes or {})}
    flat = bool(_MODEL.fullmatch(name))
    if flat:
        tensors, aliases = _fold(name, state)
        header |= {ALIASES: json.dumps(aliases)} if aliases else {}
    else:
        document, tensors = encode(state)
        if rank == 0:
            files[f"{name}.json"] = _encode_json(name, document)
    for key, tensor in [*tensors.items()]:
        if is_sharded(tensor) and tensor.device_mesh.size() == 1:  # type: ignore[attr-defined]
            tensors[key] = local(tensor)  # complete, and readable by others
    pieces = {key: piece_of(tensor) for key, tensor in tensors.items() if is_sharded(tensor)}
    if pieces:
        shapes = {key: list(tensors[key].shape) for key in pieces}
        offsets = {key: {"saved_offsets": list(piece.offset)} for key, piece in pieces.items()}
        if rank == 0:  # torch's reader requires it for every tensor in the file
            offsets |= {key: {"saved_offsets": [0] * t.ndim} for key, t in tensors.items() if key not in pieces}
        header |= {OFFSETS: json.dumps(offsets), SHAPES: json.dumps(shapes)}
    mine = {key: tensor for key, tensor in tensors.items() if rank == 0 and key not in pieces}
    # A process may have no part of a tensor. Rank zero always records its shape.
    mine |= {key: p.local for key, p in pieces.items() if p.first_copy and (rank == 0 or p.local.numel())}
    if mine or (flat and rank == 0):
        files[f"{name}-shard-{rank:05d}.safetensors" if pieces else f"{name}.safetensors"] = TensorFile(mine, header)
    return files


def _encode_json(name: str, document: Any) -> bytes:
    text = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
    if len(text) > _MAX_JSON_BYTES:
        raise ValueError(
            f"part {name!r} has {len(text):,} bytes without its tensors, but at most {_MAX_JSON_BYTES:,} can be "
            "loaded. Store long lists of numbers as tensors or numpy arrays."
        )
    return text


def estimate_size(content: bytes | TensorFile) -> int:
    """Return the size of a file in bytes, without the header of a safetensors file."""
    return len(content) if isinstance(content, bytes) else sum(t.nbytes for t in content.tensors.values())


def write_files(folder: Path, files: Files) -> dict[str, filesystem.Entry]:
    """Write files into a directory, which is created if necessary; return their entries once all are fsynced.

    All files are written before the first is fsynced, so that the disk writes the other files while this process waits.
    """
    entries = {}
    if files:
        filesystem.make_staging_directory(folder)
        note_unfinished(folder)
    for name, content in files.items():
        entries[name] = write_file(folder / name, content)
    for name in files:
        filesystem.fsync(folder / name)
    return entries


def write_file(path: Path, content: bytes | TensorFile) -> filesystem.Entry:
    """Write one file of a checkpoint, and return its entry for a manifest."""
    if isinstance(content, bytes):
        return filesystem.write_bytes(path, content)
    return filesystem.write_tensors(path, content.tensors, content.notes)


def serialize(content: bytes | TensorFile) -> tuple[int, Iterable[filesystem.Piece]]:
    """Return the size of one file of a checkpoint in bytes, and its content in pieces."""
    if isinstance(content, bytes):
        return len(content), [content]
    return filesystem.serialize_tensors(content.tensors, content.notes)


def pack(content: TensorFile) -> tuple[bytes, dict[str, str]]:
    """Return small tensors as bytes, to send them; torch cannot pickle tensors of some dtypes, such as uint32."""
    return save({name: tensor.detach().cpu().contiguous() for name, tensor in content.tensors.items()}), content.notes


def unpack(packed: tuple[bytes, dict[str, str]]) -> TensorFile:
    """Return the tensors that `pack` got."""
    data, notes = packed
    return TensorFile(load(data), notes)


def has_part(files: Iterable[str], name: str) -> bool:
    """Return whether a part is among a checkpoint's files."""
    return bool(list_part_files(name, files))


def list_part_files(name: str, files: Iterable[str]) -> list[str]:
    """Return the sorted names of a part's files. Among shards, rank zero's is the first."""
    part_files = []
    for file in files:
        if name == _strip_shard(file.rpartition(".")[0]):
            part_files.append(file)
    return sorted(part_files)


def _strip_shard(stem: str) -> str:
    """Return the name of the part that a file belongs to, from its name without the extension."""
    shard = _SHARD.fullmatch(stem)
    return shard[1] if shard else stem


@dataclass(frozen=True)
class Part:
    """Part of a checkpoint with opened files: its document and headers are read, its tensors are not.

    Attributes:
        name: The name passed to `encode_part`.
        document: The content of the part's JSON file; None for a model.
        tensors: The tensors by name. In a model, tied tensors are listed under all their names.
        notes: The notes in the header of the first safetensors file; empty if there is none.
        owner: The object that keeps the files available while it exists, or None.
    """

    path: AnyPath
    name: str
    document: Any
    tensors: dict[str, Stored]
    notes: dict[str, str]
    owner: object = None

    def unread(self) -> Any:
        """Return the state with `Stored` tensors, whose values are read on demand."""
        return self._decode(self.tensors)

    def read(self) -> Any:
        """Return the state with its tensors in memory; tied tensors are one object again."""
        values = {id(stored): stored.read() for stored in self.tensors.values()}
        return self._decode({key: values[id(stored)] for key, stored in self.tensors.items()})

    def _decode(self, tensors: Mapping[str, Any]) -> Any:
        if _MODEL.fullmatch(self.name):
            return dict(tensors)
        with _report_damage(self.path, self.name):
            return decode(self.document, tensors)


@contextmanager
def _report_damage(path: AnyPath, name: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = str(error).rstrip(".") if isinstance(error, ValueError) else f"{type(error).__name__} {error}"
        raise ValueError(f"{path}: part {name!r} is damaged: {reason}. {filesystem.RESTORE}") from error


def open_files(path: AnyPath, manifest: Manifest, name: str, folder: Path, owner: object = None) -> Part:
    """Open one part of a checkpoint. Nothing in the files can cause an import or run code.

    ``folder`` contains the files; it is the file itself if the checkpoint is one. ``path`` is for error messages. The
    part keeps a reference to ``owner``, so that ``folder`` is not deleted while the part exists.
    """
    files, records = manifest.files, manifest.records
    names = list_part_files(name, files)
    flat = bool(_MODEL.fullmatch(name))
    if not names or (not flat and f"{name}.json" not in names):
        parts = sorted({_strip_shard(file.rpartition(".")[0]) for file in files})
        raise ValueError(
            f"{path} has no part {name!r}. It contains {', '.join(parts)}. Load one of these, or use a checkpoint that "
            f"has the part {name!r}."
        )
    document: Any = None
    with_tensors = [file for file in names if file.endswith(".safetensors")]
    if records is not None:
        stored, notes = _open_records(folder, records, with_tensors)
        if not flat:
            document = filesystem.parse_json(
                folder / f"{name}.json", read_record(folder, records, f"treadle/{name}.json", _MAX_JSON_BYTES)
            )
    else:
        for file in names:
            filesystem.check_file(folder, file, files[file], digests=False)
        stored, notes = open_tensors(folder / file for file in with_tensors)
        if not flat:
            document = filesystem.read_json(folder / f"{name}.json", _MAX_JSON_BYTES)
    if not flat:
        return Part(path, name, document, stored, notes, owner)
    with _report_damage(path, name):
        return Part(path, name, None, add_aliases(stored, notes), notes, owner)


def _open_records(path: Path, records: Records, files: list[str]) -> tuple[dict[str, Stored], dict[str, str]]:
    """Open the tensors of a part in a checkpoint that is one file, and return them with the part's notes."""
    tensors: dict[str, Stored] = {}
    notes: dict[str, str] = {}
    with path.open("rb") as stream:
        mark = read_mark(stream.fileno())
    for file in files:
        table = filesystem.parse_json(path / file, read_record(path, records, name_table(file), _MAX_JSON_BYTES))
        with _report_damage(path, file):
            notes = table["notes"]
            for name, (code, shape, key) in table["tensors"].items():
                entry, dtype, size = records.entries[f"data/{key}"], filesystem.DTYPES[code], torch.Size(shape)
                if entry["bytes"] != size.numel() * dtype.itemsize:
                    raise ValueError(f"tensor {name!r} does not have the size of its record")
                tensors[name] = Stored(name, size, dtype)
                tensors[name].add(FilePiece(path, mark, dtype, size, entry["at"], entry["bytes"]), [0] * len(shape))
    return tensors, notes


def _fold(part: str, state: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return a model's tensors, each tied tensor only once, and the other names of tied tensors."""
    if not isinstance(state, Mapping):
        raise TypeError(
            f"part {part!r} is {name_type(state)}, but must be a flat dict of tensors. Pass model.state_dict()."
        )
    for name, tensor in state.items():
        if type(name) is not str or name == "__metadata__":
            raise ValueError(
                f"part {part!r} contains the tensor name {name!r}, but a name must be a str other than '__metadata__'. "
                "Rename the tensor."
            )
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"{part}.{name} is {name_type(tensor)}, but part {part!r} must contain only tensors. Store the value "
                "in another part."
            )
        check_tensor(tensor, f"{part}.{name}")
    return split_tied(state)
