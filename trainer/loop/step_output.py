"""What a step may return: a loss that can be trained on, alone or in a dict, with what it weighs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...common.messages import warn


def loss_in(output: Any, may_skip: bool = False) -> tuple[Tensor, Any]:
    """The loss in what ``training_step`` returned, where that is no tensor, and the weight reported with it.

    Args:
        output: What it returned.
        may_skip: None is a micro-batch without gradients, as in Lightning, and is warned of.

    Raises:
        ValueError, TypeError: Names what was returned and what may be.
    """
    if isinstance(output, Mapping):
        loss = output.get("loss")
        if isinstance(loss, Tensor):
            weight = output.get("weight")
            if weight is not None:
                _check_weight(weight)
            return loss, weight
        raise ValueError(
            f"training_step returned a dict whose 'loss' is {loss!r}; its keys are {', '.join(map(str, output))}. "
            "Put the loss, a tensor with a gradient, under 'loss'."
        )
    if output is None and may_skip:
        warn(
            "training_step returned None: the batch adds no gradient, and counts in its group's mean all the same. "
            "Return {'loss': loss, 'weight': number of samples} to weigh batches, with weight 0.0 to leave one out."
        )
        return torch.zeros((), requires_grad=True), None
    if output is None:
        raise ValueError(
            "training_step returned None, so there is no loss to train on; on several processes, and in float16, a "
            "batch can't be left out so. Return the loss; to leave a batch out, return {'loss': loss, 'weight': 0.0}."
        )
    raise TypeError(
        f"training_step returned a {type(output).__name__}; it must return the loss, a tensor, or a dict with it."
    )


def check_loss(loss: Tensor) -> None:
    """Raise a ValueError for a loss that is not one number with a gradient."""
    if loss.numel() != 1:
        raise ValueError(
            f"training_step returned a loss of shape {tuple(loss.shape)}; it must be one number: return its mean()."
        )
    if loss.requires_grad:
        return
    raise ValueError(
        f"training_step returned a loss without a gradient (shape {tuple(loss.shape)}, requires_grad=False). Compute "
        "it from the model's output, without detach(), item() or torch.no_grad(), and leave some parameter trainable."
    )


def _check_weight(weight: Any) -> None:
    number = isinstance(weight, int | float) and not isinstance(weight, bool) and 0 <= weight < float("inf")
    if not number and not (isinstance(weight, Tensor) and weight.numel() == 1):
        weight_text = f"a tensor of shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else repr(weight)
        raise ValueError(
            f"training_step returned the weight {weight_text}; it must be one number of at least 0: what the loss is a "
            "mean over, such as the batch's number of tokens."
        )


def for_hooks(output: Any) -> Any:
    """What the hooks after a batch are handed: the step's dict, or one with its loss, which is detached."""
    if isinstance(output, Tensor):
        return {"loss": output.detach()}
    if not isinstance(output, Mapping):
        return {} if output is None else output
    loss = output.get("loss")
    return {**output, "loss": loss.detach()} if isinstance(loss, Tensor) else dict(output)
