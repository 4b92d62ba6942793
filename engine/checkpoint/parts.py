"""Files of a checkpoint: the parts, each of which stores one state, and the manifest that lists them with digests.

A part named ``state`` consists of ``state.json`` and, if it has tensors, ``state.safetensors``. A model is a flat dict
of tensors and needs no JSON: ``model.safetensors`` is a file that any safetensors reader can load. If tensors are
sharded, each process writes its shards to a file of its own, such as ``model-shard-00001.safetensors``; tensors that
are not sharded are in rank zero's file. A shard that several processes hold is written by one of them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from ...common.messages import name_type
from ...common.remote_path import AnyPath, RemotePath, as_path
from ...strategies.distributed import is_sharded, local, piece_of, split_tied
from ...strategies.processes import note_unfinished
from . import filesystem
from .filesystem import Files, TensorFile
from .json_codec import check_tensor, decode, encode
from .one_file import Records, is_checkpoint_file, list_checked, name_table, read_record, read_tail, take_manifest
from .one_file import check as check_records
from .safetensors_file import ALIASES, OFFSETS, SHAPES, FilePiece, Stored, add_aliases, open_tensors, read_mark

# -- manifest ------------------------------------------------------------------------------------------------------

FORMAT = 1
"""Version of the format, written into every manifest. `read_manifest` rejects a higher version."""

MANIFEST = "manifest.json"
"""File whose presence makes a directory a checkpoint."""

FOLDER = r"data-[0-9a-f]{16}"
"""Pattern of the name of the folder that contains a checkpoint's files in an object store."""

_MAX_BYTES = 64 * 2**20  # far above any real manifest; limits what is read of a malicious one
_COUNTS = ("step", "epoch", "samples", "world_size")
_DIGEST = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Manifest:
    """Metadata of a committed checkpoint.

    Attributes:
        step: Number of optimizer steps.
        epoch: Number of the epoch, from 0.
        samples: Number of samples seen over all processes; 0 if they are not counted.
        world_size: Number of processes that wrote the checkpoint.
        files: Size and digest by file name, each as ``{"bytes": ..., "xxh3_128": ...}``.
        info: Metadata that the caller of `commit` passed, including the four counts above.
        sequence: Number that orders checkpoints of the same step by commit.
        hooked: Entries of files that hooks wrote, by path, such as ``unet/config.json``.
        folder: The folder in the checkpoint that contains all these files; empty if they are next to the manifest.
        records: The records of a checkpoint that is one file, among which ``files`` are distributed; None for a
            directory.
        source: The content of the manifest's file, or of the end of a checkpoint that is one file (`read_source`);
            empty if it was not read from a file.
    """

    step: int
    epoch: int
    samples: int
    world_size: int
    files: dict[str, dict[str, Any]]
    info: dict[str, Any]
    format: int
    sequence: int
    hooked: dict[str, dict[str, Any]]
    folder: str
    records: Records | None
    source: bytes = field(default=b"", repr=False, compare=False)

    @cached_property
    def checked(self) -> Mapping[str, dict[str, Any]]:
        """Size and digest of all that `check_files` reads: files, or the records of a checkpoint that is one file."""
        return self.files | self.hooked if self.records is None else list_checked(self.records)

    @property
    def names(self) -> set[str]:
        """Paths of all listed files, relative to the checkpoint."""
        return {self.path_of(name) for name in (*self.files, *self.hooked)}

    def path_of(self, name: str) -> str:
        """Return the path of a file, relative to the checkpoint."""
        return f"{self.folder}/{name}" if self.folder else name

    @staticmethod
    def build(
        files: dict[str, dict[str, Any]],
        info: Mapping[str, Any],
        sequence: int,
        hooked: dict[str, dict[str, Any]] | None = None,
        folder: str = "",
        records: Records | None = None,
    ) -> Manifest:
        """Return the manifest for the arguments of `commit`. Its ``source`` is the content of the manifest's file.

        Counts that ``info`` omits get their defaults.

        Raises:
            TypeError: If ``info`` contains a tensor, an array or something that is not data.
            ValueError: If the manifest would be invalid.
        """
        counts = {"step": 0, "epoch": 0, "samples": 0, "world_size": 1}
        noted, tensors = encode({name: value for name, value in info.items() if name not in counts}, "info")
        if tensors:
            raise TypeError(
                f"{next(iter(tensors))} is a tensor or an array, but info must not contain any. Pass its .item() or "
                ".tolist(), or save it in a part."
            )
        document = {"format": FORMAT, **{name: info.get(name, count) for name, count in counts.items()}}
        document |= {"sequence": sequence, **({"folder": folder} if folder else {}), "files": files}
        document |= {"others": hooked} if hooked else {}
        document |= {} if records is None else {"records": vars(records)}
        document["info"] = noted
        # A manifest that `read_manifest` would reject must fail the save, not the resume.
        manifest = _parse(document)
        source = json.dumps(document, indent=1 if records is None else None, allow_nan=False).encode()
        return replace(manifest, source=source)


class CheckpointNotFoundError(FileNotFoundError, ValueError):
    """Error for a path at which there is nothing.

    It is a FileNotFoundError, which scripts catch to train from scratch, and a ValueError like all other errors about
    checkpoints.
    """


def read_manifest(path: AnyPath | str, name: str = MANIFEST) -> Manifest:
    """Read the manifest of a committed checkpoint.

    Raises:
        ValueError: If the path is not a checkpoint, or the manifest cannot be read, is damaged or has a newer format.
        OSError: If the store of a URL cannot be reached or rejects the request.
    """
    data = read_source(path, name)
    content = data if data.startswith(b"{") else take_manifest(data)
    document = filesystem.parse_json(as_path(path) / name, content)
    format_version = document.get("format") if isinstance(document, dict) else None
    if type(format_version) is int and format_version > FORMAT:
        raise ValueError(
            f"{path} has checkpoint format {format_version}, but this version of Treadle reads formats up to {FORMAT}. "
            "Upgrade Treadle."
        )
    try:
        return replace(_parse(document), source=data)
    except ValueError as error:
        reason = str(error).rstrip(".")
        raise ValueError(f"{path}: {name} is damaged: {reason}. {filesystem.RESTORE}") from error


def read_manifests(paths: Iterable[AnyPath]) -> tuple[list[tuple[Manifest, AnyPath]], list[str]]:
    """Return checkpoints with their manifests, latest last, and a message for each unreadable manifest."""
    checkpoints: list[tuple[Manifest, AnyPath]] = []
    problems = []
    for path in paths:
        try:
            checkpoints.append((read_manifest(path), path))
        except ValueError as error:
            problems.append(str(error))
    return sorted(checkpoints, key=lambda pair: (pair[0].step, pair[0].sequence, pair[1].name)), problems


def read_source(path: AnyPath | str, name: str = MANIFEST) -> bytes:
    """Return the unparsed content of a checkpoint's manifest.

    Raises:
        CheckpointNotFoundError: If the path does not exist.
        ValueError: If the path is not a checkpoint, or its manifest cannot be read from the disk.
        OSError: If the store of a URL cannot be reached or rejects the request.
    """
    path = as_path(path)
    if isinstance(path, RemotePath):
        try:
            return (path / name).read_bytes(_MAX_BYTES)
        except FileNotFoundError as error:
            kind = ValueError if path.files() else CheckpointNotFoundError
            raise kind(
                f"{path}: {name} is missing, so this is not a complete checkpoint. Pass the path of a complete "
                "checkpoint."
            ) from error
    if path.is_dir():
        return filesystem.read_bytes(path / name, _MAX_BYTES)
    if path.is_file():
        return read_tail(path, _MAX_BYTES)
    kind, problem = (ValueError, "is not a file") if path.exists() else (CheckpointNotFoundError, "does not exist")
    raise kind(f"{path} {problem}. Pass the path of a checkpoint: a file, or a directory with a {MANIFEST}.")


def is_checkpoint(path: AnyPath | str) -> bool:
    """Return whether a path or URL is a checkpoint, which may be damaged: a directory with a manifest, or a file."""
    path = as_path(path)
    if isinstance(path, RemotePath):
        return (path / MANIFEST).is_file()
    # `Path.is_file` of Python 3.11 raises a PermissionError in a folder that may not be searched.
    return os.path.isfile(path / MANIFEST) or is_checkpoint_file(path)


def verify(path: Path | str, digests: bool = True) -> Manifest:
    """Check that a checkpoint's files are those that were committed, and return its manifest.

    Without ``digests``, only sizes are compared.

    Raises:
        ValueError: If the path is not an intact checkpoint.
    """
    manifest = read_manifest(path)
    check_files(Path(path), manifest, digests)
    return manifest


def check_files(path: Path, manifest: Manifest, digests: bool = True, names: Iterable[str] | None = None) -> None:
    """Check the files of a checkpoint whose manifest was read; see `verify`.

    ``names`` are those of `Manifest.checked` to check. Default: all.
    """
    names = manifest.checked if names is None else names
    if manifest.records is not None:
        if digests:
            check_records(path, manifest.records, list(names), manifest.source)
        return
    for name in names:
        filesystem.check_file(
            path / manifest.folder, name, manifest.checked[name], digests, links=name in manifest.hooked
        )


def _parse(document: Any) -> Manifest:
    _require(isinstance(document, dict), "it is not an object")
    version = document.get("format")
    _require(
        type(version) is int and 1 <= version <= FORMAT,
        f"its format is {version!r:.40}, but must be a positive integer",
    )
    counts = {name: document.get(name) for name in (*_COUNTS, "sequence")}
    # `type`, because isinstance accepts True as an int.
    for name, value in counts.items():
        _require(type(value) is int and value >= 0, f"{name} is {value!r:.40}, but must be an integer of at least 0")
    files = document.get("files")
    _require(isinstance(files, dict) and bool(files or document.get("others")), "it lists no files")
    folder = document.get("folder", "")
    _require(
        isinstance(folder, str) and (not folder or re.fullmatch(FOLDER, folder) is not None),
        f"its folder {folder!r:.40} is not a valid folder name",
    )
    hooked = document.get("others", {})
    _require(isinstance(hooked, dict), "its entry 'others' is not an object")
    # A manifest is input from elsewhere: none of its names may lead out of the checkpoint.
    for name in files:
        _require(
            name != MANIFEST and bool(filesystem.FILE.fullmatch(name)),
            f"{name!r:.80} is not a valid checkpoint file name",
        )
    for name in hooked:
        _require(
            name not in files and name != MANIFEST and filesystem.is_inside(name),
            f"{name!r:.80} is not a valid file name",
        )
    for name, entry in (*files.items(), *hooked.items()):
        _require(isinstance(entry, dict), f"the entry of {name} is not an object")
        size, digest = entry.get("bytes"), entry.get(filesystem.DIGEST)
        _require(type(size) is int and size >= 0, f"the size of {name} is not an integer of at least 0")
        _require(type(digest) is str and bool(_DIGEST.fullmatch(digest)), f"{name} has no valid digest")
    records = Records.parse(document["records"]) if "records" in document else None
    info = decode(document.get("info"), {})
    _require(isinstance(info, dict), "it has no info")
    info = {name: counts[name] for name in _COUNTS} | info
    return Manifest(**counts, files=files, info=info, format=version, hooked=hooked, folder=folder, records=records)


def _require(condition: bool, rule: str) -> None:
    if not condition:
        raise ValueError(rule)


# -- parts ---------------------------------------------------------------------------------------------------------

STATE, HPARAMS, DATAMODULE_HPARAMS, CONFIG, ADDED = "state", "hparams", "datamodule_hparams", "config", "added"
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_SHARD = re.compile(r"(.+)-shard-\d{5,}")
_MODEL = re.compile(r"model(-\d+)?")
_MAX_JSON_BYTES = 512 * 2**20  # far above any real state; limits what is read of a malicious file


def rank_part(rank: int) -> str:
    """Return the name of the part with the state of one rank, such as ``rank-00003``."""
    return f"rank-{rank:05d}"


def model_part(number: int) -> str:
    """Return the name of the part with a model's tensors: ``model``, ``model-1``, ..."""
    return "model" if number == 0 else f"model-{number}"


def extra_part(number: int) -> str:
    """Return the name of the part for values in a model's state that are not tensors: ``extra-model``, ..."""
    return f"extra-{model_part(number)}"


def optimizer_part(number: int, rank: int = 0) -> str:
    """Return the name of the part with an optimizer's state: ``optimizer``, ``optimizer-1``, ...

    With ``DDP(zero=True)``, each rank saves the state of different parameters. Any ``rank`` but 0 is part of the name.
    """
    name = "optimizer" if number == 0 else f"optimizer-{number}"
    return f"{name}-rank-{rank:05d}" if rank else name


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
    """Return the tensors that `pack` got, sorted by name.

    safetensors returns them in an order that differs from call to call, and the order is seen in a checkpoint's bytes.
    """
    data, notes = packed
    return TensorFile(dict(sorted(load(data).items())), notes)


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
