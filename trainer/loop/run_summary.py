"""Announcements of a run's settings and results."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ...callbacks import GradientAccumulationScheduler, ModelCheckpoint, ModelSummary, RunReport
from ...common.messages import abbreviate, announce, format_count
from ...engine import Loader, describe_compilations, list_compiled_names
from ...strategies import Precision
from ..checkpointing import find_resumable

if TYPE_CHECKING:
    from ..trainer import Trainer


def announce_start(trainer: Trainer, loader: Loader) -> None:
    """Announce the settings of ``fit``, such as devices and precision.

    Args:
        trainer: Trainer of the run.
        loader: The prepared training dataloader.
    """
    settings, parameters = _describe_settings(trainer, loader), _describe_parameters(trainer.task)
    trainer.decided = f"{settings}\n{parameters}"
    is_counted = any(isinstance(callback, ModelSummary) and callback.max_depth for callback in trainer.callbacks)
    announce(settings if is_counted else trainer.decided)


def _describe_settings(trainer: Trainer, loader: Loader) -> str:
    accelerator, task = trainer.accelerator, trainer.task
    processes = accelerator.num_processes
    device = str(accelerator.device)
    if accelerator.device.type == "cuda":
        device += f" ({torch.cuda.get_device_name(accelerator.device)})"
    devices = device if processes == 1 else f"{processes} processes, this one on {device}"
    lines = [f"training on {devices}; strategy {accelerator.strategy.name}; precision {accelerator.precision.name}"]
    lines.append(_describe_batch(trainer, loader))
    if loader.left_out:
        dropped = " and ".join(format_count(number, thing) for thing, number in loader.left_out.items())
        lines.append(f"drop_last drops {dropped} per epoch")
    if processes > 1 and not trainer.use_distributed_sampler:
        lines.append("each process reads its own dataloader unchanged (use_distributed_sampler=False)")
    if accelerator.optimizers or not task.automatic_optimization:
        lines.append(_describe_steps(trainer) if task.automatic_optimization else _describe_manual_steps(trainer))
    if len(accelerator.optimizers) > 1 and task.automatic_optimization:
        kinds = ", ".join(type(prepared.optimizer).__name__ for prepared in accelerator.optimizers)
        lines.append(
            f"{len(accelerator.optimizers)} optimizers ({kinds}) step together after one backward pass; optimizers "
            "that take turns, as in a GAN, need automatic_optimization=False"
        )
    if _can_use_tf32(accelerator.device, accelerator.precision):
        lines.append(
            "float32 matrix products at full precision; float32_matmul_precision='high' computes them in TF32, "
            "several times faster, with 10 of the 23 mantissa bits"
        )
    lines += accelerator.strategy.decisions(task)
    if fused := sorted({type(o.optimizer).__name__ for o in accelerator.optimizers if o.fused_by_choice}):
        lines.append(f"{' and '.join(fused)} with fused steps, equal up to rounding; fused=False disables them")
    if names := list_compiled_names(task):
        lines.append(f"torch.compile: {', '.join(names)}, each compiled by its first calls, which take longer")
    return "\n".join(lines)


def _describe_batch(trainer: Trainer, loader: Loader) -> str:
    accelerator, task = trainer.accelerator, trainer.task
    size = getattr(loader.source, "batch_size", None)
    processes, k = accelerator.num_processes, accelerator.gradient_accumulation_steps
    kind, factors = "effective batch", f"x {format_count(processes, 'process')} x {k} accumulated"
    if not task.automatic_optimization:  # training_step may accumulate gradients
        kind, factors = "batch", f"x {format_count(processes, 'process')}"
    if (leaves := accelerator.step_micro_batches) is not None and isinstance(size, int):
        return f"{kind} {size * leaves:,} = {size} x {leaves} micro-batches, with any number of processes"
    if isinstance(size, int):
        return f"{kind} {size * processes * k:,} = {size} per process {factors}"
    return f"{kind}: the dataloader's batches {factors}"


def _describe_steps(trainer: Trainer) -> str:
    progress = trainer.progress
    steps, batches = trainer.estimated_stepping_batches, trainer.num_training_batches
    done = "" if not progress.step else f"; {progress.step:,} {'is' if progress.step == 1 else 'are'} done"
    if steps == float("inf"):
        return "optimizer steps: until the dataloader ends or the run is stopped" + done
    if not isinstance(batches, int):
        return f"{format_count(int(steps), 'optimizer step')}; the dataloader has no length{done}"
    if any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks):
        return f"{format_count(int(steps), 'optimizer step')}; {format_count(batches, 'batch')} per epoch{done}"
    accumulated = trainer.accelerator.gradient_accumulation_steps
    per_epoch = -(-batches // accumulated)
    if done and trainer.max_epochs != -1:  # the batch size may have been different before
        remaining = (trainer.max_epochs - progress.epoch) * per_epoch - progress.batch // accumulated
        steps = progress.step + max(0, remaining)
        steps = steps if trainer.max_steps == -1 else min(steps, trainer.max_steps)
    epoch = f"{per_epoch:,} per epoch of {format_count(batches, 'batch')}"
    return f"{format_count(int(steps), 'optimizer step')}, {epoch}{done}"


def _describe_manual_steps(trainer: Trainer) -> str:
    batches, epochs = trainer.num_training_batches, trainer.max_epochs
    unknown = not isinstance(batches, int)
    per_epoch = "the dataloader has no length" if unknown else f"{format_count(int(batches), 'batch')} per epoch"
    limits = [] if epochs == -1 else [format_count(epochs, "epoch")]
    limits += [] if trainer.max_steps == -1 else [format_count(trainer.max_steps, "optimizer step")]
    until = f", until {' or '.join(limits)}" if limits else ""
    done = f"; {format_count(trainer.progress.step, 'step')} done" if trainer.progress.step else ""
    return f"manual optimization: training_step steps the optimizers; {per_epoch}{until}{done}"


def announce_interrupt(trainer: Trainer, stage: str, place: str) -> None:
    """Announce where Ctrl-C ended a stage and, for ``fit``, how to resume.

    Args:
        trainer: Trainer of the run.
        stage: Name of the stage.
        place: Position of the run as text.
    """
    lines = [f"interrupted {place}"]
    latest = find_resumable(trainer) if stage == "fit" and trainer.is_global_zero else None
    if latest is not None:
        step, path = latest
        command = trainer.resume_command or f"trainer.fit(..., ckpt_path={str(path)!r})"
        lines += [f"latest checkpoint: {path} (optimizer step {step:,})", f"to resume: {command}"]
    elif stage == "fit":
        lines.append("no checkpoint was saved")
    announce("\n".join(lines))


def announce_end(trainer: Trainer, since: float) -> None:
    """Announce the results of ``fit``, such as the paths of checkpoints and the last metrics.

    Args:
        trainer: Trainer of the run.
        since: Time at which ``fit`` began, as returned by ``time.time()``.
    """
    if not trainer.is_global_zero:
        return
    lines = [describe_compilations(since)] if trainer.accelerator.cursor.around is not None else []
    lines = [*filter(None, lines), *(f"logs: {_make_absolute(place)}" for place in trainer.logbook.locations())]
    for callback in trainer.callbacks:
        if isinstance(callback, RunReport) and callback.path is not None:
            lines.append(f"report: {_make_absolute(str(callback.path))}")
    lines += [_describe_best(callback) for callback in trainer.checkpoint_callbacks if callback.best_model_path]
    if values := trainer.logbook.callback_values:
        lines.append(f"last metrics: {abbreviate([f'{name} {value:.4g}' for name, value in values.items()])}")
    if lines:
        announce("\n".join(lines))


def _make_absolute(place: str) -> str:
    """Return a local path as an absolute one, which can be used from any directory; return other places unchanged."""
    return os.path.abspath(place) if os.path.exists(place) else place


def _can_use_tf32(device: torch.device, precision: Precision) -> bool:
    """Return whether the run uses full float32 precision, torch's default, on a GPU that supports TF32."""
    return (
        device.type == "cuda"
        and precision.compute is None
        and precision.storage is None
        and torch.get_float32_matmul_precision() == "highest"
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def _describe_parameters(module: nn.Module) -> str:
    parameters = [p for p in module.parameters() if not is_lazy(p)]
    trainable = sum(p.numel() for p in parameters if p.requires_grad)
    frozen = sum(p.numel() for p in parameters) - trainable
    size = sum(p.numel() * p.element_size() for p in parameters)
    lazy = " + those of lazy layers" * any(map(is_lazy, module.parameters()))
    return f"{format_count(trainable, 'trainable parameter')}{lazy}, {frozen:,} frozen, {size / 2**20:,.1f} MiB"


def _describe_best(callback: ModelCheckpoint) -> str:
    path = _make_absolute(callback.best_model_path)
    if callback.monitor is None:
        return f"last checkpoint: {path}"
    score = "" if callback.best_model_score is None else f" ({callback.monitor} {float(callback.best_model_score):.4g})"
    return f"best checkpoint: {path}{score}"


def describe_results(stage: str, metrics: Iterable[dict[str, float]]) -> str:
    """Return a text with the values that an evaluation logged, one per line.

    Args:
        stage: Name of the stage.
        metrics: Values of each dataloader by name.
    """
    lines = []
    for values in metrics:
        width = max(map(len, values), default=0)
        lines += [f"{stage}: {name:<{width}}  {value:.6g}" for name, value in values.items()]
    return "\n".join(lines) or f"{stage}: nothing was logged"
