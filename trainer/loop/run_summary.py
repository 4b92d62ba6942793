"""What a run is about to do, and what it found, in words."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from ...callbacks import ModelCheckpoint, RunReport, folders
from ...common.messages import announce
from ...engine import CheckpointStore, Loader, list_compiled_names
from ...engine.checkpoint import STATE, has_part

if TYPE_CHECKING:
    from ..trainer import Trainer

_SHOWN = 8  # metrics in one line


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
    assert trainer.task is not None
    lines.append(_batch(trainer, loader))
    if loader.left_out:
        lines.append(f"drop_last leaves {count(loader.left_out, 'sample')} of each epoch out")
    if processes > 1 and not trainer.use_distributed_sampler:
        lines.append("each process reads its own loader as it is (use_distributed_sampler=False)")
    if not accelerator.optimizers:
        lines.append("configure_optimizers returned None: nothing is trained")
    else:
        lines.append((_steps if trainer.task.automatic_optimization else _manual_steps)(trainer))
    if names := list_compiled_names(trainer.task):
        lines.append(f"torch.compile: {', '.join(names)}, each compiled by its first calls, which take longer")
    lines.append(_parameters(trainer.task))
    return "\n".join(lines)


def count(number: int, thing: str) -> str:
    """``"1 step"``, ``"2 steps"``, ``"2 processes"``."""
    return f"{number:,} {thing}" + ("" if number == 1 else "es" if thing.endswith(("s", "ch")) else "s")


def _batch(trainer: Trainer, loader: Loader) -> str:
    size = getattr(loader.source, "batch_size", None)
    processes, k = trainer.accelerator.num_processes, trainer.accelerator.gradient_accumulation_steps
    assert trainer.task is not None
    kind, factors = "effective batch", f"x {count(processes, 'process')} x {k} accumulated"
    if not trainer.task.automatic_optimization:  # which may accumulate
        kind, factors = "batch", f"x {count(processes, 'process')}"
    if isinstance(size, int):
        return f"{kind} {size * processes * k:,} = {size} per process {factors}"
    return f"{kind}: what the loader yields {factors}"


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


def _manual_steps(trainer: Trainer) -> str:
    """Which batches step an optimizer is known to ``training_step`` alone."""
    batches = trainer.num_training_batches
    per_epoch = "the loader has no length" if batches is None else f"{count(batches, 'batch')} per epoch"
    epochs = trainer.max_epochs
    limits = [] if epochs == -1 else [f"{epochs:,} epoch{'' if epochs == 1 else 's'}"]
    limits += [] if trainer.max_steps == -1 else [count(trainer.max_steps, "optimizer step")]
    until = f", until {' or '.join(limits)}" if limits else ""
    left = f"; {count(trainer.progress.step, 'step')} done" if trainer.progress.step else ""
    return f"manual optimization: training_step steps the optimizers; {per_epoch}{until}{left}"


def _parameters(module: nn.Module) -> str:
    parameters = list(module.parameters())
    trainable = sum(p.numel() for p in parameters if p.requires_grad)
    frozen = sum(p.numel() for p in parameters) - trainable
    size = sum(p.numel() * p.element_size() for p in parameters)
    return f"{trainable:,} trainable parameters, {frozen:,} frozen, {size / 2**20:,.1f} MiB"


def announce_interrupt(trainer: Trainer, stage: str, place: str) -> None:
    """Say where Ctrl-C ended a stage; of ``fit``, the newest checkpoint too, and how to resume from it."""
    lines = [f"interrupted {place}"]
    newest = newest_checkpoint(trainer) if stage == "fit" and trainer.is_global_zero else None
    if newest is not None:
        step, path = newest
        command = trainer.resume_command or f"trainer.fit(..., ckpt_path={str(path)!r})"
        lines += [f"newest checkpoint: {path}, of optimizer step {step:,}", f"to resume: {command}"]
    elif stage == "fit":
        lines.append("no checkpoint was saved")
    announce("\n".join(lines))


def newest_checkpoint(trainer: Trainer) -> tuple[int, Path] | None:
    """Optimizer steps and place of the checkpoint that was saved last where the run saves, if it can be resumed."""
    directories = dict.fromkeys(c.dirpath for c in trainer.checkpoint_callbacks if c.dirpath is not None)
    depth = max((c.name_depth for c in trainer.checkpoint_callbacks), default=0)
    found = []
    for directory in (folder for top in directories for folder in folders(top, depth)):
        for manifest, path in CheckpointStore(directory).scan()[0]:
            if has_part(manifest.files, STATE):
                found.append((manifest.step, manifest.sequence, path))
    if not found:
        return None
    # Within a folder by the order of commits: an earlier run in it may have left later steps.
    step, _, path = max(found, key=lambda one: (one[1], one[0]) if len(directories) == 1 else one[:2])
    return step, path


def announce_end(trainer: Trainer) -> None:
    """Say after ``fit`` where its results are: logs, report, checkpoint, the last metrics."""
    if not trainer.is_global_zero:
        return
    lines = [f"logs: {place}" for place in trainer.logbook.places()]
    for callback in trainer.callbacks:
        if isinstance(callback, RunReport) and callback.path is not None:
            lines.append(f"report: {callback.path}")
    for one in trainer.checkpoint_callbacks:
        if one.best_model_path:
            lines.append(_checkpoint_line(one))
    values = list(trainer.logbook.callback_values.items())
    if values:
        more = f" and {len(values) - _SHOWN} more" if len(values) > _SHOWN else ""
        lines.append("last metrics: " + ", ".join(f"{name} {value:.4g}" for name, value in values[:_SHOWN]) + more)
    if lines:
        announce("\n".join(lines))


def _checkpoint_line(callback: ModelCheckpoint) -> str:
    if callback.monitor is None:
        return f"last checkpoint: {callback.best_model_path}"
    score = "" if callback.best_model_score is None else f" ({callback.monitor} {float(callback.best_model_score):.4g})"
    return f"best checkpoint: {callback.best_model_path}{score}"


def results(stage: str, metrics: Iterable[dict[str, float]]) -> str:
    """Return the values that an evaluation logged, as lines."""
    lines = []
    for values in metrics:
        width = max(map(len, values), default=0)
        lines += [f"{stage}: {name:<{width}}  {value:.6g}" for name, value in values.items()]
    return "\n".join(lines) or f"{stage}: nothing was logged"
