"""Recording of the time, memory and communication of operations on fake tensors, on a simulated device."""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from . import simulated_world
from .op_costs import Prices, estimate_collective_seconds


class Event:
    """Simulated ``torch.cuda.Event``, which is a point in time in a stream."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.at = 0.0
        self.clocks: Clocks | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Set the event to the time at which all work in ``stream`` is complete."""
        if stream is None:
            assert self.clocks is not None
            stream = self.clocks.current
        self.at = stream.time

    def wait(self, stream: Stream | None = None) -> None:
        """Make subsequent work in ``stream`` wait for the event."""
        if stream is None:
            assert self.clocks is not None
            stream = self.clocks.current
        stream.wait_event(self)

    def query(self) -> bool:
        """Return True, because all work appears complete to the host, which has no clock."""
        return True

    def synchronize(self) -> None:
        """Do nothing."""


class Stream:
    """Simulated ``torch.cuda.Stream``. Its ``time`` is the time in seconds at which all of its work is complete."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.time = 0.0
        self.device = None

    def wait_stream(self, other: Stream) -> None:
        """Make subsequent work in this stream wait for the current work of another stream."""
        self.time = max(self.time, other.time)

    def wait_event(self, event: Event) -> None:
        """Make subsequent work in this stream wait for an event."""
        self.time = max(self.time, event.at)

    def record_event(self, event: Event | None = None) -> Event:
        """Set an event to the time at which all work in this stream is complete, and return it."""
        event = Event() if event is None else event
        event.at = self.time
        return event

    def synchronize(self) -> None:
        """Do nothing."""


class Clocks:
    """Simulated replacement for the torch module of a device, such as ``torch.cuda``."""

    def __init__(self) -> None:
        self.current = self.compute = Stream()
        self._groups: dict[tuple[int, ...], float] = {}
        self.Stream = Stream

    def Event(self, *_: Any, **__: Any) -> Event:
        """Return a new event that is not recorded yet."""
        event = Event()
        event.clocks = self
        return event

    def current_stream(self, *_: Any) -> Stream:
        """Return the current stream."""
        return self.current

    def current_device(self) -> int:
        """Return 0, the index of the only device."""
        return 0

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Return a context in which ``stream`` is the current stream."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def spend(self, seconds: float) -> None:
        """Add an operation of known duration to the current stream."""
        self.current.time += seconds

    def exchange(self, group: tuple[int, ...], seconds: float, *, wait: bool) -> float:
        """Add a collective, which starts after the work in the current stream and earlier collectives of ``group``.

        Return the time at which the collective ends, in seconds. If ``wait``, the current stream waits for it.
        """
        end = max(self.current.time, self._groups.get(group, 0.0)) + seconds
        self._groups[group] = end
        if wait:
            self.current.time = end
        return end


PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer"
ACTIVATIONS, GATHERED, BATCH = "activations", "gathered", "batch"
CATEGORIES = (PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS, GATHERED, BATCH)

# Operations of torch.ops.c10d and torch.ops._c10d_functional: their kind, and which argument or result is the whole.
_KINDS = {
    "_allgather_base_": ("all_gather", 0),
    "allgather_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "broadcast_": ("broadcast", 0),
    "alltoall_base_": ("all_to_all", 1),
    "all_gather_into_tensor": ("all_gather", -1),
    "all_gather_into_tensor_out": ("all_gather", -1),
    "all_gather_into_tensor_coalesced": ("all_gather", -1),
    "reduce_scatter_tensor": ("reduce_scatter", 0),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "all_reduce": ("all_reduce", 0),
    "all_reduce_": ("all_reduce", 0),
    "all_reduce_coalesced": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
    "all_to_all_single": ("all_to_all", 0),
}


@dataclass
class Memory:
    """Record of the memory in use, in bytes.

    Attributes:
        live: Memory in use, by category.
        peak: Memory in use at the peak since the last `mark`, by category.
        most: Total memory at the peak.
    """

    live: Counter[str] = field(default_factory=Counter)
    peak: dict[str, int] = field(default_factory=dict)
    most: int = 0

    def __post_init__(self) -> None:
        self._storages: dict[int, tuple[Any, int, str]] = {}
        self._total = 0

    def hold(self, tensor: Tensor, category: str) -> None:
        """Count the memory of ``tensor`` until it is freed, unless it is already counted."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._storages:
            size = storage.nbytes()
            self._storages[key] = (weakref.ref(storage, lambda _: self._drop(key)), size, category)
            self._add(size, category)

    def name(self, tensors: Iterable[Tensor], category: str) -> None:
        """Move the memory of ``tensors`` to another category; memory that is not counted is skipped."""
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            if key in self._storages:
                reference, size, old = self._storages[key]
                self._storages[key] = (reference, size, category)
                self.live[old] -= size
                self.live[category] += size

    def resized(self, tensor: Tensor) -> None:
        """Update the recorded size of a tensor that sharding has resized, and move it to the category ``GATHERED``."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._storages:
            reference, old, category = self._storages[key]
            self._storages[key] = (reference, size, GATHERED)
            self._add(-old, category)
            self._add(size, GATHERED)
        else:
            self.hold(tensor, GATHERED)

    def mark(self) -> None:
        """Reset the peak to the memory in use."""
        self.most = 0
        self._add(0, ACTIVATIONS)

    def _add(self, size: int, category: str) -> None:
        self.live[category] += size
        self._total += size
        if self._total > self.most:
            self.most = self._total
            self.peak = dict(self.live)

    def _drop(self, key: int) -> None:
        _, size, category = self._storages.pop(key)
        self.live[category] -= size
        self._total -= size


@dataclass
class Traffic:
    """Communication of one process in one step.

    Attributes:
        count: Number of collectives, by kind.
        size: Total bytes of the full tensors, such as the outputs of all-gathers, by kind.
    """

    count: Counter[str] = field(default_factory=Counter)
    size: Counter[str] = field(default_factory=Counter)

    def add(self, kind: str, size: int) -> None:
        """Count a collective, with the size of its full tensor in bytes."""
        self.count[kind] += 1
        self.size[kind] += size


class Meter(TorchDispatchMode):
    """Dispatch mode that records the time, memory and communication of operations on fake tensors.

    Attributes:
        traffic: Number and size of the collectives since `begin`, by kind.
        launched: Number of operations that the host has launched on the device since `begin`.
        spent: Seconds spent in the compute stream since `begin`, without collectives, by cause.
        category: The memory category of subsequent allocations.
    """

    def __init__(self, clocks: Clocks, prices: Prices, memory: Memory) -> None:
        super().__init__()
        from torch._subclasses.fake_tensor import FakeTensor

        self.clocks = clocks
        self.prices = prices
        self.memory = memory
        self.category = ACTIVATIONS
        self.begin()
        self._plain = frozenset((Tensor, torch.nn.Parameter, FakeTensor))
        self._ready: dict[int, float] = {}
        self._members: dict[Any, tuple[int, ...]] = {}

    def begin(self) -> None:
        """Reset the recorded times, counts and memory peak. Memory in use remains counted."""
        self.traffic = Traffic()
        self.launched = 0
        self.spent: dict[str, float] = defaultdict(float)
        self.prices.flops = 0
        self.memory.mark()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._plain.issuperset(types):
            return NotImplemented  # a subclass that consists of several tensors, which are counted separately
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        space = func.namespace
        if space == "c10d" or space == "_c10d_functional":
            self._exchange(func._opname if hasattr(func, "_opname") else func._overloadpacket.__name__, args, out)
        else:
            seconds, reason = self.prices.seconds(func, args, kwargs, out)
            if seconds:
                self.launched += 1
                self.clocks.spend(seconds)
                if self.clocks.current is self.clocks.compute:
                    self.spent[reason] += seconds
        if isinstance(out, Tensor):
            self.memory.hold(out, self.category)
        elif isinstance(out, list | tuple):
            for item in out:
                if isinstance(item, Tensor):
                    self.memory.hold(item, self.category)
        return out

    def _exchange(self, name: str, args: Any, out: Any) -> None:
        if name == "wait_tensor":
            current = self.clocks.current
            current.time = max(current.time, self._ready.pop(args[0].untyped_storage()._cdata, 0.0))
            return
        if name not in _KINDS:
            if name in ("barrier", "monitored_barrier_", "_wrap_tensor_autograd"):
                return
            raise ValueError(f"the collective {name!r} is not supported in a plan. Please report it as an issue.")
        kind, place = _KINDS[name]
        whole = _flatten(out if place < 0 else args[place])
        size = sum(tensor.numel() * tensor.element_size() for tensor in whole)
        ranks = self._find_ranks(args)
        self.launched += 1
        self.traffic.add(kind, size)
        functional = isinstance(args[-1], str)
        end = self.clocks.exchange(
            ranks, estimate_collective_seconds(kind, size, ranks, self.prices.gpu), wait=not functional
        )
        if functional:
            for tensor in _flatten(out):
                self._ready[tensor.untyped_storage()._cdata] = end
        elif kind == "reduce_scatter":
            self.memory.name(_flatten(args[1]), GATHERED)
            self.memory.name(_flatten(args[0]), GRADIENTS)
        elif kind == "all_gather":
            self.memory.name(whole, GATHERED)

    def _find_ranks(self, args: Any) -> tuple[int, ...]:
        for arg in args:
            if isinstance(arg, torch.ScriptObject):
                return simulated_world.members(arg)
        name = args[-1]
        if name not in self._members:
            self._members[name] = simulated_world.members(name)
        return self._members[name]


def _flatten(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _flatten(item)]
    return []
