"""Functions for collectives and seeds, for code without an Accelerator."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import update_wrapper
from typing import Any

import torch

from ..common.messages import name_type
from ..common.validation import choose
from ..engine import collectives, seed_everything
from ..engine.nested import convert_to_fp32
from ..engine.rng import seed_rank
from ..strategies.distributed import current_place, current_world
from ..trainer.arguments import set_determinism


def gather(tensor: Any) -> Any:
    """Concatenate the tensors of all ranks along dimension 0 and return the result on every rank.

    See also `Accelerator.gather`.

    Args:
        tensor: A tensor, or nested lists, tuples and dicts of tensors, with the same structure on every rank.

    Returns:
        The gathered values, in the structure of the input. A nested list or tuple without tensors becomes one list
        with the items of all ranks. Any other nested value without tensors becomes a list with one value per rank.

    Raises:
        TypeError: If ``tensor`` contains no tensor.
        DistributedOperationException: On every rank, if the ranks pass different numbers of values, or tensors that
            differ in dtype or in a dimension other than 0.
    """
    world = current_world()
    collectives.check_equal_shapes("gather", tensor, world)
    return collectives.gather(tensor, world)


def gather_object(object: Any) -> list[Any]:
    """Gather the objects of all ranks into one list, in rank order, and return it on every rank.

    Args:
        object: An object that can be pickled. The items of a list or tuple become separate items of the result.
    """
    return collectives.gather_objects(object, current_world())


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """Return a copy of the input with the tensors of rank ``from_process``. The input is not changed.

    Args:
        tensor: A tensor, or nested lists, tuples and dicts of tensors, with the same structure, shapes and dtypes on
            every rank.
        from_process: Rank that sends its tensors. Default: 0.

    Raises:
        DistributedOperationException: On every rank, if the ranks' tensors differ in number, shape or dtype.
    """
    return collectives.broadcast(tensor, current_world(), from_process)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Replace the items of ``object_list`` in place with those of rank ``from_process``, and return the list.

    Args:
        object_list: List of objects that can be pickled.
        from_process: Rank that sends its list. Default: 0.
    """
    world = current_world()
    collectives.check_process(from_process, world.size, "from_process")
    if not isinstance(object_list, list):
        raise TypeError(f"object_list is {name_type(object_list)}, but must be a list, because it is filled in place.")
    object_list[:] = world.broadcast(object_list, from_process)
    return object_list


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Reduce tensors over the ranks, keeping the structure of the input. Means of integer tensors are float64.

    Args:
        tensor: A tensor, or nested lists, tuples and dicts of tensors, of the same shapes and dtypes on every rank.
        reduction: ``"mean"`` (default), ``"sum"``, ``"max"``, ``"min"``, or ``"none"``, which returns this rank's
            tensors.
        scale: Factor by which the result is multiplied, unless ``reduction`` is ``"none"``. Default: 1.0.

    Raises:
        DistributedOperationException: On every rank, if the ranks' tensors differ in number, shape or dtype, unless
            ``reduction`` is ``"none"``.
    """
    return collectives.reduce(tensor, current_world(), reduction, scale)


def pad_across_processes(tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
    """Return tensors padded along ``dim`` to the greatest length on any rank.

    Args:
        tensor: A tensor, or nested lists, tuples and dicts of tensors.
        dim: The dimension to pad. Tensors without this dimension are unchanged. Default: 0.
        pad_index: The value to pad with. Default: 0.
        pad_first: Whether to pad at the beginning instead of the end. Default: False.

    Raises:
        DistributedOperationException: On every rank, if the tensors differ in number or in their number of dimensions.
    """
    return collectives.pad_across_processes(tensor, current_world(), dim, pad_index, pad_first)


def wait_for_everyone() -> None:
    """Wait until every rank has called this function."""
    current_world().barrier()


def set_seed(seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seed the random number generators of Python, NumPy and torch.

    Args:
        seed: Seed from 0 to 2**32 - 1.
        device_specific: Whether to add the rank to the seed. Prepared dataloaders leave the random numbers of the
            ranks as they are then. Default: False.
        deterministic: Whether torch must use deterministic algorithms. Default: False, which leaves torch's setting
            unchanged.
    """
    seed_everything(seed)
    if device_specific:
        seed_rank(seed, current_place()[0])
    if deterministic:
        set_determinism(True, None)


def synchronize_rng_states(rng_types: list[Any], generator: torch.Generator | None = None) -> None:
    """Set the requested RNG states of every rank to those of rank zero.

    Args:
        rng_types: Kinds of RNG: any of ``"torch"`` (the CPU generator), ``"cuda"`` (the generator of this process's
            GPU) and ``"generator"``, or the corresponding members of `RNGType`.
        generator: Generator to which ``"generator"`` refers. Default: None.

    Raises:
        ValueError: If a kind is unknown or not available in this process.
    """
    for kind in rng_types:
        synchronize_rng_state(kind, generator)


def synchronize_rng_state(rng_type: Any = None, generator: torch.Generator | None = None) -> None:
    """Set one RNG state of every rank to that of rank zero; see `synchronize_rng_states`.

    Args:
        rng_type: ``"torch"``, ``"cuda"`` or ``"generator"``, or a member of `RNGType`.
        generator: Generator to which ``"generator"`` refers. Default: None.
    """
    name = choose("rng_type", getattr(rng_type, "value", rng_type), ("torch", "cuda", "generator"))
    world = current_world()
    if name == "torch":
        torch.set_rng_state(world.broadcast(torch.get_rng_state()))
    elif name == "cuda":
        if world.device.type != "cuda":
            raise ValueError(f"rng_type='cuda' needs a CUDA device, but this process uses {world.device}. Use 'torch'.")
        torch.cuda.set_rng_state(world.broadcast(torch.cuda.get_rng_state()))
    else:
        if generator is None:
            raise ValueError("rng_type='generator' needs a torch.Generator. Pass it as generator=...")
        generator.set_state(world.broadcast(generator.get_state()))


class ConvertOutputsToFp32:
    """Callable that runs a function and converts its half-precision outputs to float32."""

    def __init__(self, model_forward: Callable[..., Any]) -> None:
        self.model_forward = model_forward
        update_wrapper(self, model_forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function and return its converted output."""
        return convert_to_fp32(self.model_forward(*args, **kwargs))

    def __getstate__(self) -> Any:
        raise pickle.PicklingError("ConvertOutputsToFp32 can't be pickled. Pickle the unwrapped function instead.")
