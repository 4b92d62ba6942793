"""What a loader's order is drawn from: the run's stream, and what the user's samplers and datasets draw from."""

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
    """The random sources of one loader, read and put back together.

    Args:
        stream: what is drawn from wherever the user gave no generator.
        source: the user's loader.
        samplers: its samplers. Those they hold are found too.
        dataset: the dataset, where what it draws belongs to the order too. Those it holds are found too.
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
            and type(sampler).__module__ != Sampler.__module__  # torch's own count nothing
        ]
        self._first: list[dict[str, int]] | None = None  # what they had counted when this process began
        self._last: list[dict[str, int]] = []

    def state(self) -> dict[str, Any]:
        """Where all of them are now."""
        return {
            "stream": self.stream.get_state(),
            "generators": self.private_states(),
            "samplers": self.sampler_states(),
            "epochs": self.epochs(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go back to a `state`."""
        self.rewind(state)
        self.load_samplers(state)

    def rewind(self, state: dict[str, Any]) -> None:
        """As `load`, where no sampler has been asked for anything since."""
        self.stream.go_to(state["stream"])
        self.load_private(state["generators"])
        self.load_epochs(state)

    def epochs(self) -> list[int]:
        """The epochs that datasets count by themselves."""
        return [dataset.epoch for dataset in self.counting_epochs]

    def load_epochs(self, state: dict[str, Any]) -> None:
        """Put back the epochs that datasets count by themselves; checkpoints from before they were noted have none."""
        for dataset, epoch in zip(self.counting_epochs, state.get("epochs", ()), strict=False):
            dataset.epoch = epoch

    def private_states(self) -> list[Any]:
        """Where the private generators are now."""
        return read_states(self.private)

    def load_private(self, states: list[Any]) -> None:
        """Put the private generators back."""
        load_states(self.private, states)

    def agree(self, world: World) -> None:
        """Take rank zero's private generators, so that all ranks draw one order. All ranks must ask."""
        if self.private:
            self.load_private(world.broadcast(self.private_states()))

    def sampler_states(self) -> list[Any]:
        """What the samplers that have a state say of it."""
        return [copy.deepcopy(sampler.state_dict()) for sampler in self.stateful]

    def load_samplers(self, state: dict[str, Any]) -> None:
        """Put the samplers' own states back; checkpoints from before they were asked have none."""
        for sampler, saved in zip(self.stateful, state.get("samplers", ()), strict=False):
            sampler.load_state_dict(copy.deepcopy(saved))

    def read_host_state(self) -> dict[str, Any]:
        """As `state`, inside of `RandomStream.drawing`, whichever stream it is of."""
        return {"stream": host_state(), "generators": self.private_states()}

    @contextmanager
    def replay_from(self, state: dict[str, Any] | None) -> Iterator[None]:
        """Inside, what is drawn is drawn from where `read_host_state` was, and leaves no trace."""
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
        """Why a saved `state` is not one of these sources; "" if it is."""
        if "loaders" in state:
            return f"the checkpoint was saved with {len(state['loaders'])} combined loaders, this is a single one"
        saved, samplers = state["generators"], state.get("samplers")
        if not match_generators(self.private, saved):
            other = " of other kinds" if len(saved) == len(self.private) else ""
            text = f"the checkpoint's loader drew from {len(saved)} generators of its own"
            return f"{text}, this one has {len(self.private)}{other}"
        if samplers is not None and len(samplers) != len(self.stateful):
            text = f"the checkpoint's loader had {len(samplers)} samplers with a state_dict"
            return f"{text}, this one has {len(self.stateful)}"
        return ""

    # -- what is in no checkpoint --------------------------------------------------------------------------------

    def note_counts(self) -> None:
        """An epoch's order is about to be drawn for the first time."""
        self._last = self._read_counts()
        if self._first is None:
            self._first = self._last

    def warn_of_counts(self, inside: bool) -> None:
        """Say so if a sampler counts by itself, of which nothing is saved.

        Args:
            inside: an epoch is running, and a resume would begin it anew.
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
                    f"{name}.{changed[0]} changed from one epoch to the next, and is in no checkpoint: if the order "
                    f"follows from it, a resumed run has another. Give {name} state_dict and load_state_dict, or "
                    "set_epoch(epoch)."
                )
                self._counting = []
                return

    def _read_counts(self) -> list[dict[str, int]]:
        return [{name: value for name, value in vars(s).items() if type(value) is int} for s in self._counting]


@contextmanager
def preserve_loader_state(loader: Any) -> Iterator[None]:
    """Whatever is read from ``loader`` inside leaves no trace in its generators, its samplers and its datasets."""
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
    """``value``, if it can say and take back where it is; else None."""
    if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
        return None
    try:
        inspect.signature(value.state_dict).bind()
    except TypeError:  # it asks for what only its own loader knows: MosaicML's StreamingDataset
        return None
    except ValueError:  # written in C
        pass
    return value


def _counts_epochs(dataset: Any) -> bool:
    """Whether a stream, or a part of one, counts its epochs in a plain ``epoch``, and cannot be told them."""
    return (
        not (isinstance(dataset, Dataset) and not isinstance(dataset, IterableDataset))
        and type(getattr(dataset, "__dict__", {}).get("epoch")) is int
        and not hasattr(dataset, "set_epoch")
        and get_stateful(dataset) is None
    )


def find_generators(dataset: Any) -> list[Any]:
    """The generators among the attributes of a dataset, and of the datasets that it holds."""
    return collect_generators(_find_nested([dataset], Dataset))


def collect_generators(owners: Iterable[Any]) -> list[Any]:
    """The generators among the attributes of ``owners``, each once."""
    generators: dict[int, Any] = {}
    for owner in owners:
        for _, value in _iter_attributes(owner):
            if isinstance(value, _KINDS):
                generators.setdefault(id(value), value)
    return list(generators.values())


def _find_nested(roots: Iterable[Any], kind: type, names: tuple[str, ...] = ()) -> list[Any]:
    """``roots`` and, from them on, every attribute that is a ``kind`` or has one of these names; each once."""
    reached: dict[int, Any] = {}
    waiting = [root for root in roots if root is not None]
    for owner in waiting:  # which grows
        if id(owner) not in reached:
            reached[id(owner)] = owner
            waiting += [value for name, value in _iter_attributes(owner) if isinstance(value, kind) or name in names]
    return list(reached.values())


def _iter_attributes(owner: Any) -> Iterable[tuple[str, Any]]:
    """Attributes by name; those of a list or dict that begins with an object of its own one by one."""
    for name, value in sorted(getattr(owner, "__dict__", {}).items()):
        items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        if isinstance(next(iter(items), None), (*_KINDS, Sampler, Dataset)):
            yield from ((name, item) for item in items)
        else:
            yield name, value


def read_states(generators: list[Any]) -> list[Any]:
    """Where generators are now."""
    return [_read_state(generator) for generator in generators]


def load_states(generators: list[Any], states: list[Any]) -> None:
    """Put generators back to what `read_states` returned."""
    for generator, state in zip(generators, states, strict=True):
        _restore_state(generator, state)


def match_generators(generators: list[Any], states: list[Any]) -> bool:
    """Whether ``states`` are those of as many generators, of the same kinds."""
    return len(generators) == len(states) and all(map(_accepts_state, generators, states))


def say_begin_anew(owner: Any, generators: list[Any], states: list[Any]) -> None:
    """Warn that a checkpoint's states are those of other generators than ``owner`` has."""
    warn(
        f"{type(owner).__name__} has {len(generators)} generators of its own, in the checkpoint are {len(states)}: "
        "they begin anew."
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
