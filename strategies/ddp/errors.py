"""What torch's gradient reducer says when it is stuck, in the user's own words: names, the rule, the fix."""

from __future__ import annotations

import re

_UNFINISHED = "Expected to have finished reduction"
_TWICE = "Expected to mark a variable ready only once"
_INDICES = re.compile(r"Parameter indices which did not receive grad for rank \d+: ([\d ]+)")
_INDEX = re.compile(r"Parameter at index (\d+)")
_MAX_NAMES = 30


def explain_reducer_error(error: BaseException, names: list[str], finds_unused: bool = False) -> ValueError | None:
    """Return what to raise instead of ``error``, or None where it is not about the reduction of gradients.

    Args:
        error: what torch raised.
        names: the parameters in the reducer's order.
        finds_unused: whether ``find_unused_parameters`` is on already.
    """
    text = str(error)
    if text.startswith(_UNFINISHED):
        match = _INDICES.search(text)
        return _unused_parameter_error([names[int(i)] for i in match[1].split()] if match else [], finds_unused)
    if text.startswith(_TWICE):
        index = _INDEX.search(text)
        return _ready_twice_error(names[int(index[1])] if index else "a parameter")
    return None


def _unused_parameter_error(names: list[str], finds_unused: bool) -> ValueError:
    shown = ", ".join(names[:_MAX_NAMES]) + (f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else "")
    problem = f"no gradient reached these parameters, so this step's gradients were not reduced: {shown or 'unknown'}."
    if finds_unused:
        return ValueError(
            f"{problem} find_unused_parameters=True leaves out what the model's output does not depend on; these it "
            "does depend on, or the loss does not come from that output. Compute the loss from what the prepared model "
            "returns."
        )
    return ValueError(
        f"{problem} If they are meant to take no part in some steps, use strategy='ddp_find_unused_parameters_true' or "
        "DDP(find_unused_parameters=True); if never, freeze them with requires_grad_(False). If they should take "
        "part, the loss does not depend on all of the model's output: compute it from what the prepared model returns."
    )


def _ready_twice_error(name: str) -> ValueError:
    return ValueError(
        f"the gradient of {name} was ready twice in one backward. Activation checkpointing does that where layers are "
        "checkpointed with use_reentrant=True and used more than once: give torch.utils.checkpoint.checkpoint "
        "use_reentrant=False. If every step computes the same graph, DDP(static_graph=True) allows it as well."
    )
