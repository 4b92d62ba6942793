"""Files of predictions: `PredictionWriter` writes them, and `read_predictions` reads them."""

from __future__ import annotations

import dataclasses
import glob
import heapq
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..common.messages import announce, warn
from ..common.mirror import flush, local_folder
from ..common.remote_path import AnyPath, RemotePath, as_path
from ..common.validation import check_int, check_path
from ..engine import move_data_to_device
from ..engine.checkpoint import decode, encode, filesystem, read_safetensors
from .prediction_writer import BasePredictionWriter, get_loaders

if TYPE_CHECKING:
    from ..trainer import TaskModule, Trainer

_INDEX = "predictions.json"  # written last: a folder without it is incomplete
_NOTE = "predictions"
_MAX_INDEX_BYTES = 64 * 2**20
_MEBIBYTE = 2**20
_MAX_BATCHES = 10_000  # per file: limits predictions without tensors, such as text, too


class PredictionWriter(BasePredictionWriter):
    """Callback that writes predictions to files; `read_predictions` reads them in the order of the dataloader.

    Each rank writes its own batches to safetensors files. Pass ``return_predictions=False`` to ``Trainer.predict``,
    which otherwise also keeps all predictions in memory. A prediction may be a dense tensor, a numeric numpy array, a
    number, text, or a dict, list, tuple or dataclass of these. Dataclasses are read back as dicts, and named tuples as
    tuples.

    Args:
        dirpath: Folder of the files, or its URL. If it is not empty, a suffix such as ``-v1`` is appended to its name.
            Default: ``predictions`` in the Trainer's ``default_root_dir``.
        shard_mib: Size in MiB at which the tensors that a rank has collected for a dataloader are written to a file.
            Default: 64.

    Attributes:
        folder: Folder of the latest predictions, or None.

    Raises:
        ValueError, TypeError: If an argument is invalid or, in ``predict``, a prediction cannot be stored.
        OSError: In ``predict``, if a file cannot be written.

    Examples:
        >>> import tempfile
        >>> import treadle as tl
        >>> from treadle.callbacks import PredictionWriter
        >>> from treadle.compat.demos.boring_classes import BoringModel
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     writer = PredictionWriter(f"{folder}/predictions")
        ...     trainer = tl.Trainer(
        ...         limit_predict_batches=3, accelerator="cpu", devices=1, barebones=True, callbacks=writer
        ...     )
        ...     trainer.predict(BoringModel(), return_predictions=False)
        ...     [tuple(prediction.shape) for prediction in tl.read_predictions(writer.folder)]
        [(1, 2), (1, 2), (1, 2)]
    """

    def __init__(self, dirpath: str | Path | None = None, shard_mib: int = 64) -> None:
        super().__init__("batch")
        self.dirpath = None if dirpath is None else as_path(check_path("dirpath", dirpath))
        self.shard_bytes = check_int("shard_mib", shard_mib, 1) * _MEBIBYTE
        self.folder: AnyPath | None = None
        self._shards: list[_Shards] = []  # of each dataloader

    def on_predict_start(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Choose the folder."""
        super().on_predict_start(trainer, pl_module)
        wanted = self.dirpath or as_path(trainer.default_root_dir) / "predictions"
        chosen = _make_free_folder(wanted) if trainer.is_global_zero else None
        self.folder = folder = trainer.accelerator.world.broadcast(chosen)
        stems = (f"loader{loader}-rank{trainer.global_rank:05}" for loader in range(len(get_loaders(trainer))))
        self._shards = [_Shards(local_folder(folder), stem, self.shard_bytes) for stem in stems]

    def write_on_batch_end(
        self,
        trainer: Trainer,
        pl_module: TaskModule,
        prediction: Any,
        batch_indices: Sequence[Any] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Collect the predictions of one batch. Write a file once enough predictions are collected.

        Args:
            trainer: The Trainer.
            pl_module: The task.
            prediction: The result of ``predict_step``.
            batch_indices: Indices of the batch's samples in the dataset, or None.
            batch: The batch.
            batch_idx: Index of the batch on this process.
            dataloader_idx: Index of the dataloader.
        """
        if prediction is not None:
            # Each round of batches is dealt in rank order.
            number = batch_idx * trainer.world_size + trainer.global_rank
            self._shards[dataloader_idx].add(number, batch_indices, prediction)

    def on_predict_end(self, trainer: Trainer, pl_module: TaskModule) -> None:
        """Write the remaining batches and the index of all files."""
        for shards in self._shards:
            shards.flush()
        assert self.folder is not None
        flush(self.folder)
        every = trainer.accelerator.world.gather_objects([(shards.count, shards.files) for shards in self._shards])
        if trainer.is_global_zero:
            _write_index(local_folder(self.folder), every)
            flush(self.folder)
        trainer.accelerator.world.barrier()  # so that a reader on any rank finds the index
        if any(count for written in every for count, _ in written):
            announce(f"predictions saved in {self.folder}; treadle.read_predictions(path) reads them in order")
        else:
            self.folder = None

    def teardown(self, trainer: Trainer, pl_module: TaskModule, stage: str) -> None:
        """Discard batches that have not been written."""
        super().teardown(trainer, pl_module, stage)
        self._shards = []


class _Shards:
    """Writer of one rank's prediction files for one dataloader."""

    def __init__(self, folder: Path, stem: str, limit: int) -> None:
        self.files: list[str] = []
        self.count = 0
        self._folder, self._stem, self._limit = folder, stem, limit
        self._documents: list[Any] = []
        self._tensors: dict[str, Tensor] = {}
        self._bytes = 0

    def add(self, number: int, indices: Sequence[Any] | None, prediction: Any) -> None:
        batch = {"prediction": _to_plain(move_data_to_device(prediction, "cpu")), "indices": _to_plain(indices)}
        document, tensors = encode(batch, str(number))
        self._documents.append([number, document])
        # The loop may reuse the memory.
        self._tensors |= {name: tensor.clone() for name, tensor in tensors.items()}
        self.count += 1
        self._bytes += sum(tensor.nbytes for tensor in tensors.values())
        if self._bytes >= self._limit or len(self._documents) >= _MAX_BATCHES:
            self.flush()

    def flush(self) -> None:
        if not self._documents:
            return
        name = f"{self._stem}-{len(self.files):05}.safetensors"
        filesystem.write_tensors(self._folder / name, self._tensors, {_NOTE: json.dumps(self._documents)})
        self.files.append(name)
        self._documents, self._tensors, self._bytes = [], {}, 0


def _to_plain(value: Any) -> Any:
    """Return a value with nested mappings and dataclasses converted to dicts."""
    if isinstance(value, Mapping):  # any mapping, such as the outputs of transformers' models
        return {key: _to_plain(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [*map(_to_plain, value)] if isinstance(value, list) else tuple(map(_to_plain, value))
    return value


def _make_free_folder(wanted: AnyPath) -> AnyPath:
    """Return an empty or new folder. If ``wanted`` is in use, the folder's name gets a version suffix."""
    if isinstance(wanted, RemotePath):
        names = (f"{wanted.name}-v{version}" if version else wanted.name for version in itertools.count())
        return next(place for name in names if not (place := wanted.parent / name).exists())
    wanted.parent.mkdir(parents=True, exist_ok=True)
    for version in itertools.count():
        folder = wanted.with_name(f"{wanted.name}-v{version}") if version else wanted
        if folder.is_dir() and not any(folder.iterdir()):
            return folder
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder
    raise AssertionError


def _write_index(folder: Path, every: list[list[tuple[int, list[str]]]]) -> None:
    """Write the index of all ranks' batches and files, or remove the folder if there are none."""
    loaders = {}
    for loader, written in enumerate(zip(*every, strict=True)):
        if batches := sum(count for count, _ in written):
            loaders[loader] = {"batches": batches, "ranks": [files for _, files in written]}
    if not loaders:
        folder.rmdir()
        return
    part = folder / f".{_INDEX}.part"
    filesystem.write_bytes(part, json.dumps({"format": 1, "loaders": loaders}).encode())
    filesystem.replace(part, folder / _INDEX)


def read_predictions(path: str | Path, dataloader_idx: int = 0, *, indices: bool = False) -> Iterator[Any]:
    """Yield the predictions of each batch that a `PredictionWriter` wrote, in the order of the dataloader.

    Reading the files never executes code.

    Args:
        path: Folder of the predictions, or its URL. After ``predict``, it is the value of `PredictionWriter.folder`.
        dataloader_idx: Index of the dataloader, if there were several. Default: 0.
        indices: Yield pairs ``(indices, predictions)`` with the indices of the batch's samples in the dataset. The
            indices are None for a streamed dataset or a `CombinedLoader`. Default: False.

    Raises:
        ValueError, TypeError: If the path is invalid, or the folder does not have the complete predictions of this
            dataloader.
        OSError: If ``path`` is a URL and the files there cannot be read.
    """
    folder = local_folder(path)
    if not (folder / _INDEX).is_file():
        raise ValueError(
            f"{path} has no complete predictions: {_INDEX}, which is written last, is missing. Pass the folder of a "
            "PredictionWriter. If prediction was interrupted, predict again."
        )
    if newer := _find_newer(folder):
        warn(f"{path} has older predictions than {newer}. To read the latest ones, pass PredictionWriter.folder.")
    loaders = _read_index(folder / _INDEX)
    if str(dataloader_idx) not in loaders:
        raise ValueError(
            f"dataloader_idx={dataloader_idx} has no predictions in {folder}. Available: {', '.join(loaders)}."
        )
    return _read_loader(folder, *loaders[str(dataloader_idx)], indices)


def _find_newer(folder: Path) -> str | None:
    """Return the name of the latest folder that a `PredictionWriter` made beside this one, if it is more recent."""
    indices = [folder / _INDEX, *folder.parent.glob(f"{glob.escape(folder.name)}-v*/{_INDEX}")]
    latest = max(indices, key=lambda index: index.stat().st_mtime_ns)
    return None if latest.parent == folder else latest.parent.name


def _read_index(path: Path) -> dict[str, tuple[int, list[list[str]]]]:
    document = filesystem.read_json(path, _MAX_INDEX_BYTES)
    try:
        loaders = {loader: (written["batches"], written["ranks"]) for loader, written in document["loaders"].items()}
        names = [name for batches, ranks in loaders.values() for rank in ranks for name in rank]
        whole = all(isinstance(batches, int) for batches, _ in loaders.values())
        if not whole or not all(isinstance(name, str) and filesystem.is_inside(name) for name in names):
            raise ValueError("it has an invalid entry, or an entry for a file outside the folder")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = str(error) if type(error) is ValueError else "it does not have the form that a PredictionWriter writes"
        raise ValueError(
            f"{path} is not a prediction index: {reason}. Copy or download it again, or predict again."
        ) from error
    return loaders


def _read_loader(folder: Path, batches: int, ranks: list[list[str]], indices: bool) -> Iterator[Any]:
    count = 0
    for _, batch in heapq.merge(*(_read_rank(folder, files) for files in ranks), key=lambda numbered: numbered[0]):
        count += 1
        yield (batch["indices"], batch["prediction"]) if indices else batch["prediction"]
    if count != batches:
        raise ValueError(
            f"{folder} has only {count} of {batches} batches. Copy or download it again, or predict again."
        )


def _read_rank(folder: Path, files: list[str]) -> Iterator[tuple[int, Any]]:
    for name in files:
        path = folder / name
        pieces, notes = read_safetensors(path)
        tensors = {tensor: piece.get() for tensor, piece in pieces.items()}
        for number, document in _parse_note(path, notes):
            batch = decode(document, tensors)
            if not isinstance(batch, dict) or batch.keys() != {"prediction", "indices"}:
                raise ValueError(f"batch {number} in {path} was not written by a PredictionWriter. Predict again.")
            yield number, batch


def _parse_note(path: Path, notes: Mapping[str, str]) -> list[tuple[int, Any]]:
    document = filesystem.parse_json(path, notes.get(_NOTE, "").encode())
    pairs: list[Any] = document if isinstance(document, list) else [None]
    if not all(isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], int) for pair in pairs):
        raise ValueError(f"{path} was not written by a PredictionWriter. Predict again.")
    return [(number, batch) for number, batch in pairs]
