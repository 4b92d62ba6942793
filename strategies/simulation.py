"""One process that stands for a rank of a world of any size: nothing is sent, nothing is computed.

The model is laid out by the strategy itself, and torch schedules its own communication; only the device under it is
another one, whose streams and events are objects that a plan reads clocks from.
"""

from __future__ import annotations

import copy
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor, nn

from .ddp import DDP
from .distributed import Layout, World
from .forward_router import BALLOT_SIZE, Router, routed
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

    def put(module: ModuleType, name: str, value: Any) -> None:
        saved.append((module, name, getattr(module, name)))
        setattr(module, name, value)

    def told(change: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
        def run(tensor: Tensor) -> None:
            change(tensor)
            resized(tensor)

        return run

    try:
        for found in pkgutil.iter_modules(package.__path__):
            module = importlib.import_module(f"{package.__name__}.{found.name}")
            if hasattr(module, "_get_device_handle"):
                put(module, "_get_device_handle", lambda _: device)
            for name in ("alloc_storage", "free_storage"):
                if hasattr(module, name):
                    put(module, name, told(getattr(module, name)))
        propagator = importlib.import_module("torch.distributed.tensor._sharding_prop").ShardingPropagator
        name = "_propagate_tensor_meta_non_cached"
        if hasattr(propagator, name):
            put(propagator, name, _unseen(getattr(propagator, name)))
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


def _unseen(propagate: Callable[..., Any]) -> Callable[..., Any]:
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
    """Have ``strategy`` wrap a module without memory as it would wrap one with values; return what to call.

    Replicas are not wrapped: torch's reducer takes no tensors without values (2.13). `reductions` says what it sends.
    """
    if isinstance(strategy, FSDP) and not hasattr(torch.cpu.Stream, "record_event"):
        raise ValueError(f"a plan of strategy='fsdp' needs a newer torch than {torch.__version__}.")
    strategy.attach(world, precision)
    if isinstance(strategy, FSDP):
        if strategy.cpu_offload:
            raise ValueError("a plan does not know host memory, so none of FSDP(cpu_offload=True): leave it out.")
        strategy._build = lambda module, unbuilt: None  # type: ignore[method-assign]
        return strategy.wrap(module)
    return Router(module, precision.context(world.device), precision.compute is not None)


def method(called: nn.Module, module: nn.Module, name: str) -> Callable[..., Any]:
    """A method of the user's module, run as `lay_out`'s result is run."""
    assert isinstance(called, Router)
    return routed(called, called, getattr(module, name))


def reductions(strategy: Strategy, order: list[Tensor], *, ballot: bool) -> list[list[int]] | None:
    """How replicas reduce gradients that become ready in ``order``: their numbers, by what is sent together.

    Args:
        strategy: how the model lies on the world.
        order: its parameters.
        ballot: whether what the processes agree on rides along, as the number -1.

    Raises:
        ValueError: for replicas that send something else.
    """
    if isinstance(strategy, FSDP) or strategy.world.size == 1:
        return None
    if not isinstance(strategy, DDP):
        raise ValueError(f"a plan does not know what strategy={strategy.name!r} sends; it knows 'ddp' and 'fsdp'.")
    asked = {
        "comm_hook": strategy.comm_hook,
        "zero": strategy.zero,
        "local_sgd_steps": strategy.local_steps,
        "sync_batchnorm": strategy.sync_batchnorm,
    }
    for name in (name for name, on in asked.items() if on):
        raise ValueError(f"a plan does not know what DDP({name}=...) sends; leave it out to plan the rest.")
    from torch.utils._python_dispatch import _disable_current_modes

    cap = strategy.options["bucket_cap_mb"]
    limits = [dist._DEFAULT_FIRST_BUCKET_BYTES, 25 * 2**20] if cap is None else [int(cap * 2**20)] * 2
    with _disable_current_modes():
        forms = [torch.empty(p.shape, dtype=p.dtype, device="meta") for p in order]
        if ballot:
            forms.insert(0, ballot_of(order))
        buckets = dist._compute_bucket_assignment_by_size(forms, limits, [False] * len(forms))[0]
    return [[at - ballot for at in bucket] for bucket in buckets]


def reduces_all(strategy: Strategy) -> bool:
    """Whether replicas also reduce gradients of parameters that took no part in the step."""
    return isinstance(strategy, DDP) and strategy.world.size > 1


BALLOT_BYTES = 4 * BALLOT_SIZE


def ballot_of(parameters: Iterable[Tensor]) -> Tensor:
    """What the processes agree on, as it rides along with gradients of ``parameters``."""
    double = all(parameter.dtype == torch.float64 for parameter in parameters)
    return torch.empty(BALLOT_SIZE, dtype=torch.float64 if double else torch.float32, device="meta")


def kept_to_send(strategy: Strategy, module: nn.Module) -> int:
    """Bytes in which replicas keep copies of gradients to send them from."""
    if not isinstance(strategy, DDP) or strategy.world.size == 1 or strategy.options["gradient_as_bucket_view"]:
        return 0
    return sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)


def copied_buffers(strategy: Strategy, module: nn.Module) -> list[int]:
    """The bytes of each broadcast by which replicas get rank zero's buffers, once per step."""
    if not isinstance(strategy, DDP) or strategy.world.size == 1 or not strategy.options["broadcast_buffers"]:
        return []
    sizes: dict[torch.dtype, int] = {}
    for buffer in module.buffers():
        sizes[buffer.dtype] = sizes.get(buffer.dtype, 0) + buffer.numel() * buffer.element_size()
    return list(sizes.values())


_OPTIONS = {
    "replicate": "shards to replicate",
    "recompute": "activations to compute again",
    "gather": "parameters to gather",
}


def varied(strategy: Strategy, **changes: Any) -> Strategy:
    """A strategy like this one with other settings, for a plan to compare.

    Args:
        strategy: it stays as it is.
        changes: ``replicate``, ``recompute`` (True: the activations of every block), ``shard`` (True: FSDP), or
            ``gather`` (the format parameters are gathered in; gradients are reduced in float32).
    """
    if changes.pop("shard", False) and not isinstance(strategy, FSDP):
        strategy = FSDP()
    for setting in ("replicate", "recompute", "gather"):
        if setting in changes and not isinstance(strategy, FSDP):
            raise ValueError(f"strategy={strategy.name!r} has no {_OPTIONS[setting]}: that is for 'fsdp'.")
    made: Any = copy.copy(strategy)
    for name in ("_tapes", "_roots", "_moved"):  # what the original knows of its models
        if hasattr(made, name):
            setattr(made, name, type(getattr(made, name))())
    if "replicate" in changes:
        old = made.layout
        made.layout = Layout(old.data, changes.pop("replicate"), old.tensor)
    if "recompute" in changes:
        made.activation_checkpointing_policy = changes.pop("recompute")
    if "gather" in changes:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        made.mixed_precision = MixedPrecisionPolicy(changes.pop("gather"), torch.float32)
    assert not changes, changes
    return made


def called(name: str, size: int) -> Strategy:
    """The strategy of that name for ``size`` processes.

    Raises:
        ValueError: for an unknown one, with the nearest known, or one that is for one process.
    """
    if name == "auto":
        name = "ddp" if size > 1 else "single"
    return resolve_strategy(name, World())


def grid(strategy: Strategy, size: int) -> dict[str, int]:
    """How the strategy lays ``size`` processes out: replicas, shards of each, processes that share a sample."""
    if not isinstance(strategy, FSDP):
        return {"replicate": size, "shard": 1, "tensor": 1}
    sizes = strategy.layout.sizes(size)
    return {"replicate": strategy.layout.replicate, "shard": sizes["data_parallel"], "tensor": strategy.layout.tensor}


def gathers_as_stored(strategy: Strategy) -> bool:
    """Whether shards are gathered in the format they are kept in."""
    return isinstance(strategy, FSDP) and strategy.mixed_precision is None


def recomputes(strategy: Strategy) -> bool:
    """Whether blocks keep only their inputs for backward."""
    return bool(getattr(strategy, "activation_checkpointing_policy", None))


def own_parts(tensors: Iterable[Tensor]) -> list[Tensor]:
    """What this process has of each, sharded or not."""
    return [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
