"""Checks that a model can be sharded."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..distributed import is_sharded
from .deferred_init import Tape


def check_device(device: torch.device) -> None:
    """Check that ``fully_shard`` of the installed torch supports a device."""
    if device.type == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
        raise ValueError(
            f"strategy='fsdp' on CPU needs torch 2.7 or newer, but this is torch {torch.__version__}. Upgrade torch."
        )


def check_parameters(module: nn.Module, blocks: list[nn.Module], storage: torch.dtype | None) -> None:
    """Check that torch's ``fully_shard`` supports the parameters of each block and those outside the blocks.

    ``blocks`` must list inner modules first. ``storage`` is the dtype to which floating-point parameters are converted
    before they are sharded, or None.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    single = [name for parameter, name in names.items() if not parameter.ndim]
    if single:
        raise ValueError(
            f"0-d parameters can't be sharded: {', '.join(single[:8])}. Give each a dimension, as in "
            "nn.Parameter(torch.ones(1)) instead of nn.Parameter(torch.tensor(1.0))."
        )
    empty = [name for parameter, name in names.items() if parameter.requires_grad and not parameter.numel()]
    if empty:
        raise ValueError(
            f"torch can't reduce the gradients of parameters without elements: {', '.join(empty[:8])}. Freeze such "
            "parameters with requires_grad_(False)."
        )
    checked: set[nn.Parameter] = set()
    for block in (*blocks, module):
        formats: dict[torch.dtype, str] = {}
        for parameter in block.parameters():
            if parameter not in checked and parameter.requires_grad:
                dtype = parameter.dtype if storage is None or not parameter.is_floating_point() else storage
                formats.setdefault(dtype, names[parameter])
            checked.add(parameter)
        if len(formats) > 1:
            listed = ", ".join(f"{name} is {dtype}" for dtype, name in formats.items())
            location = type(block).__name__ if block is not module else f"{type(block).__name__}, outside of its blocks"
            raise ValueError(
                f"the parameters of {location} differ in dtype: {listed}. Parameters that are gathered together must "
                "have the same dtype. Convert them, choose a precision that converts them (such as 'bf16-true'), or "
                "list the classes of their modules in auto_wrap_policy."
            )


def check_parallelized(module: nn.Module, size: int) -> None:
    """Check that the model's ``parallelize(mesh)`` has sharded parameters."""
    if not any(is_sharded(parameter) for parameter in module.parameters()):
        raise ValueError(
            f"{type(module).__name__}.parallelize(mesh) sharded no parameter, so the ranks of "
            f"tensor_parallel_size={size} would all do the same work. In parallelize, call "
            "torch.distributed.tensor.parallel.parallelize_module with the names of existing submodules."
        )


def check_unchanged(tape: Tape, tensor: Tensor, words: str) -> None:
    """Check that a parameter or buffer without memory was changed only by operations that ``tape`` has recorded."""
    if not tape.is_unchanged(tensor):
        raise ValueError(
            f"{words} was written to after it was created without memory, so the written values are lost. Write them "
            "inside init_module() or configure_model, load weights with load_state_dict(..., assign=True), or write "
            "them after the model is prepared."
        )
