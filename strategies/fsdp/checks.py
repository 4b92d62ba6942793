"""What can not be sharded, in words, before anything is changed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..distributed import is_sharded
from .deferred_init import Tape


def check_device(device: torch.device) -> None:
    """See that this torch's ``fully_shard`` computes on ``device``.

    Raises:
        ValueError: for the CPU under a torch that lacks what it needs there (2.6).
    """
    if device.type == "cpu" and not hasattr(torch.cpu.Stream, "record_event"):
        raise ValueError(f"strategy='fsdp' on CPU needs a newer torch than {torch.__version__}.")


def check_parameters(module: nn.Module, blocks: list[nn.Module], storage: torch.dtype | None) -> None:
    """See that torch's ``fully_shard`` takes each block, and what is in none.

    Args:
        module: the user's model.
        blocks: its parts that are gathered as one, inner ones before those around them.
        storage: what floating-point parameters are converted to first.

    Raises:
        ValueError: with the names of parameters that are single numbers, or none, or of several formats in one block.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    single = [name for parameter, name in names.items() if not parameter.ndim]
    if single:
        raise ValueError(
            f"{', '.join(single[:8])}: a parameter without dimensions can't be sharded. Give it one: "
            "nn.Parameter(torch.ones(1)) in place of nn.Parameter(torch.tensor(1.0))."
        )
    empty = [name for parameter, name in names.items() if parameter.requires_grad and not parameter.numel()]
    if empty:
        raise ValueError(
            f"{', '.join(empty[:8])}: torch can't reduce the gradient of a parameter without elements (2.13). Freeze "
            "it with requires_grad_(False)."
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
                f"in {location}, {listed}: parameters that are gathered as one must be of one format. Convert them, "
                "choose a precision that does (such as 'bf16-true'), or name the parts in auto_wrap_policy."
            )


def check_parallelized(module: nn.Module, size: int) -> None:
    """See that the model's ``parallelize(mesh)`` has shared out some of its work.

    Raises:
        ValueError: if it has not: the processes would do the same work ``size`` times.
    """
    if not any(is_sharded(parameter) for parameter in module.parameters()):
        raise ValueError(
            f"{type(module).__name__}.parallelize(mesh) left every parameter as it was, so tensor_parallel_size={size} "
            f"would do the same work {size} times. Call torch.distributed.tensor.parallel.parallelize_module in it, "
            "with names of parts that exist."
        )


def check_unchanged(tape: Tape, tensor: Tensor, words: str) -> None:
    """See that what ``tape`` remembers of a tensor without memory is all that was written to it.

    Raises:
        ValueError: if it is not.
    """
    if not tape.is_unchanged(tensor):
        raise ValueError(
            f"{words} was written to after it was built without memory, so what was written is lost. Do it within "
            "init_module() or configure_model, load weights with load_state_dict(..., assign=True), or do it once the "
            "model is prepared."
        )
