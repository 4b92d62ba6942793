"""Explanations of errors that torch's gradient reducer raises."""

from __future__ import annotations

import re

from ...common.messages import read_text

_UNFINISHED = "Expected to have finished reduction"
_TWICE = "Expected to mark a variable ready only once"
_INDICES = re.compile(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)")
_INDEX = re.compile(r"Parameter at index (\d+)")
_MAX_NAMES = 30


def explain_reducer_error(error: BaseException, names: list[str], finds_unused: bool = False) -> ValueError | None:
    """Return an error that explains ``error`` if a gradient was missing or was ready twice, otherwise None.

    ``names`` lists the parameters' names in the reducer's order. ``finds_unused`` is DDP's ``find_unused_parameters``.
    """
    text = read_text(error)
    if text.startswith(_UNFINISHED):
        match = _INDICES.search(text)
        return _unused_parameter_error([names[int(i)] for i in match[1].split()] if match else [], finds_unused)
    if text.startswith(_TWICE):
        index = _INDEX.search(text)
        return _ready_twice_error(names[int(index[1])] if index else "a parameter")
    return None


def _unused_parameter_error(names: list[str], finds_unused: bool) -> ValueError:
    shown = ", ".join(names[:_MAX_NAMES]) + (f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else "")
    which, they_are, them = (
        ("this parameter", "it is", "it") if len(names) == 1 else ("these parameters", "they are", "them")
    )
    problem = (
        f"no gradient reached {which}, so this step's gradients were not reduced: {shown}."
        if names
        else "no gradient reached some parameters, so this step's gradients were not reduced."
    )
    if finds_unused:
        return ValueError(
            f"{problem} find_unused_parameters=True skips only parameters that the model's output does not depend on, "
            f"but the output depends on {which}. Compute the loss from the complete output of the prepared model."
        )
    return ValueError(
        f"{problem} If {they_are} unused in some steps on purpose, use strategy='ddp_find_unused_parameters_true' or "
        f"DDP(find_unused_parameters=True). If {they_are} never used, freeze {them} with requires_grad_(False). "
        "Otherwise, compute the loss from the complete output of the prepared model."
    )


def _ready_twice_error(name: str) -> ValueError:
    return ValueError(
        f"the gradient of {name} was ready twice in one backward pass. This happens if layers are used more than once "
        "and checkpointed with use_reentrant=True. Pass use_reentrant=False to torch.utils.checkpoint.checkpoint, or, "
        "if every step computes the same graph, use DDP(static_graph=True)."
    )
