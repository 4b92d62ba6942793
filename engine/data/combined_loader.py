"""Combination of several loaders into one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader

from ...common.messages import format_count, name_type
from ...common.validation import choose
from ..collectives import with_items
from ..nested import honor_type
from .dataset_check import find_least, get_length
from .loader import Loader

MODES = ("min_size", "max_size_cycle", "max_size", "sequential")
_ENDED = object()


class CombinedLoader:
    """Combination of several dataloaders, which are read either together or one after the other.

    Except in mode ``"sequential"``, a combined batch has the structure of ``iterables``, with one batch per dataloader.

    Pass a `CombinedLoader` to ``fit`` or to `Accelerator.prepare`. In ``fit``, a plain dict, list or tuple of training
    dataloaders is combined in mode ``"max_size_cycle"``. Direct iteration yields
    ``(batch, batch_idx, dataloader_idx)``.

    A micro-batch is weighted by the total number of samples that all dataloaders contribute to it. If the loss is the
    mean over these samples, the gradient is therefore exact. A batch of unknown size counts as one sample.

    Args:
        iterables: Dataloaders or other iterables of batches, in dicts, lists and tuples that may be nested. A nested
            list or tuple that contains no ``DataLoader`` counts as a single iterable of batches.
        mode: ``"min_size"`` ends with the shortest dataloader. ``"max_size_cycle"`` ends with the longest and restarts
            the others. ``"max_size"`` ends with the longest and yields None for dataloaders that have ended.
            ``"sequential"`` reads one dataloader after the other. Default: ``"min_size"``.

    Raises:
        ValueError: If ``mode`` is unknown, or if ``iterables`` is empty.
        TypeError: If an entry of ``iterables`` is not iterable.

    Example:
        >>> from treadle.engine import CombinedLoader
        >>> loader = CombinedLoader({"a": [1, 2, 3], "b": [4, 5]}, mode="max_size_cycle")
        >>> [batch for batch, batch_idx, dataloader_idx in loader]
        [{'a': 1, 'b': 4}, {'a': 2, 'b': 5}, {'a': 3, 'b': 4}]
    """

    def __init__(self, iterables: Any, mode: str = "min_size") -> None:
        self.mode = choose("mode", mode, MODES)
        self.iterables = iterables
        self._limits: list[int | float] | None = None
        self._running: Iterator[Any] | None = None
        leaves = list(_iter_leaves(iterables, True))
        if not leaves:
            raise ValueError(f"CombinedLoader({iterables!r}) contains no dataloader. Pass at least one.")
        for leaf in leaves:
            if not isinstance(leaf, Iterable) and not hasattr(leaf, "__getitem__"):
                raise TypeError(
                    f"CombinedLoader got {leaf!r:.100} ({name_type(leaf)}), which is not a dataloader. Pass a "
                    "DataLoader or another iterable of batches."
                )
        self._flattened = leaves

    def _count_iterables(self) -> str:
        return format_count(len(self._flattened), "iterable")

    @property
    def flattened(self) -> list[Any]:
        """Flat list of the iterables, in order. It may be set to another list of the same length.

        Raises:
            ValueError: If it is set to a list of another length.
        """
        return self._flattened

    @flattened.setter
    def flattened(self, iterables: list[Any]) -> None:
        if len(iterables) != len(self._flattened):
            raise ValueError(
                f"CombinedLoader.flattened has length {len(iterables)}, but the CombinedLoader has "
                f"{self._count_iterables()}. Set one entry per iterable."
            )
        self.iterables = self.in_form(iterables)
        self._flattened = list(iterables)

    @property
    def limits(self) -> list[int | float] | None:
        """List with the maximum number of batches per pass for each iterable; None for no limits.

        If a single number is set, it applies to every iterable. Infinity means that an iterable has no limit.

        Raises:
            ValueError: If it is set to a list whose length is not the number of iterables.
        """
        return self._limits

    @limits.setter
    def limits(self, limits: int | float | list[int | float] | None) -> None:
        if isinstance(limits, int | float):
            limits = [limits] * len(self._flattened)
        if limits is not None and len(limits) != len(self._flattened):
            raise ValueError(
                f"CombinedLoader.limits has length {len(limits)}, but the CombinedLoader has "
                f"{self._count_iterables()}. Set one limit per iterable."
            )
        self._limits = limits

    @property
    def sampler(self) -> Any:
        """The sampler of each dataloader (None if it has none), in the structure of ``iterables``."""
        return self.in_form([getattr(loader, "sampler", None) for loader in self._flattened])

    @property
    def batch_sampler(self) -> Any:
        """The batch sampler of each dataloader (None if it has none), in the structure of ``iterables``."""
        return self.in_form([getattr(loader, "batch_sampler", None) for loader in self._flattened])

    def in_form(self, values: Iterable[Any]) -> Any:
        """Return ``values``, one for each iterable, in the structure of ``iterables``.

        Args:
            values: One value per iterable, in the order of `flattened`.
        """
        return _fill_form(self.iterables, iter(values), True)

    def limit_of(self, number: int) -> int | None:
        """Return the maximum number of batches per pass over an iterable; None for no limit.

        Args:
            number: The index of the iterable.
        """
        limit = None if self._limits is None else self._limits[number]
        return None if limit is None or limit == float("inf") else int(limit)

    def __iter__(self) -> CombinedLoader:
        self._running = self._iter_numbered()
        return self

    def __next__(self) -> tuple[Any, int, int]:
        if self._running is None:
            iter(self)
        return next(self._running)  # type: ignore[arg-type]

    def _iter_numbered(self) -> Iterator[tuple[Any, int, int]]:
        def start(number: int, _: bool) -> Iterator[Any]:
            return itertools.islice(self._flattened[number], self.limit_of(number))

        last, index = 0, -1
        for batches, numbers in read_rows(self.mode, start, [0] * len(self._flattened)):
            sequential = self.mode == "sequential"
            number = numbers[0] if sequential else 0
            last, index = number, index + 1 if number == last else 0
            yield (batches[0] if sequential else self.in_form(batches)), index, number

    def __len__(self) -> int:
        lengths = [get_length(loader) for loader in self._flattened]
        limits = map(self.limit_of, range(len(lengths)))
        count = compute_joint_length(self.mode, [find_least(*pair) for pair in zip(lengths, limits, strict=True)])
        if count is None:
            raise TypeError(f"CombinedLoader(mode={self.mode!r}) has no length, because one of its iterables has none.")
        return count

    def reset(self) -> None:
        """Discard the iteration in progress and the iterator of each ``DataLoader``."""
        self._running = None
        for loader in self._flattened:
            if isinstance(loader, DataLoader):
                loader.__dict__["_iterator"] = None


def is_collection(value: Any) -> bool:
    """Return whether a value is a mapping, or a list or tuple that contains a dataloader.

    In a list, only a ``DataLoader``, a prepared loader or an iterator counts as one. Other items are batches.
    """
    return isinstance(value, Mapping) or (isinstance(value, list | tuple) and _holds_loaders(value))


def _holds_loaders(values: Iterable[Any]) -> bool:
    return any(
        isinstance(value, DataLoader | Loader | Iterator)
        or (isinstance(value, Mapping) and _holds_loaders(value.values()))
        or (isinstance(value, list | tuple) and _holds_loaders(value))
        for value in values
    )


def _iter_leaves(value: Any, outermost: bool = False) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    elif not (isinstance(value, list | tuple) and (outermost or _holds_loaders(value))):
        yield value
        return
    for child in value:
        yield from _iter_leaves(child)


def _fill_form(form: Any, values: Iterator[Any], outermost: bool = False) -> Any:
    if isinstance(form, Mapping):
        items = {key: _fill_form(child, values) for key, child in form.items()}
        return items if type(form) is dict else with_items(form, items)
    if isinstance(form, list | tuple) and (outermost or _holds_loaders(form)):
        return honor_type(form, [_fill_form(child, values) for child in form])
    return next(values)


def compute_joint_length(mode: str, lengths: list[int | None]) -> int | None:
    """Return the number of batches in an epoch of combined iterables; None if it cannot be determined.

    In mode ``"min_size"``, unknown lengths are ignored, so the result is an upper bound.
    """
    if mode == "min_size":
        return find_least(*lengths)
    defined_lengths = [length for length in lengths if length is not None]
    if len(defined_lengths) < len(lengths):
        return None
    return sum(defined_lengths) if mode == "sequential" else max(defined_lengths)


def read_rows(
    mode: str, start: Callable[[int, bool], Iterator[Any]], passes: list[int]
) -> Iterator[tuple[list[Any], list[int]]]:
    """Yield the batches of several iterables, combined in one of the modes of `CombinedLoader`.

    ``start(index, together)`` starts or resumes a pass over an iterable and returns its iterator. ``together`` is True
    if all iterables are started before the first batch is read. ``passes`` holds the number of completed passes over
    each iterable in this epoch, and is updated.

    Yields:
        A list with a batch of each iterable (None if the iterable has ended), and a list of the indices of the
        iterables that were read. In mode ``"sequential"``, each list has a single entry.
    """
    if mode == "sequential":
        for number in range(len(passes)):
            if not passes[number]:
                for batch in start(number, False):
                    yield [batch], [number]
                passes[number] += 1
        return
    cycled = mode == "max_size_cycle"

    def over() -> bool:
        return all(passes) if cycled or mode == "max_size" else any(passes)

    if over():  # this was known when a group was read whose last batch was not yet returned
        return
    iterators = [None if ended and not cycled else start(n, True) for n, ended in enumerate(passes)]
    while True:
        row = [_ENDED if iterator is None else next(iterator, _ENDED) for iterator in iterators]
        for number, batch in enumerate(row):
            if batch is _ENDED and iterators[number] is not None:
                passes[number] += 1
                iterators[number] = None
        if over() and (mode != "max_size" or all(batch is _ENDED for batch in row)):
            return
        for number in [n for n, batch in enumerate(row) if cycled and batch is _ENDED]:
            again = iterators[number] = start(number, False)
            row[number] = next(again, _ENDED)
            if row[number] is _ENDED:
                raise ValueError(
                    f"iterable {number} of the CombinedLoader yields no batches in pass {passes[number] + 1}, so "
                    f"mode={mode!r} can't repeat it. Pass an iterable that can be iterated over again, or use another "
                    "mode."
                )
        yield [None if b is _ENDED else b for b in row], [n for n, b in enumerate(row) if b is not _ENDED]
