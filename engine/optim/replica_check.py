"""Check that all processes hold the same model, bit for bit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...common.messages import abbreviate
from ...strategies import World
from ...strategies.distributed import is_sharded
from ..data import digest
from ..rank_consistency import check_values_match
from .accumulation import Accumulation


class ReplicasDiffer(RuntimeError):
    """Error raised if parameters, or compared buffers, that must be the same differ between processes."""


def check(models: Iterable[nn.Module], world: World, buffers: bool = False) -> None:
    """Raise an error if the models of the processes differ. Must be called on all ranks.

    Sharded tensors and tensors on the meta device are skipped. Buffers are compared only if ``buffers`` is set.

    Raises:
        ValueError: On every process, if the compared tensors differ in their names, shapes or dtypes.
        ReplicasDiffer: On every process, if they differ in their values.
    """
    if world.size == 1:
        return
    models = list(models)
    prefixes = [""] if len(models) == 1 else [f"model {n} ({type(m).__name__}): " for n, m in enumerate(models)]
    tensors = {
        prefix + name: tensor
        for prefix, model in zip(prefixes, models, strict=True)
        for name, tensor in _list_replicated(model, buffers)
    }
    forms = {name: f"{t.dtype} {list(t.shape)}" for name, t in tensors.items()}
    check_values_match("the models differ between the ranks", forms, world, "Build the same model on every rank.")
    digests = world.gather_objects(list(map(digest, tensors.values())))
    columns = zip(tensors, zip(*digests, strict=True), strict=True)
    differing = {name: column for name, column in columns if len(set(column)) > 1}
    if not differing:
        return
    first, column = next(iter(differing.items()))
    source = max(range(world.size), key=column.count)  # one rank of the majority; the lowest rank if there is none
    distances = world.gather_objects(_measure_distance(tensors[first], world, source))
    odd = [rank for rank in range(world.size) if column[rank] != column[source]]
    apart = ", ".join(f"{distances[rank]:.3g} on rank {rank}" for rank in odd[:8])
    kind = "parameters or buffers" if buffers else "parameters"
    raise ReplicasDiffer(
        f"{kind} differ between the processes ({len(differing)} of {len(tensors)}): {abbreviate(differing)}. Compared "
        f"with rank {source}, the largest difference in {first} is {apart}. Call the model that prepare returned, "
        "because only this model reduces gradients. Change weights in the same way on all processes."
    )


def watch_replicas(accumulation: Accumulation, optimizer: Optimizer) -> None:
    """In debug mode, compare the replicas after the first step of ``optimizer`` and then periodically.

    The comparison is skipped in `join_uneven_inputs` and `LocalSGD`, where each process steps separately.
    """
    world, strategy = accumulation.world, accumulation.strategy
    every, step_count = world.debug_interval, 0
    if not every or world.size == 1:
        return

    def check_replicas(*_: Any) -> None:
        nonlocal step_count
        if accumulation.agreement.joined:
            return  # within join_uneven_inputs, where a process may have no more steps to take
        if step_count % every == 0 and strategy.replicas_equal:
            check((strategy.unwrap(model) for model in accumulation.models), world)
        step_count += 1

    optimizer.register_step_post_hook(check_replicas)


def _list_replicated(model: nn.Module, buffers: bool) -> list[tuple[str, Tensor]]:
    named = [*model.named_parameters(), *(model.named_buffers() if buffers else ())]
    return [(name, t.detach()) for name, t in named if not is_sharded(t) and t.device.type != "meta"]


def _measure_distance(tensor: Tensor, world: World, source: int) -> float:
    other = world.broadcast_tensor(tensor.clone().contiguous(), source)
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    return (tensor.cpu().to(wide) - other.cpu().to(wide)).abs().max().item()
