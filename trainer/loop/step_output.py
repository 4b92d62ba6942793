"""Checks and conversion of the result of ``training_step``."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...common.messages import name_type, warn
from ...common.validation import WrongTypeError

_RULE = "It must return the loss (a tensor), or a dict with the loss under 'loss'."


def loss_in(output: Any, may_skip: bool = False) -> tuple[Tensor, Any]:
    """Return the loss and the weight (None if not set) in a result of ``training_step`` that is not a tensor.

    ``may_skip`` is whether ``training_step`` may return None, as in Lightning. The micro-batch then contributes no
    gradients, and the user is warned.
    """
    if isinstance(output, Mapping):
        loss = output.get("loss")
        if isinstance(loss, Tensor):
            weight = output.get("weight")
            if weight is not None:
                _check_weight(weight)
                weight = weight.reshape(()) if isinstance(weight, Tensor) and weight.ndim else weight
                loss = _ignore_unweighted(loss, weight)
            return loss, weight
        if "loss" in output:
            raise ValueError(f"training_step returned a dict whose 'loss' is {name_type(loss)}. {_RULE}")
        keys = ", ".join(map(repr, output)) or "none"
        raise ValueError(f"training_step returned a dict without 'loss' (keys: {keys}). {_RULE}")
    if output is None and may_skip:
        warn(
            "training_step returned None, so the batch contributes no gradient, but still counts in the mean of its "
            "accumulation group. If a return statement is missing, return the loss. To skip a batch, return "
            "{'loss': loss, 'weight': 0.0}, and return the number of samples as the weight of the other batches."
        )
        return torch.zeros((), requires_grad=True), None
    if output is None:
        raise ValueError(
            "training_step returned None, which is not supported with several processes, a loss scaler (float16) or "
            "an optimizer that calls training_step itself (L-BFGS). Return the loss. To skip a batch, return "
            "{'loss': loss, 'weight': 0.0}, except with L-BFGS."
        )
    raise WrongTypeError(f"training_step returned {name_type(output)}. {_RULE}")


def warn_of_none(rank: int) -> None:
    """Warn on any rank, since each has batches of its own, that one is None and is skipped."""
    text = (
        "the training dataloader yielded None instead of a batch, so training_step is not called for it, and its "
        "samples do not count in the mean of its accumulation group. If this is not intended, check collate_fn."
    )
    if rank == 0:
        warn(text)
    else:
        warnings.warn(f"rank {rank}: {text}", stacklevel=2)


def check_loss(loss: Tensor) -> None:
    """Raise a ValueError if a loss is not a single number with a gradient."""
    if loss.numel() != 1:
        raise ValueError(
            f"training_step returned a loss with the shape {tuple(loss.shape)}, but the loss must be one number. "
            "Return loss.mean()."
        )
    if loss.requires_grad:
        return
    raise ValueError(
        "training_step returned a loss without a gradient (requires_grad=False). Compute "
        "it from the model's output, without detach(), item() or torch.no_grad(), and keep at least one parameter "
        "trainable."
    )


def _ignore_unweighted(loss: Tensor, weight: float | Tensor) -> Tensor:
    """Return the loss, or 0 if its weight is 0, because a mean over nothing is not a number."""
    if isinstance(weight, Tensor):
        return torch.where(weight.to(loss.device) > 0, loss, torch.zeros_like(loss))
    return loss if weight else loss.where(torch.zeros_like(loss, dtype=torch.bool), 0.0)


def _check_weight(weight: Any) -> None:
    """Raise a ValueError if a weight is not a finite number of at least 0. A tensor's value is not checked."""
    number = isinstance(weight, int | float) and not isinstance(weight, bool) and 0 <= weight < float("inf")
    if not number and not (isinstance(weight, Tensor) and weight.numel() == 1):
        weight_text = f"a tensor of shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else repr(weight)
        raise ValueError(
            f"training_step returned {weight_text} as the weight, but the weight must be one finite number of at "
            "least 0. Return the number of items over which the loss is averaged, such as the tokens in the batch."
        )


def for_hooks(output: Any) -> Any:
    """Return the ``outputs`` for the hooks after a batch: usually a dict with the detached loss and other results."""
    if isinstance(output, Tensor):
        return {"loss": output.detach()}
    if not isinstance(output, Mapping):
        return {} if output is None else output
    loss = output.get("loss")
    return {**output, "loss": loss.detach()} if isinstance(loss, Tensor) else dict(output)
