"""Random sources that determine a loader's order: the run's stream, and the generators of samplers and datasets."""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Sampler

from ...common.messages import format_count, warn
from ...strategies import World
from ..rng import Draw, RandomStream, State, host_state, set_host_state
from .source_libraries import iter_parts


@cache
def _kinds() -> tuple[type, ...]:
    return torch.Generator, random.Random, np.random.Generator, np.random.RandomState


class CopiedStream(RandomStream):
    """Copy of the run's stream, for a source that is read ahead of the loop and draws meanwhile.

    The run's stream follows the batches that the loop has received, so other dataloaders can draw from it in between.

    Args:
        stream: The run's stream.

    Attributes:
        departures: The number of items that were read, and a seed, by the name of a generator that was reseeded then.
    """

    def __init__(self, stream: RandomStream) -> None:
        super().__init__(stream.get_state())
        self._stream = stream
        self._last_state = self.state  # at the last `take` or `restart`
        self.departures: dict[str, tuple[int, int]] = {}

    def depart(self, count: int, *, repeats: bool) -> None:
        """Reseed the generators that the model, or another source, has drawn from since the last batch.

        Both have begun in the same state, so they would draw the same numbers.

        Args:
            count: The number of items that were read in this epoch.
            repeats: Whether the epoch is read again, and therefore only the recorded departures apply.
        """
        if not repeats and len(self.departures) < len(self.state):
            found = self._stream.find_departures(self._last_state)
            for name in found.keys() - self.departures.keys():
                self.departures[name] = count, found[name]
        for name, (when, seed) in self.departures.items():
            if when == count:
                self.reseed(name, seed)

    def restart(self, state: State) -> None:
        """Continue from another state, without counting the difference as a draw."""
        self.go_to(state)
        self._last_state = state

    def take(self) -> Draw:
        """Return the draws since the last call."""
        start, self._last_state = self._last_state, self.state
        return Draw(start, self._last_state)


class Draws:
    """Random sources of one loader, whose states are read and restored together.

    They are the run's random stream, and the generators of the loader, its samplers and ``dataset``.
    """

    def __init__(
        self, stream: RandomStream, source: Any, samplers: Iterable[Any] = (), dataset: Dataset[Any] | None = None
    ) -> None:
        self.stream = stream
        reachable_samplers = _find_nested(samplers, Sampler, ("sampler", "batch_sampler"))
        datasets = [part for root in _find_nested([dataset], Dataset) for part in (root, *iter_parts(root))]
        self.private = collect_generators([source, *reachable_samplers, *datasets])
        self.counting_epochs = [part for part in {id(d): d for d in datasets}.values() if _counts_epochs(part)]
        self.stateful = [sampler for sampler in reachable_samplers if get_stateful(sampler) is not None]
        self._counting = [
            sampler
            for sampler in reachable_samplers
            if get_stateful(sampler) is None
            and not hasattr(sampler, "set_epoch")
            and hasattr(sampler, "__dict__")
            and type(sampler).__module__ != Sampler.__module__  # torch's own samplers count nothing
        ]
        self._first: list[dict[str, int]] | None = None  # their counts when this process began
        self._last: list[dict[str, int]] = []

    def state(self) -> dict[str, Any]:
        """Return the current states of the stream, the generators, the samplers and the datasets' epoch counters."""
        return {
            "stream": self.stream.get_state(),
            "generators": self.private_states(),
            "samplers": self.sampler_states(),
            "epochs": self.epochs(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restore a state returned by `state`."""
        self.rewind(state)
        self.load_samplers(state)

    def rewind(self, state: dict[str, Any]) -> None:
        """Restore a state returned by `state` except for the samplers' own states."""
        self.stream.go_to(state["stream"])
        self.load_private(state["generators"])
        self.load_epochs(state)

    def epochs(self) -> list[int]:
        """Return the values of the datasets' own epoch counters."""
        return [dataset.epoch for dataset in self.counting_epochs]

    def load_epochs(self, state: dict[str, Any]) -> None:
        """Restore the datasets' own epoch counters, if the state contains them."""
        for dataset, epoch in zip(self.counting_epochs, state.get("epochs", ()), strict=False):
            dataset.epoch = epoch

    def private_states(self) -> list[Any]:
        """Return the states of the generators that belong to the loader."""
        return read_states(self.private)

    def load_private(self, states: list[Any]) -> None:
        """Restore the generators that belong to the loader."""
        load_states(self.private, states)

    def copy_rank_zero(self, world: World) -> None:
        """Copy rank zero's private generators to all ranks, so that they draw the same order. Call it on all ranks."""
        if self.private:
            self.load_private(world.broadcast(self.private_states()))

    def sampler_states(self) -> list[Any]:
        """Return the states of the samplers that `get_stateful` accepts."""
        return [copy.deepcopy(sampler.state_dict()) for sampler in self.stateful]

    def load_samplers(self, state: dict[str, Any]) -> None:
        """Restore the samplers' own states, if the state contains them."""
        for sampler, saved in zip(self.stateful, state.get("samplers", ()), strict=False):
            sampler.load_state_dict(copy.deepcopy(saved))

    def read_host_state(self) -> dict[str, Any]:
        """Return the states of the default CPU generators and the private generators.

        Call it in the context of `RandomStream.drawing`.
        """
        return {"stream": host_state(), "generators": self.private_states()}

    @contextmanager
    def replay_from(self, state: dict[str, Any] | None) -> Iterator[None]:
        """Return a context in which the generators start from an earlier state; it restores the current one on exit.

        ``state`` is a state returned by `read_host_state`; None keeps the current state.
        """
        current = self.read_host_state()
        try:
            if state is not None:
                set_host_state(state["stream"])
                self.load_private(state["generators"])
            yield
        finally:
            set_host_state(current["stream"])
            self.load_private(current["generators"])

    def difference(self, state: dict[str, Any]) -> str:
        """Return the reason why a saved state does not fit these sources; "" if it fits."""
        if "loaders" in state:
            saved_loaders = format_count(len(state["loaders"]), "combined dataloader")
            return f"the checkpoint was saved with {saved_loaders}, but this run has a single dataloader"
        saved, samplers = state["generators"], state.get("samplers")
        if not match_generators(self.private, saved):
            return _describe_generators("the dataloader", self.private, saved)
        if samplers is not None and len(samplers) != len(self.stateful):
            current = format_count(len(self.stateful), "sampler")
            return f"the dataloader has {current} with a state_dict, but the checkpoint has {len(samplers)}"
        return ""

    # -- state outside of checkpoints ----------------------------------------------------------------------------

    def note_counts(self) -> None:
        """Record the samplers' integer attributes before the order of a new epoch is drawn; see `warn_of_counts`."""
        self._last = self._read_counts()
        if self._first is None:
            self._first = self._last

    def warn_of_counts(self, inside: bool) -> None:
        """Warn once if a sampler with neither ``state_dict`` nor ``set_epoch`` has changed an integer attribute.

        Checkpoints do not contain these attributes, so the order of a resumed run may differ. ``inside`` is True during
        an epoch. Changes since the epoch began are then ignored, because a resume draws the epoch's order again.
        """
        if self._first is None or not self._counting:
            return
        for sampler, first, latest in zip(
            self._counting, self._first, self._last if inside else self._read_counts(), strict=True
        ):
            changed = [name for name, count in latest.items() if first.get(name) != count]
            if changed:
                name = type(sampler).__name__
                warn(
                    f"{name}.{changed[0]} changed from one epoch to the next, but is not saved in a checkpoint. If "
                    f"the order depends on it, a resumed run has a different order. Give {name} the methods "
                    "state_dict and load_state_dict, or set_epoch(epoch)."
                )
                self._counting = []
                return

    def _read_counts(self) -> list[dict[str, int]]:
        return [{name: value for name, value in vars(s).items() if type(value) is int} for s in self._counting]


@contextmanager
def preserve_loader_state(loader: Any) -> Iterator[None]:
    """Return a context that restores the generators, samplers and datasets of ``loader`` when it ends.

    For samplers and datasets, this covers the integer attributes and the contents of their ``state_dict``.
    """
    batches = getattr(loader, "batch_sampler", None)
    samplers = _find_nested([getattr(loader, "sampler", None), batches], Sampler, ("sampler", "batch_sampler"))
    owners = [*samplers, *_find_nested([getattr(loader, "dataset", None)], Dataset)]
    generators = collect_generators([loader, *owners])
    drawn = read_states(generators)
    # A copy, because a sampler may return the object that it changes while it draws.
    states = [(owner, copy.deepcopy(owner.state_dict())) for owner in owners if get_stateful(owner) is not None]
    counts = [(owner, {k: v for k, v in getattr(owner, "__dict__", {}).items() if type(v) is int}) for owner in owners]
    try:
        yield
    finally:
        for owner, counted in counts:
            if counted:
                vars(owner).update(counted)
        for owner, state in states:
            owner.load_state_dict(state)
        load_states(generators, drawn)


def get_stateful(value: Any) -> Any:
    """Return ``value`` if it has ``load_state_dict`` and a ``state_dict`` without required arguments; else None."""
    if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
        return None
    try:
        inspect.signature(value.state_dict).bind()
    except TypeError:  # it requires attributes of its own loader, as MosaicML's StreamingDataset does
        return None
    except ValueError:  # a class written in C
        pass
    return value


def _counts_epochs(dataset: Any) -> bool:
    """Return whether a stream or stage counts epochs in an attribute ``epoch``, without a method to restore it."""
    return (
        not (isinstance(dataset, Dataset) and not isinstance(dataset, IterableDataset))
        and type(getattr(dataset, "__dict__", {}).get("epoch")) is int
        and not hasattr(dataset, "set_epoch")
        and get_stateful(dataset) is None
    )


def find_generators(dataset: Any) -> list[Any]:
    """Return the generators among the attributes of a dataset and of the datasets nested in it."""
    return collect_generators(_find_nested([dataset], Dataset))


def collect_generators(owners: Iterable[Any]) -> list[Any]:
    """Return the generators among the attributes of ``owners``, each once."""
    generators: dict[int, Any] = {}
    for owner in owners:
        for _, value in _iter_attributes(owner):
            if isinstance(value, _kinds()):
                generators.setdefault(id(value), value)
    return list(generators.values())


def _find_nested(roots: Iterable[Any], kind: type, names: tuple[str, ...] = ()) -> list[Any]:
    """Return ``roots`` and, recursively, their attributes of the class ``kind`` or with one of ``names``, each once."""
    reached: dict[int, Any] = {}
    waiting = [root for root in roots if root is not None]
    for owner in waiting:  # the list grows during the loop
        if id(owner) not in reached:
            reached[id(owner)] = owner
            waiting += [value for name, value in _iter_attributes(owner) if isinstance(value, kind) or name in names]
    return list(reached.values())


def _iter_attributes(owner: Any) -> Iterable[tuple[str, Any]]:
    """Yield the name and value of each attribute; for a collection of generators, samplers or datasets, each item."""
    # Sorted by name, because saved states are matched to generators by their position.
    for name, value in sorted(getattr(owner, "__dict__", {}).items()):
        items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        if isinstance(next(iter(items), None), (*_kinds(), Sampler, Dataset)):
            yield from ((name, item) for item in items)
        else:
            yield name, value


def read_states(generators: list[Any]) -> list[Any]:
    """Return the state of each generator of torch, NumPy or Python's ``random``."""
    return [_read_state(generator) for generator in generators]


def load_states(generators: list[Any], states: list[Any]) -> None:
    """Restore the state of each generator."""
    for generator, state in zip(generators, states, strict=True):
        _restore_state(generator, state)


def match_generators(generators: list[Any], states: list[Any]) -> bool:
    """Return whether ``states`` fit ``generators`` in number and kind."""
    return len(generators) == len(states) and all(map(_accepts_state, generators, states))


def warn_unrestored_generators(owner: Any, generators: list[Any], states: list[Any]) -> None:
    """Warn that the generators of ``owner`` are not restored, because the checkpoint's states do not fit them."""
    warn(f"{_describe_generators(type(owner).__name__, generators, states)}, so the saved states are not restored.")


def _describe_generators(owner: str, generators: list[Any], states: list[Any]) -> str:
    if len(states) == len(generators):
        return f"the generators of {owner} differ in type from those in the checkpoint"
    return f"{owner} has {format_count(len(generators), 'generator')}, but the checkpoint has {len(states)}"


def _accepts_state(generator: Any, state: Any) -> bool:
    if isinstance(generator, torch.Generator):
        return isinstance(state, Tensor)
    if isinstance(generator, np.random.Generator):
        return isinstance(state, dict) and state.get("bit_generator") == generator.bit_generator.state["bit_generator"]
    return isinstance(state, tuple) and isinstance(state[0], str) == isinstance(generator, np.random.RandomState)


def _read_state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()


def _restore_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)
