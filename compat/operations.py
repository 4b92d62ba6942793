"""The exchanges of an Accelerator as functions, for code that has none at hand: they use the group that is up."""

from __future__ import annotations

from typing import Any

import torch

from ..common.validation import choose
from ..engine import collectives, seed_everything
from ..strategies.distributed import current_place, current_world
from ..trainer.arguments import set_determinism


def gather(tensor: Any) -> Any:
    """Concatenate every process's tensors along dimension 0, on every process; see `Accelerator.gather`."""
    world = current_world()
    collectives.check_equal_shapes("gather", tensor, world)
    return collectives.gather(tensor, world)


def gather_object(object: Any) -> list[Any]:
    """Every process's values in one list, on every process; a list (or tuple) counts as its items."""
    return collectives.gather_objects(object, current_world())


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Return process ``from_process``'s tensors, nested as they are; the input is left as it is."""
    return collectives.broadcast(tensor, current_world(), from_process)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Fill ``object_list``, in place, with process ``from_process``'s, and return it."""
    world = current_world()
    collectives.check_process(from_process, world.size, "from_process")
    if not isinstance(object_list, list):
        raise TypeError(f"broadcast_object_list fills a list in place, not a {type(object_list).__name__}.")
    object_list[:] = world.broadcast(object_list, from_process)
    return object_list


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Combine tensors over the processes; see `Accelerator.reduce`, whose default is the sum."""
    return collectives.reduce(tensor, current_world(), reduction, scale)


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """Pad tensors along ``dim`` to the longest of any process."""
    return collectives.pad_across_processes(tensor, current_world(), dim, pad_index, pad_first)


def wait_for_everyone() -> None:
    """Wait until every process is here."""
    current_world().barrier()


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed Python's, NumPy's and torch's generators.

    Args:
        seed: from 0 to 2**32 - 1.
        device_specific: another seed on each process: its rank is added.
        deterministic: make torch use deterministic algorithms, or raise where there is none.
    """
    if device_specific:
        seed_everything(seed)  # a wrong seed is named as it was given
        seed = (seed + current_place()[0]) % 2**32
    seed_everything(seed)
    if deterministic:
        set_determinism(True, None)


def synchronize_rng_states(rng_types: list[Any], generator: torch.Generator | None = None) -> None:
    """Give every process rank zero's random states.

    Args:
        rng_types: any of ``"torch"``, ``"cuda"`` (the process's own device), ``"generator"``.
        generator: what ``"generator"`` means.
    """
    for kind in rng_types:
        synchronize_rng_state(kind, generator)


def synchronize_rng_state(rng_type: Any = None, generator: torch.Generator | None = None) -> None:
    """Give every process rank zero's random state of one kind; see `synchronize_rng_states`."""
    name = choose("rng_type", getattr(rng_type, "value", rng_type), ("torch", "cuda", "generator"))
    world = current_world()
    if name == "torch":
        torch.set_rng_state(world.broadcast(torch.get_rng_state()))
    elif name == "cuda":
        if world.device.type != "cuda":
            raise ValueError("rng_type='cuda', but this process computes on the CPU.")
        torch.cuda.set_rng_state(world.broadcast(torch.cuda.get_rng_state()))
    else:
        if generator is None:
            raise ValueError("rng_type='generator' needs generator=.")
        generator.set_state(world.broadcast(generator.get_state()))
