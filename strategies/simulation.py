"""One process that stands for a rank of a world of any size: nothing is sent, nothing is computed.

The model is laid out by the strategy itself, and torch schedules its own communication; only the device under it is
another one, whose streams and events are objects that a plan reads clocks from.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..common.rank_zero import rank_zero_only
from .distributed import World
from .forward_router import BALLOT_SIZE, Router, ballot_dtype, routed
from .fsdp import FSDP
from .precision import Precision
from .registry import resolve_strategy
from .strategy import Strategy

if TYPE_CHECKING:
    from types import ModuleType


@contextmanager
def simulated_world(size: int, rank: int, device: Any, resized: Callable[[Tensor], None]) -> Iterator[World]:
    """A world of ``size`` processes of which this is ``rank``, on torch's ``fake`` process group.

    Args:
        size: number of processes.
        rank: the one that is looked at.
        device: what torch takes for ``torch.cuda``: it has ``Stream``, ``Event``, ``stream`` and ``current_stream``.
        resized: called with a tensor whose memory sharding has given or taken.

    Raises:
        ValueError: if this process is in a process group already.
    """
    if dist.is_initialized():
        raise ValueError("a plan needs a process of its own, and this one is in a process group: plan before the run.")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    before = rank_zero_only.rank  # type: ignore[attr-defined]
    _forget_grids()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with _on(device, resized):
            yield World(rank=rank, size=size, local_rank=0, local_size=1)
    finally:
        rank_zero_only.rank = before  # type: ignore[attr-defined]
        dist.destroy_process_group()
        _forget_grids()


@contextmanager
def _on(device: Any, resized: Callable[[Tensor], None]) -> Iterator[None]:
    """Let FSDP2 schedule its work on ``device``, and tell of the memory that it gives and takes by itself."""
    package = importlib.import_module("torch.distributed.fsdp._fully_shard")
    saved: list[tuple[ModuleType, str, Any]] = []

    def replace(module: ModuleType, name: str, value: Any) -> None:
        saved.append((module, name, getattr(module, name)))
        setattr(module, name, value)

    def reported(change: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        def run(tensor: Tensor) -> None:
            change(tensor)
            resized(tensor)

        return run

    try:
        for submodule in pkgutil.iter_modules(package.__path__):
            module = importlib.import_module(f"{package.__name__}.{submodule.name}")
            if hasattr(module, "_get_device_handle"):
                replace(module, "_get_device_handle", lambda _: device)
            for name in ("alloc_storage", "free_storage"):
                if hasattr(module, name):
                    replace(module, name, reported(getattr(module, name)))
        propagator = importlib.import_module("torch.distributed.tensor._sharding_prop").ShardingPropagator
        name = "_propagate_tensor_meta_non_cached"
        if hasattr(propagator, name):
            replace(propagator, name, _hide_from_modes(getattr(propagator, name)))
        yield
    finally:
        for module, name, value in reversed(saved):
            setattr(module, name, value)


def _forget_grids() -> None:
    """DTensor remembers how it computed, by grids that compare equal although their groups have ended (2.13)."""
    propagator = importlib.import_module("torch.distributed.tensor").DTensor._op_dispatcher.sharding_propagator
    for name in ("propagate_op_sharding", "_propagate_tensor_meta", "_propagate_tensor_meta_cached"):
        cached = getattr(propagator, name, None)
        clear = getattr(cached, "cache_clear", None) or getattr(getattr(cached, "cache", None), "cache_clear", None)
        if clear is not None:
            clear()
    redistribute = importlib.import_module("torch.distributed.tensor._redistribute")
    for owner, name in (
        (torch._C, "_clear_DTensor_sharding_propagator_cache"),
        (redistribute, "clear_redistribute_planner_cache"),
    ):
        if hasattr(owner, name):
            getattr(owner, name)()
    for name in ("_gen_transform_infos", "_gen_transform_infos_non_cached"):
        clear = getattr(getattr(redistribute, name, None), "cache_clear", None)
        if clear is not None:
            clear()


def _hide_from_modes(propagate: Callable[..., Any]) -> Callable[..., Any]:
    """DTensor finds out the form of a result by running the operation on whole tensors, which are nobody's memory."""
    from torch.utils._python_dispatch import _disable_current_modes

    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return propagate(*args, **kwargs)

    return run


def members(group: Any) -> tuple[int, ...]:
    """The ranks of a process group as an operation is given it: boxed, or by its name."""
    if isinstance(group, str):
        group = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    elif not isinstance(group, dist.ProcessGroup):
        group = dist.ProcessGroup.unbox(group)
    return tuple(dist.get_process_group_ranks(group))


def lay_out(strategy: Strategy, world: World, precision: Precision, module: nn.Module) -> nn.Module:
    """Have ``strategy`` wrap a module without values as it would wrap one with values, and return what to call."""
    strategy.attach(world, precision)
    return strategy.wrap_without_values(module)


def method(called: nn.Module, module: nn.Module, name: str) -> Callable[..., Any]:
    """Return a method of the user's module, run as what `lay_out` returned is run."""
    assert isinstance(called, Router)
    return routed(called, called, getattr(module, name))


VOTES_BYTES = 4 * BALLOT_SIZE  # of an agreement by a collective of its own, which sends float32


def ballot_bytes(parameters: Iterable[Tensor]) -> int:
    """Return the size of the votes that ride along with gradients of ``parameters``."""
    return BALLOT_SIZE * ballot_dtype(parameters).itemsize


def varied(strategy: Strategy, *, shard: bool = False, **settings: Any) -> Strategy:
    """Return a strategy like this one with other settings, for a plan to compare.

    Args:
        strategy: the original; it is not changed.
        shard: shard the model, with `FSDP` where the strategy does not.
        settings: see `Strategy.variant`.
    """
    return (FSDP() if shard and not strategy.sharded else strategy).variant(**settings)


def strategy_named(name: str, size: int) -> Strategy:
    """Return the strategy of that name for ``size`` ranks.

    Raises:
        ValueError: for an unknown name, with the nearest known one, or a strategy for one rank.
    """
    if name == "auto":
        name = "ddp" if size > 1 else "single"
    return resolve_strategy(name, World())


def local_tensors(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return this rank's share of each tensor, sharded or not."""
    return [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
