"""Manifest of a committed checkpoint, and the check of its files."""

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ...common.remote_path import AnyPath, RemotePath, as_path
from . import filesystem
from .json_codec import decode, encode
from .one_file import Records, is_checkpoint_file, list_checked, read_tail, take_manifest
from .one_file import check as check_records

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
        others: Entries of files that hooks wrote, by path, such as ``unet/config.json``.
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
    format: int = FORMAT
    sequence: int = 0
    others: dict[str, dict[str, Any]] = field(default_factory=dict)
    folder: str = ""
    records: Records | None = None
    source: bytes = field(default=b"", repr=False, compare=False)

    @cached_property
    def checked(self) -> Mapping[str, dict[str, Any]]:
        """Size and digest of all that `check_files` reads: files, or the records of a checkpoint that is one file."""
        return self.files | self.others if self.records is None else list_checked(self.records)

    @property
    def names(self) -> set[str]:
        """Paths of all listed files, relative to the checkpoint."""
        return {self.path_of(name) for name in (*self.files, *self.others)}

    def path_of(self, name: str) -> str:
        """Return the path of a file, relative to the checkpoint."""
        return f"{self.folder}/{name}" if self.folder else name

    @classmethod
    def build(
        cls,
        files: dict[str, dict[str, Any]],
        info: Mapping[str, Any],
        sequence: int,
        others: dict[str, dict[str, Any]] | None = None,
        folder: str = "",
        records: Records | None = None,
    ) -> "Manifest":
        """Return the manifest for the arguments of `commit`. Counts that ``info`` omits get their defaults."""
        info = {"step": 0, "epoch": 0, "samples": 0, "world_size": 1, **info}
        counts = {name: info[name] for name in _COUNTS}
        return cls(
            **counts, files=files, info=info, sequence=sequence, others=others or {}, folder=folder, records=records
        )

    def to_json(self) -> bytes:
        """Return the content of ``manifest.json``.

        Raises:
            TypeError: If ``info`` contains a tensor, an array or something that is not data.
            ValueError: If the manifest would be invalid.
        """
        noted = {name: value for name, value in self.info.items() if name not in _COUNTS}
        info, tensors = encode(noted, "info")
        if tensors:
            raise TypeError(
                f"{next(iter(tensors))} is a tensor or an array, but info must not contain any. Pass its .item() or "
                ".tolist(), or save it in a part."
            )
        counts = {name: getattr(self, name) for name in (*_COUNTS, "sequence")}
        folder = {"folder": self.folder} if self.folder else {}
        others = {"others": self.others} if self.others else {}
        records = {} if self.records is None else {"records": self.records.to_json()}
        document = {"format": self.format, **counts, **folder, "files": self.files, **others, **records, "info": info}
        _parse(document)
        return json.dumps(document, indent=None if records else 1, allow_nan=False).encode()


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
            path / manifest.folder, name, manifest.checked[name], digests, links=name in manifest.others
        )


def _parse(document: Any) -> Manifest:
    _require(isinstance(document, dict), "it is not an object")
    version = document.get("format")
    _require(
        type(version) is int and 1 <= version <= FORMAT,
        f"its format is {version!r:.40}, but must be a positive integer",
    )
    counts = {name: document.get(name) for name in (*_COUNTS, "sequence")}
    for name, value in counts.items():
        _require(type(value) is int and value >= 0, f"{name} is {value!r:.40}, but must be an integer of at least 0")
    files = document.get("files")
    _require(isinstance(files, dict) and bool(files or document.get("others")), "it lists no files")
    folder = document.get("folder", "")
    _require(
        isinstance(folder, str) and (not folder or re.fullmatch(FOLDER, folder) is not None),
        f"its folder {folder!r:.40} is not a valid folder name",
    )
    others = document.get("others", {})
    _require(isinstance(others, dict), "its entry 'others' is not an object")
    for name in files:
        _require(
            name != MANIFEST and bool(filesystem.FILE.fullmatch(name)),
            f"{name!r:.80} is not a valid checkpoint file name",
        )
    for name in others:
        _require(
            name not in files and name != MANIFEST and filesystem.is_inside(name),
            f"{name!r:.80} is not a valid file name",
        )
    for name, entry in (*files.items(), *others.items()):
        _require(isinstance(entry, dict), f"the entry of {name} is not an object")
        size, digest = entry.get("bytes"), entry.get(filesystem.DIGEST)
        _require(type(size) is int and size >= 0, f"the size of {name} is not an integer of at least 0")
        _require(type(digest) is str and bool(_DIGEST.fullmatch(digest)), f"{name} has no valid digest")
    records = Records.parse(document["records"]) if "records" in document else None
    info = decode(document.get("info"), {})
    _require(isinstance(info, dict), "it has no info")
    info = {name: counts[name] for name in _COUNTS} | info
    return Manifest(**counts, files=files, info=info, format=version, others=others, folder=folder, records=records)


def _require(condition: bool, rule: str) -> None:
    if not condition:
        raise ValueError(rule)
