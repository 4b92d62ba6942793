"""Packing: several documents (token sequences) share a row of one length, so that little of a batch is padding.

The rows are composed by best-fit decreasing: documents are placed in the order of decreasing length, each into the
fullest row that has room for it (https://arxiv.org/abs/2404.10830 compares this with other ways to pack documents).
"""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from ....common.messages import format_count, name_type
from ....common.validation import check_int, choose
from ..micro_batches import avoid_rewind
from ..sampler_rng import get_stateful
from ..source_libraries import explain_state_gap
from ..workers import iter_epoch_owners

IGNORED = -100
"""Label of a token that the loss leaves out, the default ``ignore_index`` of torch's cross entropy."""

PADDING = -1
"""Document number of the padding at the end of a row."""

_BUFFER = 128  # rows of a stream that are composed at a time; the last of them is half empty on average

Document = tuple[np.ndarray, np.ndarray]
"""The tokens and the labels of a document."""


@dataclass(slots=True, frozen=True)
class Layout:
    """Form of the rows; see `PackedDataset`."""

    length: int
    cut: bool
    pad_id: int
    seed: int

    def cut_pieces(self, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the documents, starts and sizes of the pieces that documents with these lengths are cut into.

        Raises:
            ValueError: If a document is too long and may not be cut.
        """
        is_long = lengths > self.length
        if is_long.any():
            first = int(np.argmax(is_long))
            self.check_length(first, int(lengths[first]))
        counts = -(-lengths // self.length)
        documents = np.repeat(np.arange(len(lengths)), counts)
        starts = (np.arange(len(documents)) - np.repeat(np.cumsum(counts) - counts, counts)) * self.length
        return documents, starts, np.minimum(lengths[documents] - starts, self.length)

    def check_length(self, number: int, size: int) -> None:
        """Raise a ValueError if a document of this size is too long and may not be cut."""
        if size > self.length and not self.cut:
            raise ValueError(
                f"document {number} has {size:,} tokens, more than length={self.length:,}. Pass too_long='cut' to cut "
                "it into pieces, or increase length."
            )

    def build_row(self, pieces: list[Document]) -> dict[str, Tensor]:
        """Return a row with these pieces of documents, followed by padding."""
        sizes = [len(tokens) for tokens, _ in pieces]
        rest = self.length - sum(sizes)
        labels = np.concatenate([*(labels for _, labels in pieces), np.full(rest, IGNORED)], dtype=np.int64)
        labels[np.cumsum([0, *sizes[:-1]])] = IGNORED
        numbers = np.array([*range(len(sizes)), PADDING], dtype=np.int32)
        row = {
            "input_ids": np.concatenate(
                [*(tokens for tokens, _ in pieces), np.full(rest, self.pad_id)], dtype=np.int64
            ),
            "labels": labels,
            "position_ids": np.concatenate([np.arange(size) for size in (*sizes, rest)]),
            "seq_idx": np.repeat(numbers, [*sizes, rest]),
        }
        return {name: torch.from_numpy(values) for name, values in row.items()}


def pack(
    dataset: Any,
    length: int,
    *,
    too_long: str = "raise",
    pad_id: int = 0,
    seed: int = 0,
    lengths: Any = None,
    buffer: int | None = None,
) -> PackedDataset | PackedStream:
    """Return a dataset whose samples are rows of several documents, for use in a ``DataLoader``; see `PackedDataset`.

    Args:
        dataset: Documents: a dataset with a length, a list, or an ``IterableDataset``. A document is a sequence of
            integers, or a mapping with ``input_ids`` and optionally ``labels``. Empty documents are skipped.
        length: Number of tokens in a row.
        too_long: ``"raise"`` raises an error for a document that is longer than ``length``. ``"cut"`` cuts it into
            pieces of ``length`` tokens and a rest; each piece is treated as a document. Default: ``"raise"``.
        pad_id: Token for padding. Default: 0.
        seed: Seed of the composition of the rows. Default: 0.
        lengths: Number of tokens of each document. Only for datasets with a length. Default: each document is read once
            to determine its length.
        buffer: Number of rows that are composed at a time; more rows need more memory, and have less padding. They are
            yielded in random order. Only for an ``IterableDataset``. Default: 128.

    Returns:
        A `PackedDataset`, or a `PackedStream` for an ``IterableDataset``.

    Raises:
        TypeError: If ``dataset`` is neither a dataset with a length nor an ``IterableDataset``.
        ValueError: If an argument or a document is invalid.
    """
    cut = choose("too_long", too_long, ("raise", "cut")) == "cut"
    layout = Layout(check_int("length", length, 1), cut, int(pad_id), check_int("seed", seed, 0))
    if isinstance(dataset, IterableDataset):
        if lengths is not None:
            raise ValueError("lengths=... can only be used with a dataset that has a length. Remove lengths.")
        rows = check_int("buffer", _BUFFER if buffer is None else buffer, 1)
        # Without an exact state, the loader reads the stream again, and compares its first batch.
        has_state = get_stateful(dataset) is not None and not explain_state_gap(dataset)
        return (StatefulPackedStream if has_state else PackedStream)(dataset, layout, rows)
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise TypeError(
            f"dataset={dataset!r:.100} ({name_type(dataset)}) must be a dataset with __getitem__ and __len__, a list, "
            "or an IterableDataset. Let a generator be the __iter__ of an IterableDataset."
        )
    if buffer is not None:
        raise ValueError(f"buffer={buffer!r} can only be used with an IterableDataset. Remove buffer.")
    return PackedDataset(Documents(dataset, lengths), layout)


class Documents(Dataset[Document]):
    """Documents of a dataset with a length.

    Its arrays also show whether all ranks have the same documents, before the rows are sharded.

    Attributes:
        source: The user's dataset.
        lengths: Number of tokens of each document.
        digests: Digest of each document; None if ``lengths`` were passed, because the documents are then not read.
    """

    def __init__(self, source: Any, lengths: Any) -> None:
        self.source = source
        self.digests: np.ndarray | None = None
        if lengths is not None:
            numbers = np.asarray(lengths)
            is_integer = numbers.dtype.kind in "iu" or not numbers.size
            if not is_integer or numbers.shape != (len(source),) or (numbers < 0).any():
                raise ValueError(
                    f"lengths={lengths!r:.100} must hold one integer of at least 0 for each of the "
                    f"{format_count(len(source), 'document')} of the dataset."
                )
            self.lengths = numbers.astype(np.int64)
            return
        measured = np.empty((2, len(source)), dtype=np.uint64)
        for index in range(len(source)):
            tokens, _ = self[index]
            measured[:, index] = len(tokens), xxhash.xxh3_64_intdigest(tokens.tobytes())
        self.lengths, self.digests = measured[0].astype(np.int64), measured[1]

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Document:
        return read_document(self.source[index], index)


class PackedDataset(Dataset[dict[str, Tensor]]):
    """Dataset with a length whose samples are rows of several documents. `pack` creates it.

    Rows are composed by best-fit decreasing. In each epoch (``set_epoch``, which Treadle calls), documents of equal
    length change places. The number of rows stays the same. Each row is a dict of tensors with ``length`` elements,
    under the names that Hugging Face Transformers uses:

    - ``input_ids``: The tokens of the documents one after the other, then ``pad_id``.
    - ``labels``: The labels, which are the tokens unless the documents have other ones. The label of a document's first
      token, and of padding, is -100. As in Transformers, the logits at a position predict the label at the next one:
      ``cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())``.
    - ``position_ids``: The position of each token in its document. It starts again at 0 in the padding.
    - ``seq_idx``: The number of each token's document in the row, from 0; -1 for padding. See `make_sdpa_mask` and
      `make_flex_mask`.

    Examples:
        >>> from treadle.data import pack
        >>> rows = pack([[1, 2, 3], [4, 5], [6, 7, 8, 9]], length=5)
        >>> rows
        PackedDataset(3 documents in 2 rows of 5 tokens, 90.0 % filled)
        >>> for name, values in rows[0].items():
        ...     print(name, values.tolist())
        input_ids [1, 2, 3, 4, 5]
        labels [-100, 2, 3, -100, 5]
        position_ids [0, 1, 2, 0, 1]
        seq_idx [0, 0, 0, 1, 1]
    """

    def __init__(self, documents: Documents, layout: Layout) -> None:
        self.documents = documents
        self.layout = layout
        pieces, starts, sizes = layout.cut_pieces(documents.lengths)
        self._pieces = np.stack([pieces, starts, sizes], axis=1)
        # Of the pieces in the order of decreasing size.
        self._row_of_sorted = fit(np.sort(sizes)[::-1].tolist(), layout.length)
        self._rows = self._compose(0)

    def set_epoch(self, epoch: int) -> None:
        """Compose the rows of an epoch, and pass its number to the documents' dataset if it has this method."""
        for owner in iter_epoch_owners(self.documents.source, nested=False):
            owner.set_epoch(epoch)
        if epoch != self._rows[0]:
            self._rows = self._compose(epoch)

    def _compose(self, epoch: int) -> tuple[int, np.ndarray, np.ndarray]:
        """Return an epoch's number, its pieces by row, and where each row ends.

        Rows are in the order of their first pieces, as the pieces in a row are.
        """
        count = len(self._pieces)
        # Arrays and not lists, because forked workers would copy the memory of Python objects when they read them.
        row_of_piece = np.empty(count, dtype=np.int64)
        shuffled = np.random.default_rng([self.layout.seed, epoch]).permutation(count)
        row_of_piece[np.lexsort((shuffled, -self._pieces[:, 2]))] = self._row_of_sorted
        first_pieces = np.unique(row_of_piece, return_index=True)[1]
        row_of_piece = np.argsort(np.argsort(first_pieces))[row_of_piece]
        return epoch, np.argsort(row_of_piece, kind="stable"), np.cumsum(np.bincount(row_of_piece))

    def __len__(self) -> int:
        return len(self._rows[2])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        (_, pieces, ends), parts = self._rows, list[Document]()
        end = ends[index]  # an IndexError ends a loop over the rows
        in_row = pieces[ends[index - 1] if index % len(ends) else 0 : end]
        for document, start, size in self._pieces[in_row].tolist():
            tokens, labels = self.documents[document]
            if len(tokens) != self.documents.lengths[document]:
                raise ValueError(
                    f"document {document} has {len(tokens):,} tokens, but had {self.documents.lengths[document]:,} "
                    "when the dataset was packed. Pack a dataset whose documents keep their lengths."
                )
            parts.append((tokens[start : start + size], labels[start : start + size]))
        return self.layout.build_row(parts)

    def __repr__(self) -> str:
        rows, length = len(self), self.layout.length
        share = self._pieces[:, 2].sum() / max(1, rows * length)
        return (
            f"{type(self).__name__}({format_count(len(self.documents), 'document')} in {format_count(rows, 'row')} of "
            f"{format_count(length, 'token')}, {share:.1%} filled)"
        ).replace("%", " %")


class PackedStream(IterableDataset[dict[str, Tensor]]):
    """Stream whose samples are rows of several documents, in the form of `PackedDataset`. `pack` creates it.

    The rows are composed in chunks: documents are read until they fill ``buffer`` rows. With workers, each worker packs
    its own share of the documents, so their dataset must divide them among the workers.

    Attributes:
        packed_source: The stream of documents.

    Examples:
        >>> from torch.utils.data import DataLoader, IterableDataset
        >>> from treadle.data import pack
        >>> class Numbers(IterableDataset):
        ...     def __iter__(self):
        ...         yield from ([1], [2, 3], [4, 5, 6])
        >>> for batch in DataLoader(pack(Numbers(), length=3), batch_size=2):
        ...     print(batch["input_ids"].tolist())
        [[4, 5, 6], [2, 3, 1]]
    """

    def __init__(self, packed_source: Any, layout: Layout, buffer: int) -> None:
        self.packed_source = packed_source
        self.layout = layout
        self._buffer = buffer
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the epoch, also of the documents' stream if it has this method."""
        self._epoch = epoch
        for owner in iter_epoch_owners(self.packed_source):
            owner.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        documents, read = avoid_rewind(iter(self.packed_source)), 0
        for chunk in itertools.count():
            rows, count = self._read_rows(documents, read, chunk)
            if not rows:
                return
            yield from map(self.layout.build_row, rows)
            read += count

    def _read_rows(self, documents: Iterator[Any], read: int, chunk: int) -> tuple[list[list[Document]], int]:
        """Read the documents of a chunk after the first ``read`` documents.

        Returns:
            The documents of each row, in the order in which the rows are yielded, and the number of documents read.
        """
        layout, pieces, size, count = self.layout, list[Document](), 0, 0
        for item in documents:
            number, count = read + count, count + 1
            tokens, labels = read_document(item, number)
            layout.check_length(number, len(tokens))
            for start in range(0, len(tokens), layout.length):
                stop = start + layout.length
                pieces.append((tokens[start:stop], labels[start:stop]))
            size += len(tokens)
            if size >= self._buffer * layout.length:
                break
        pieces.sort(key=lambda piece: -len(piece[0]))
        rows: dict[int, list[Document]] = defaultdict(list)
        for piece, row in zip(pieces, fit([len(tokens) for tokens, _ in pieces], layout.length), strict=True):
            rows[row].append(piece)
        # The first rows hold the longest documents.
        order = np.random.default_rng([layout.seed, self._epoch, chunk]).permutation(len(rows))
        return [rows[row] for row in order.tolist()], count


class StatefulPackedStream(PackedStream):
    """Packed stream of documents whose stream has a state. Its own state contains no tokens.

    The state is that of the documents' stream before the current chunk, and the number of the chunk's rows that have
    been yielded. After a resume, the documents of the chunk are read and composed again.
    """

    def __init__(self, packed_source: Any, layout: Layout, buffer: int) -> None:
        super().__init__(packed_source, layout, buffer)
        self._loaded: dict[str, Any] | None = None
        self._position = self._describe(None, 0, 0, None)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the stream."""
        return dict(self._loaded or self._position)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next iteration start at a position returned by `state_dict`, if it belongs to the same epoch."""
        self._loaded = dict(state_dict)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        first, read, done = self._restore()
        documents = avoid_rewind(iter(self.packed_source))
        for chunk in itertools.count(first):
            state = copy.deepcopy(self.packed_source.state_dict())
            rows, count = self._read_rows(documents, read, chunk)
            if not rows:
                # The stream may count its epochs in its state.
                self._position = self._describe(copy.deepcopy(self.packed_source.state_dict()), 0, 0, None)
                return
            for number in range(done, len(rows)):
                self._position = self._describe(state, read, chunk, number + 1)
                yield self.layout.build_row(rows[number])
            read, done = read + count, 0

    def _describe(self, state: Any, read: int, chunk: int, rows: int | None) -> dict[str, Any]:
        """Return a position; ``rows`` is None between epochs."""
        return {"epoch": self._epoch, "documents": state, "read": read, "chunk": chunk, "rows": rows}

    def _restore(self) -> tuple[int, int, int]:
        """Restore the loaded position; return the chunk, the documents read before it and the rows yielded of it."""
        loaded, self._loaded = self._loaded, None
        if loaded is None or (loaded["rows"] is not None and loaded["epoch"] != self._epoch):
            return 0, 0, 0  # the saved epoch was left early
        if loaded["documents"] is not None:
            self.packed_source.load_state_dict(copy.deepcopy(loaded["documents"]))
        return loaded["chunk"], loaded["read"], loaded["rows"] or 0


def fit(sizes: Sequence[int], length: int) -> np.ndarray:
    """Assign pieces with decreasing sizes to rows by best fit; return the number of the row of each piece."""
    rows_by_space: dict[int, list[int]] = defaultdict(list)
    spaces = 0  # bit n is set if a row has space for exactly n more tokens
    row_of_piece, count = np.empty(len(sizes), dtype=np.int64), 0
    for rank, size in enumerate(sizes):
        enough = spaces >> size
        if enough:
            space = size + (enough & -enough).bit_length() - 1  # the lowest bit that is set
            row = rows_by_space[space].pop()
            if not rows_by_space[space]:
                spaces ^= 1 << space
        else:
            space, row, count = length, count, count + 1
        row_of_piece[rank] = row
        if space > size:
            rows_by_space[space - size].append(row)
            spaces |= 1 << (space - size)
    return row_of_piece


def read_document(item: Any, number: int) -> Document:
    """Return the tokens and labels of a document.

    Raises:
        TypeError: If it has no tokens, or its tokens or labels are not integers in one dimension.
        ValueError: If it has another number of labels than of tokens.
    """
    labels = None
    if isinstance(item, Mapping):
        if "input_ids" not in item:
            raise TypeError(
                f"document {number} has the keys {', '.join(map(repr, item))}, but not 'input_ids'. Store its tokens "
                "under this name."
            )
        item, labels = item["input_ids"], item.get("labels")
    tokens = _read_integers(item, number, "tokens")
    labels = tokens if labels is None else _read_integers(labels, number, "labels")
    if labels.shape != tokens.shape:
        raise ValueError(
            f"document {number} has {format_count(len(tokens), 'token')}, but {format_count(len(labels), 'label')}. "
            "Give each token a label; -100 leaves it out of the loss."
        )
    return tokens, labels


def _read_integers(value: Any, number: int, meaning: str) -> np.ndarray:
    values = np.asarray(value)
    if values.ndim != 1 or (values.dtype.kind not in "iu" and values.size):
        raise TypeError(
            f"the {meaning} of document {number} are {name_type(value)} of shape {values.shape} and type "
            f"{values.dtype}, but must be a sequence of integers. Tokenize the dataset before it is packed."
        )
    return values
