"""What a run is about to do, and what it found, in words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..engine import Loader
from ..strategies import announce

if TYPE_CHECKING:
    from .trainer import Trainer


def announce_fit(trainer: Trainer, loader: Loader) -> None:
    """Say once what was decided: devices, strategy, precision, effective batch, steps, parameters."""
    trainer.decided = describe_fit(trainer, loader)
    announce(trainer.decided)


def describe_fit(trainer: Trainer, loader: Loader) -> str:
    """The words of `announce_fit`."""
    accelerator = trainer.accelerator
    processes = accelerator.num_processes
    device = str(accelerator.device)
    if accelerator.device.type == "cuda":
        device += f" ({torch.cuda.get_device_name(accelerator.device)})"
    where = f"{device}" if processes == 1 else f"{processes} processes, this one on {device}"
    lines = [f"training on {where}; strategy {accelerator.strategy.name}; precision {accelerator.precision.name}"]
    size = getattr(loader.source, "batch_size", None)
    k = accelerator.gradient_accumulation_steps
    factors = f"x {count(processes, 'process')} x {k} accumulated"
    if isinstance(size, int):
        lines.append(f"effective batch {size * processes * k:,} = {size} per process {factors}")
    else:
        lines.append(f"effective batch: what the loader yields {factors}")
    if loader.left_out:
        lines.append(f"drop_last leaves {count(loader.left_out, 'sample')} of each epoch out")
    if processes > 1 and not trainer.use_distributed_sampler:
        lines.append("each process reads its own loader as it is (use_distributed_sampler=False)")
    idle = "configure_optimizers returned None: nothing is trained"
    lines.append(_steps(trainer) if accelerator.optimizers else idle)
    assert trainer.task is not None
    lines.append(_parameters(trainer.task))
    return "\n".join(lines)


def count(number: int, thing: str) -> str:
    """``"1 step"``, ``"2 steps"``, ``"2 processes"``."""
    return f"{number:,} {thing}" + ("" if number == 1 else "es" if thing.endswith(("s", "ch")) else "s")


def _steps(trainer: Trainer) -> str:
    steps, batches = trainer.estimated_stepping_batches, trainer.num_training_batches
    left = "" if not trainer.progress.step else f"; {trainer.progress.step:,} are done"
    if steps == float("inf"):
        return "optimizer steps: until the loader or someone ends it" + left
    if batches is None:
        return f"{count(int(steps), 'optimizer step')}; the loader has no length{left}"
    per_epoch = -(-batches // trainer.accelerator.gradient_accumulation_steps)
    if left and trainer.max_epochs != -1:  # the batches may have been of another size before
        rest = (trainer.max_epochs - trainer.progress.epoch) * per_epoch
        rest -= trainer.progress.batch // trainer.accelerator.gradient_accumulation_steps
        steps = trainer.progress.step + max(0, rest)
        steps = steps if trainer.max_steps == -1 else min(steps, trainer.max_steps)
    return f"{count(int(steps), 'optimizer step')}, {per_epoch:,} per epoch of {count(batches, 'batch')}{left}"


def _parameters(module: nn.Module) -> str:
    parameters = list(module.parameters())
    trainable = sum(p.numel() for p in parameters if p.requires_grad)
    frozen = sum(p.numel() for p in parameters) - trainable
    size = sum(p.numel() * p.element_size() for p in parameters)
    return f"{trainable:,} trainable parameters, {frozen:,} frozen, {size / 2**20:,.1f} MiB"


def explain_empty(loader: Loader, processes: int) -> str:
    """Why a loader may have yielded nothing, and what to change."""
    source = loader.source
    dataset = getattr(source, "dataset", None)
    try:
        samples: int | None = len(dataset)  # type: ignore[arg-type]
    except TypeError:
        samples = None
    kind = type(source).__name__
    if samples == 0:
        return f"{kind}'s dataset ({type(dataset).__name__}) is empty: give it samples."
    size = getattr(source, "batch_size", None)
    if samples is not None and size and getattr(source, "drop_last", False) and samples < size * processes:
        return (
            f"{kind} has {samples} samples and drop_last=True, which drops a global batch of fewer than "
            f"{size * processes} ({size} x {processes} processes): lower batch_size, or leave drop_last out."
        )
    if loader.limit == 0:
        return "its limit is 0 batches: raise limit_*_batches."
    return f"{kind} ended at once: give an iterable that can be run through again, with at least one batch."


def results(stage: str, found: Iterable[dict[str, float]]) -> str:
    """The values an evaluation found, as lines."""
    lines = []
    for values in found:
        width = max(map(len, values), default=0)
        lines += [f"{stage}: {name:<{width}}  {value:.6g}" for name, value in values.items()]
    return "\n".join(lines) or f"{stage}: nothing was logged"
