"""Sources of weights in all supported formats, which are recognized by their content and read on demand."""

from __future__ import annotations

import io
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from ...common.messages import abbreviate, name_type
from ...common.remote_path import AnyPath, is_url
from ...common.temporary import temporary_folder
from ..checkpoint import (
    MANIFEST,
    CheckpointNotFoundError,
    OpenCheckpoint,
    Weights,
    check_files,
    extra_part,
    filesystem,
    is_checkpoint_file,
    model_part,
    read_frozen_note,
    read_whole_model,
    recover_interrupted,
)
from .download import check_digest, fetch, fetch_from_store, find_in_store
from .torch_files import TorchFile, View

Source = str | os.PathLike[str] | IO[bytes]

_STATE_KEYS = ("state_dict", "model_state_dict", "model")
_USUAL = ("model.safetensors.index.json", "model.safetensors", "pytorch_model.bin.index.json", "pytorch_model.bin")
_OTHERS = {b"GGUF": "GGUF", b"\x89HDF": "HDF5", b"\x93NUM": "numpy", b"\x1f\x8b": "gzip"}
_MAX_INDEX_BYTES = 32 * 2**20  # about 300,000 tensors
_ACCEPTED_SOURCES = (
    "Pass a Treadle checkpoint, a safetensors file, a file written by torch.save, or a folder with such a file"
)


@dataclass
class Opened:
    """Opened source of weights, whose tensors are read on demand.

    Attributes:
        place: The path or URL of the source, for errors.
        weights: The unread tensors by name.
        extras: Values of the state dict that are not tensors, by name, such as extra state of modules.
        file: The `TorchFile`, if the source is a single file of ``torch.save``.
        checkpoint: The Treadle checkpoint that contains the weights, if any.
        frozen: The digests, by name, of weights that a checkpoint omits because they were not trained.
    """

    place: str
    weights: dict[str, Any]
    extras: dict[str, Any] = field(default_factory=dict)
    file: TorchFile | None = None
    checkpoint: OpenCheckpoint | None = None
    frozen: dict[str, str] = field(default_factory=dict)


@contextmanager
def open_source(source: Source, sha256: str | None = None) -> Iterator[Opened]:
    """Return a context in which a source of weights is open; see `load_weights`.

    Downloads are deleted when the context ends. A file object is read from its position to its end.

    Raises:
        ValueError: If the source is missing, damaged or not supported, or if ``sha256`` is not its digest.
        TypeError: If ``source`` is neither a path nor a URL nor a binary file object.
        OSError: If the source cannot be downloaded.
    """
    if not isinstance(source, str | os.PathLike):
        if isinstance(source, io.TextIOBase) or not hasattr(source, "read"):
            raise TypeError(f"source={source!r:.100} must be a path, a URL or a binary file, not {name_type(source)}.")
        with tempfile.TemporaryDirectory(prefix="treadle-") as folder:
            with open(os.path.join(folder, type(source).__name__), "wb") as copy:
                shutil.copyfileobj(source, copy)
                if not copy.tell():
                    raise ValueError(f"source={source!r:.100} has no bytes after its position. Call seek(0) first.")
            opened_source = _open(Path(copy.name), sha256)
            opened_source.place = str(getattr(source, "name", source))
            yield opened_source
        return
    if not is_url(source):
        yield _open(Path(source), sha256)
        return
    stored = find_in_store(source)
    if stored is not None and (stored / MANIFEST).is_file():
        yield _open(stored, sha256)
        return
    with tempfile.TemporaryDirectory(prefix="treadle-") as folder:
        if stored is None:
            opened_source = _open(fetch(str(source), sha256, Path(folder)), None)
        else:
            opened_source = _open(fetch_from_store(stored, Path(folder)), sha256)
        opened_source.place = str(source)
        yield opened_source


def open_weights(checkpoint: str | os.PathLike[str]) -> Weights:
    """Return the weights of a checkpoint as unread tensors, by name. No code in a file is run.

    For a Treadle checkpoint on disk, only the sizes of the files are checked and not their digests.

    Args:
        checkpoint: A path, or a URL of an object store, of a safetensors file, a file of ``torch.save``, a
            ``.index.json`` that names several files, a folder that contains one of these, or a Treadle checkpoint. For
            an index in an object store, pass the URL of its folder.

    Raises:
        ValueError: If the checkpoint does not exist, is damaged or has an unsupported format or URL.
        TypeError: If ``checkpoint`` is neither a path nor a URL.
        ModuleNotFoundError: If the package for the scheme of the URL is not installed.
        OSError: If the object store reports an error.
    """
    if not (isinstance(checkpoint, str | os.PathLike) or is_url(checkpoint)):
        raise TypeError(f"checkpoint={checkpoint!r:.100} must be a path or a URL, not {name_type(checkpoint)}.")
    stored = find_in_store(checkpoint)
    if stored is None and is_url(checkpoint):
        raise ValueError(
            f"{checkpoint}: these weights are read on demand, so they must be on disk or in an object store. Download "
            "the file, and pass its path."
        )
    if stored is None:
        return _open(Path(checkpoint), None, digests=False).weights
    if (stored / MANIFEST).is_file():
        opened_source = _open(stored, None)
        _open_until_exit.append(opened_source)
        return opened_source.weights
    return _open(fetch_from_store(stored, temporary_folder(str(stored))), None).weights


_open_until_exit: list[Opened] = []


def _open(path: AnyPath, sha256: str | None, *, digests: bool = True) -> Opened:
    place = str(path)
    try:
        recover_interrupted(path)
        if path.is_dir():
            if sha256 is not None:
                raise ValueError("sha256= is the digest of a file, but this is a folder. Pass a file, or remove sha256")
            return _open_folder(path, digests)
        assert isinstance(path, Path)
        if not path.is_file():
            if not path.exists():
                raise CheckpointNotFoundError(f"{place}: it does not exist. {_ACCEPTED_SOURCES}.")
            raise ValueError(f"it is not a plain file. {_ACCEPTED_SOURCES}")
        if sha256 is not None:
            check_digest(path, sha256)
        if is_checkpoint_file(path):
            return _open_checkpoint(path, digests)
        with path.open("rb") as file:
            start = file.read(1)
        return Opened(place, *_open_index(path)) if start == b"{" else Opened(place, *_open_file(path))
    except CheckpointNotFoundError:
        raise
    except (ValueError, OSError, MemoryError, RecursionError) as error:
        text = str(error) or type(error).__name__
        is_complete = text.startswith((place, f"{path.parent}: {path.name} "))
        raise ValueError(text if is_complete else f"{place}: {text.rstrip('.')}.") from error


def _open_checkpoint(path: AnyPath, digests: bool) -> Opened:
    saved, extra = OpenCheckpoint(path), extra_part(0)
    if digests or not isinstance(path, Path):
        saved.verify()
    else:
        check_files(path, saved.manifest, digests=False)
    extras = saved.read_part(extra) if saved.has(extra) else {}
    model = saved.part(model_part(0))
    frozen = read_frozen_note(model.notes, path)
    return Opened(str(path), model.unread(), extras, checkpoint=saved, frozen=frozen)


def _open_folder(path: AnyPath, digests: bool) -> Opened:
    if (path / MANIFEST).is_file():
        return _open_checkpoint(path, digests)
    assert isinstance(path, Path)
    names = filesystem.list_names(path)
    if ".metadata" in names:
        raise ValueError(
            "it is a torch.distributed.checkpoint folder, whose .metadata is a pickle that can run code. If "
            "you trust it, convert it to one file with `python -m torch.distributed.checkpoint.format_utils "
            "dcp_to_torch FOLDER FILE` (Lightning: `python -m lightning.pytorch.utilities.consolidate_checkpoint`)"
        )
    if "zero_to_fp32.py" in names:
        raise ValueError("it is a DeepSpeed checkpoint. Convert it to one file with the zero_to_fp32.py in the folder")
    candidates = [name for name in _USUAL if name in names][:1]
    for ending in (".index.json", ".safetensors", ".bin", ".pt", ".pth", ".ckpt"):
        candidates = candidates or [name for name in names if name.endswith(ending)]
    if len(candidates) != 1:
        problem = (
            f"more than one weights file: {abbreviate(candidates)}"
            if candidates
            else f"no weights file (its files: {abbreviate(names)})"
            if names
            else "no files"
        )
        raise ValueError(f"it contains {problem}. {'Pass one of these files' if candidates else _ACCEPTED_SOURCES}")
    return _open(path / candidates[0], None, digests=digests)


def _open_index(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    # Hugging Face's cache contains only links. The content must not lead elsewhere, see below.
    document = filesystem.read_json(path.resolve(), _MAX_INDEX_BYTES)
    places = document.get("weight_map", document) if isinstance(document, dict) else None  # some are the map alone
    if not places or not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise ValueError(
            f"it is a JSON file without a valid 'weight_map', so it is not an index of weights. {_ACCEPTED_SOURCES}"
        )
    weights: dict[str, Any] = {}
    extras: dict[str, Any] = {}
    names_by_file: dict[str, set[str]] = {}
    for file in dict.fromkeys(places.values()):
        if file != os.path.basename(file) or file in ("", ".", "..") or "\\" in file or "\0" in file:
            raise ValueError(
                f"it lists {file!r:.80}, but an index must list only the names of files in its own folder. Correct the "
                "name"
            )
        if not (path.parent / file).is_file():
            lost = [name[:80] for name, place in places.items() if place == file]
            raise ValueError(
                f"it lists {file[:80]} for {abbreviate(lost)}, but this file is missing from the folder. Copy or "
                "download the file"
            )
        inside, extra, _ = _open_file(path.parent / file)
        names_by_file[file] = set(inside)
        weights |= {name: piece for name, piece in inside.items() if places.get(name) == file}
        extras |= extra
    lost = [name for name, file in places.items() if name not in names_by_file[file]]
    if lost:
        raise ValueError(
            f"it lists tensors that are not in the listed files: {abbreviate(lost)}. Copy or download the folder again"
        )
    return weights, extras


def _open_file(path: Path) -> tuple[dict[str, Any], dict[str, Any], TorchFile | None]:
    with path.open("rb") as stream:
        head = stream.read(512)
    # This check comes first, because the length of a safetensors header may begin with the byte that a pickle begins
    # with.
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= path.stat().st_size:
        return read_whole_model(path), {}, None
    if head[:4] == b"PK\x03\x04" or head[:1] == b"\x80":
        file = TorchFile(path)
        return (*read_state_dict(file), file)
    if head[257:262] == b"ustar":
        raise ValueError(
            f"{path} is a tar archive, the format of torch.save before 2016, whose pickles can run code. If you trust "
            "it, load it with torch.load(..., weights_only=False), and save the state dict again."
        )
    format_name = next((name for magic, name in _OTHERS.items() if head.startswith(magic)), None)
    if not head:
        raise ValueError(f"{path} is empty. Copy or download it again.")
    problem = f"is a {format_name} file" if format_name else "has an unknown format"
    raise ValueError(f"{path} {problem}. {_ACCEPTED_SOURCES}.")


def read_state_dict(file: TorchFile) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the unread tensors of the state dict in a file of ``torch.save``, and its other values, each by name.

    Raises:
        ValueError: If the file does not contain a valid state dict.
    """
    document = file.reader.container(file.document)
    if not isinstance(document, dict):
        raise ValueError(f"it contains {_name_kind(document)}, not a dict of tensors. Save model.state_dict()")
    key = next((key for key in _STATE_KEYS if isinstance(file.reader.container(document.get(key)), dict)), "")
    before = set(file.reader.dropped)
    state = file.reader.mapping(document[key] if key else document, key)
    weights = {str(name): file.piece(value) for name, value in state.items() if isinstance(value, View)}
    extras = {str(name): value for name, value in state.items() if not isinstance(value, View)}
    bad = {place: name for place, name in file.reader.dropped.items() if place not in before}
    if (bad or extras) and (key or weights):
        wrong = [f"{place} is {name}" for place, name in bad.items()]
        wrong += [f"{n} is {name_type(v)}" for n, v in extras.items() if not n.endswith("_extra_state")]
        if wrong:
            raise ValueError(
                f"it contains values that are not plain tensors: {abbreviate([w[:120] for w in wrong])}. Save only "
                "model.state_dict()"
            )
    if not weights and not key:
        raise ValueError(
            "it has no tensors at the top level, and no dict under the key "
            f"{', '.join(map(repr, _STATE_KEYS[:-1]))} or {_STATE_KEYS[-1]!r}. It {_describe_entries(document)}. Save "
            "model.state_dict()"
        )
    return weights, extras


def _name_kind(document: Any) -> str:
    return f"a {document.name}" if getattr(document, "name", None) else name_type(document)


def _describe_entries(document: dict[Any, Any]) -> str:
    objects = [f"{key} is a {value.name}" for key, value in document.items() if hasattr(value, "name")]
    text = f"contains {abbreviate([str(name)[:60] for name in document])}" if document else "is an empty dict"
    return f"{text} ({abbreviate(objects)}, which only the original program can create)" if objects else text
