"""Random sources of a loader's order: the run's stream, and generators of the user's samplers and datasets."""

from __future__ import annotations

import copy
import inspect
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Sampler

from ...common.messages import warn
from ...strategies import World
from ..rng import RandomStream, host_state, set_host_state
from .source_libraries import iter_parts

_KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


class Draws:
    """The random sources of one loader, read and restored together.

    Args:
        stream: The stream to draw from if the user gave no generator.
        source: The user's loader.
        samplers: Its samplers. Samplers inside them are found too.
        dataset: The dataset, if its draws are part of the order. Datasets inside it are found too.
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
        """Return the current state of all sources."""
        return {
            "stream": self.stream.get_state(),
            "generators": self.private_states(),
            "samplers": self.sampler_states(),
            "epochs": self.epochs(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restore a state returned by `state`.

        Args:
            state: The state.
        """
        self.rewind(state)
        self.load_samplers(state)

    def rewind(self, state: dict[str, Any]) -> None:
        """Restore a state returned by `state`, if no sampler has been used since.

        Args:
            state: The state.
        """
        self.stream.go_to(state["stream"])
        self.load_private(state["generators"])
        self.load_epochs(state)

    def epochs(self) -> list[int]:
        """Return the epoch counters that datasets keep on their own."""
        return [dataset.epoch for dataset in self.counting_epochs]

    def load_epochs(self, state: dict[str, Any]) -> None:
        """Restore the epoch counters that datasets keep on their own; older checkpoints do not have them.

        Args:
            state: The state.
        """
        for dataset, epoch in zip(self.counting_epochs, state.get("epochs", ()), strict=False):
            dataset.epoch = epoch

    def private_states(self) -> list[Any]:
        """Return the states of the private generators."""
        return read_states(self.private)

    def load_private(self, states: list[Any]) -> None:
        """Restore the private generators.

        Args:
            states: Their states.
        """
        load_states(self.private, states)

    def agree(self, world: World) -> None:
        """Use rank zero's private generators, so that all ranks draw the same order. Call it on all ranks.

        Args:
            world: The ranks.
        """
        if self.private:
            self.load_private(world.broadcast(self.private_states()))

    def sampler_states(self) -> list[Any]:
        """Return the states of the samplers that have a ``state_dict``."""
        return [copy.deepcopy(sampler.state_dict()) for sampler in self.stateful]

    def load_samplers(self, state: dict[str, Any]) -> None:
        """Restore the samplers' own states; older checkpoints do not have them.

        Args:
            state: The state.
        """
        for sampler, saved in zip(self.stateful, state.get("samplers", ()), strict=False):
            sampler.load_state_dict(copy.deepcopy(saved))

    def read_host_state(self) -> dict[str, Any]:
        """Return the states of the host's generators and of the private ones, inside `RandomStream.drawing`."""
        return {"stream": host_state(), "generators": self.private_states()}

    @contextmanager
    def replay_from(self, state: dict[str, Any] | None) -> Iterator[None]:
        """Draw from an earlier state inside the context, and restore the current state afterwards.

        Args:
            state: A state returned by `read_host_state`; None draws from the current state.
        """
        before = self.read_host_state()
        try:
            if state is not None:
                set_host_state(state["stream"])
                self.load_private(state["generators"])
            yield
        finally:
            set_host_state(before["stream"])
            self.load_private(before["generators"])

    def difference(self, state: dict[str, Any]) -> str:
        """Return why a saved state does not fit these sources; "" if it fits.

        Args:
            state: A state of the loader.
        """
        if "loaders" in state:
            return (
                f"the checkpoint was saved with {len(state['loaders'])} combined loaders, but this run has a single one"
            )
        saved, samplers = state["generators"], state.get("samplers")
        if not match_generators(self.private, saved):
            other = " of other kinds" if len(saved) == len(self.private) else ""
            text = f"the checkpoint's loader had {len(saved)} separate generators"
            return f"{text}, but this one has {len(self.private)}{other}"
        if samplers is not None and len(samplers) != len(self.stateful):
            text = f"the checkpoint's loader had {len(samplers)} samplers with a state_dict"
            return f"{text}, but this one has {len(self.stateful)}"
        return ""

    # -- state outside of checkpoints ----------------------------------------------------------------------------

    def note_counts(self) -> None:
        """Note the counters of samplers before an epoch's order is drawn for the first time."""
        self._last = self._read_counts()
        if self._first is None:
            self._first = self._last

    def warn_of_counts(self, inside: bool) -> None:
        """Warn if a sampler has changed a counter of its own, which is not saved.

        Args:
            inside: Whether an epoch is running, which a resume would start again.
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
                    f"the order depends on it, a resumed run has a different order. Give {name} state_dict and "
                    "load_state_dict, or set_epoch(epoch)."
                )
                self._counting = []
                return

    def _read_counts(self) -> list[dict[str, int]]:
        return [{name: value for name, value in vars(s).items() if type(value) is int} for s in self._counting]


@contextmanager
def preserve_loader_state(loader: Any) -> Iterator[None]:
    """Restore the generators, samplers and datasets of ``loader`` when the context ends.

    Args:
        loader: The loader.
    """
    batches = getattr(loader, "batch_sampler", None)
    samplers = _find_nested([getattr(loader, "sampler", None), batches], Sampler, ("sampler", "batch_sampler"))
    owners = [*samplers, *_find_nested([getattr(loader, "dataset", None)], Dataset)]
    generators = collect_generators([loader, *owners])
    drawn = read_states(generators)
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
    """Return ``value`` if its state can be saved and loaded; else None.

    Args:
        value: Any object.
    """
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
    """Return whether a stream, or a part of one, counts its epochs in ``epoch`` and has no ``set_epoch``."""
    return (
        not (isinstance(dataset, Dataset) and not isinstance(dataset, IterableDataset))
        and type(getattr(dataset, "__dict__", {}).get("epoch")) is int
        and not hasattr(dataset, "set_epoch")
        and get_stateful(dataset) is None
    )


def find_generators(dataset: Any) -> list[Any]:
    """Return the generators among the attributes of a dataset, and of the datasets inside it.

    Args:
        dataset: The dataset.
    """
    return collect_generators(_find_nested([dataset], Dataset))


def collect_generators(owners: Iterable[Any]) -> list[Any]:
    """Return the generators among the attributes of ``owners``, each once.

    Args:
        owners: Any objects.
    """
    generators: dict[int, Any] = {}
    for owner in owners:
        for _, value in _iter_attributes(owner):
            if isinstance(value, _KINDS):
                generators.setdefault(id(value), value)
    return list(generators.values())


def _find_nested(roots: Iterable[Any], kind: type, names: tuple[str, ...] = ()) -> list[Any]:
    """Return ``roots`` and, recursively, every attribute that is a ``kind`` or has one of these names; each once."""
    reached: dict[int, Any] = {}
    waiting = [root for root in roots if root is not None]
    for owner in waiting:  # the list grows during the loop
        if id(owner) not in reached:
            reached[id(owner)] = owner
            waiting += [value for name, value in _iter_attributes(owner) if isinstance(value, kind) or name in names]
    return list(reached.values())


def _iter_attributes(owner: Any) -> Iterable[tuple[str, Any]]:
    """Yield attributes by name; the items of a list or dict whose first item is a known kind are yielded one by one."""
    for name, value in sorted(getattr(owner, "__dict__", {}).items()):
        items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        if isinstance(next(iter(items), None), (*_KINDS, Sampler, Dataset)):
            yield from ((name, item) for item in items)
        else:
            yield name, value


def read_states(generators: list[Any]) -> list[Any]:
    """Return the states of generators.

    Args:
        generators: The generators.
    """
    return [_read_state(generator) for generator in generators]


def load_states(generators: list[Any], states: list[Any]) -> None:
    """Restore generators.

    Args:
        generators: The generators.
        states: States returned by `read_states`.
    """
    for generator, state in zip(generators, states, strict=True):
        _restore_state(generator, state)


def match_generators(generators: list[Any], states: list[Any]) -> bool:
    """Return whether ``states`` belong to the same number of generators, of the same kinds.

    Args:
        generators: The generators.
        states: States returned by `read_states`.
    """
    return len(generators) == len(states) and all(map(_accepts_state, generators, states))


def say_begin_anew(owner: Any, generators: list[Any], states: list[Any]) -> None:
    """Warn that the states in a checkpoint belong to generators that ``owner`` does not have.

    Args:
        owner: The dataset.
        generators: Its generators.
        states: The states in the checkpoint.
    """
    warn(
        f"{type(owner).__name__} has {len(generators)} separate generators, but the checkpoint has {len(states)}, so "
        "they are not restored."
    )


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
