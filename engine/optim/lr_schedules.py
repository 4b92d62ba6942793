"""`lr_schedule`: learning rate schedules by name."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ...common.validation import check_number, choose

_NAMES = ("constant", "linear", "cosine", "warmup_stable_decay")
_DECAYS = ("linear", "cosine", "1-sqrt")


@dataclass(frozen=True)
class _Factor:
    """Factor of the learning rate at each step. `LambdaLR` saves its attributes, as it does not for a function."""

    kind: str
    warmup: int
    decay_start: int
    end: int
    min_ratio: float

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return (step + 1) / self.warmup
        if step < self.decay_start or self.kind == "constant":
            return 1.0
        progress = min(1.0, (step - self.decay_start) / max(1, self.end - self.decay_start))
        if self.kind == "cosine":
            remaining = (1 + math.cos(math.pi * progress)) / 2
        else:
            remaining = 1 - (progress if self.kind == "linear" else math.sqrt(progress))
        return self.min_ratio + (1 - self.min_ratio) * remaining


def lr_schedule(
    name: str,
    optimizer: Optimizer,
    steps: float,
    *,
    warmup_steps: float = 0,
    decay_steps: float = 0.2,
    decay: str = "linear",
    min_lr_ratio: float = 0.0,
) -> LambdaLR:
    """Return a learning rate schedule that is stepped after each optimizer step, after a linear warmup.

    In ``configure_optimizers``, pass it as ``{"scheduler": lr_schedule(...), "interval": "step"}``. Its arguments are
    part of checkpoints. transformers' ``get_scheduler`` knows the same names, and others.

    Args:
        name: ``"constant"``, ``"linear"`` or ``"cosine"`` (from the end of the warmup to the end of the run), or
            ``"warmup_stable_decay"``, which stays constant until its decay (Hägele et al., 2024,
            https://arxiv.org/abs/2405.18392).
        optimizer: Optimizer with the peak learning rate.
        steps: Number of optimizer steps of the run, such as ``self.trainer.estimated_stepping_batches``.
        warmup_steps: Length of the warmup, whose last step has the peak. A value below 1 is a fraction of ``steps``.
            Default: 0.
        decay_steps: Length of the decay of ``"warmup_stable_decay"``. A value below 1 is a fraction of ``steps``.
            Default: 0.2.
        decay: Shape of the decay of ``"warmup_stable_decay"``: ``"linear"`` (default), ``"cosine"`` or ``"1-sqrt"``.
        min_lr_ratio: Final learning rate as a fraction of the peak. Default: 0.0.

    Raises:
        ValueError: If an argument is invalid, or ``steps`` is infinite and the schedule needs it.

    Examples:
        >>> import torch
        >>> from treadle.optim import lr_schedule
        >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        >>> schedule = lr_schedule("warmup_stable_decay", optimizer, 10, warmup_steps=2, decay_steps=4)
        >>> [schedule.lr_lambdas[0](step) for step in range(10)]
        [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    kind, shape = choose("name", name, _NAMES), choose("decay", decay, _DECAYS)
    for argument, length in (("warmup_steps", warmup_steps), ("decay_steps", decay_steps)):
        if check_number(argument, length, 0) > 1 and length % 1:
            raise ValueError(f"{argument}={length} must be a number of steps, or a fraction below 1 of the run.")
    if check_number("min_lr_ratio", min_lr_ratio, 0) > 1:
        raise ValueError(f"min_lr_ratio={min_lr_ratio} must be a fraction of the peak, at most 1.")
    needs_length = kind != "constant" or 0 < warmup_steps < 1
    if needs_length and not math.isfinite(steps):
        raise ValueError(f"{name!r} needs the length of the run, but steps={steps}. Set Trainer(max_steps=...).")
    warmup, decaying = (
        math.ceil(length * steps) if 0 < length < 1 else int(length)
        for length in (warmup_steps, decay_steps if kind == "warmup_stable_decay" else 0)
    )
    if needs_length and warmup + decaying > steps:
        both = f"warmup_steps={warmup_steps}" + (f" and decay_steps={decay_steps}" if decaying else "")
        raise ValueError(f"{both} must fit into the run, steps={steps}. Reduce {'one' if decaying else 'it'}.")
    end = int(steps) if needs_length else 0
    if kind == "warmup_stable_decay":
        return LambdaLR(optimizer, _Factor(shape, warmup, end - decaying, end, min_lr_ratio))
    return LambdaLR(optimizer, _Factor(kind, warmup, warmup, end, min_lr_ratio))
