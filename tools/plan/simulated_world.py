"""Simulation of one rank of a world of any size, without communication or computation."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...common.rank_zero import rank_zero_only
from ...strategies import BALLOT_SIZE, Precision, Strategy, World, ballot_dtype, resolve_strategy

if TYPE_CHECKING:
    from types import ModuleType


@contextmanager
def simulated_world(size: int, rank: int, device: Any, resized: Callable[[Tensor], None]) -> Iterator[World]:
    """Create a simulated world with torch's ``fake`` process group, and destroy the group at the end of the context.

    ``device`` replaces ``torch.cuda``. ``resized`` is called with each tensor for which sharding has allocated or
    released memory.
    """
    if dist.is_initialized():
        raise ValueError(
            "this process already has a process group, but a plan creates a simulated one. Make the plan before the "
            "run, or in another process."
        )
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
    """Make FSDP2 schedule its work on ``device``, and pass each tensor that FSDP2 allocates or frees to ``resized``."""
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
    """Clear DTensor's caches, which confuse meshes of destroyed process groups with equal new meshes (torch 2.13)."""
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
    """Wrap DTensor's shape inference so that active dispatch modes do not see its operations on full fake tensors."""
    from torch.utils._python_dispatch import _disable_current_modes

    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return propagate(*args, **kwargs)

    return run


def members(group: Any) -> tuple[int, ...]:
    """Return the global ranks of the members of a process group, which may be given by its name."""
    if isinstance(group, str):
        group = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
    elif not isinstance(group, dist.ProcessGroup):
        group = dist.ProcessGroup.unbox(group)
    return tuple(dist.get_process_group_ranks(group))


def lay_out(strategy: Strategy, world: World, precision: Precision, module: nn.Module) -> nn.Module:
    """Attach a strategy to a world, wrap a module on the meta device with it, and return the module to call."""
    strategy.attach(world, precision)
    return strategy.wrap_without_values(module)


def keep_ties(module: nn.Module, move: Callable[[], object]) -> None:
    """Call ``move``, which replaces a module's parameters, and tie those again that were the same before."""
    places = [(part, name, p) for part in module.modules() for name, p in part._parameters.items() if p is not None]
    move()
    moved: dict[Any, Any] = {}
    for part, name, before in places:
        part._parameters[name] = moved.setdefault(before, part._parameters[name])


VOTES_BYTES = 4 * BALLOT_SIZE  # size of an agreement with its own collective, which sends float32


def ballot_bytes(parameters: Iterable[Tensor]) -> int:
    """Return the size in bytes of a `Ballot` that is reduced together with the gradients of ``parameters``."""
    return BALLOT_SIZE * ballot_dtype(parameters).itemsize


def strategy_named(name: str, size: int) -> Strategy:
    """Return the strategy with this name. ``"auto"`` depends on the world size, ``size``."""
    if name == "auto":
        name = "ddp" if size > 1 else "single"
    return resolve_strategy(name, World())


def local_tensors(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return this rank's shard of each tensor, or the full tensor if it is not sharded."""
    return [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
