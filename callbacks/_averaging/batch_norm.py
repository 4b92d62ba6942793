"""Recomputation of BatchNorm's running statistics for averaged weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ...common.messages import announce, format_count, warn
from ...engine import isolated_random_state

if TYPE_CHECKING:
    from ...trainer import TaskModule, Trainer


def find_measured_layers(module: nn.Module) -> list[nn.Module]:
    """Return the BatchNorm layers in training mode that have running statistics."""
    return [
        part
        for part in module.modules()
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training and part.running_mean is not None
    ]


def measure(trainer: Trainer, task: TaskModule) -> None:
    """Run ``training_step`` over the training data once, without gradients, to recompute BatchNorm's statistics.

    Must be called on all ranks. The statistics are the mean over the batches of all processes, weighted by the number
    of samples. The RNG state is restored and the values that the steps log are discarded.

    Args:
        trainer: The Trainer, after training.
        task: The task.
    """
    layers = find_measured_layers(task)
    if not layers or trainer.sources is None or trainer.steps is None:
        return
    accelerator, loader = trainer.accelerator, trainer.sources.train
    announce(
        f"reading the training data once more to update the statistics of "
        f"{format_count(len(layers), 'BatchNorm layer')}"
    )
    before = [[buffer.clone() for buffer in layer.buffers()] for layer in layers]
    momenta = [layer.momentum for layer in layers]
    order = None if accelerator.stream is None else accelerator.stream.get_state()
    epoch = loader.epoch
    logged = trainer.new_metrics(training=True)
    try:
        with torch.no_grad(), isolated_random_state(), trainer.logging_to(logged):
            samples = _run_through(trainer, task, layers)
    finally:
        logged.reset()  # otherwise the task's metric objects include these batches
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum  # type: ignore[assignment]
        loader.end_epoch()
        loader.epoch = epoch
        if accelerator.stream is not None and order is not None:
            accelerator.stream.go_to(order)
    if not _average_statistics(trainer, layers, samples):
        for layer, buffers in zip(layers, before, strict=True):
            for buffer, value in zip(layer.buffers(), buffers, strict=True):
                buffer.copy_(value)
        warn(
            "the training dataloader yielded no batches in a second pass, so the BatchNorm layers keep the statistics "
            "of the trained weights, not of their averages. Use a dataset that can be read more than once."
        )


def _run_through(trainer: Trainer, task: TaskModule, layers: list[nn.Module]) -> float:
    """Recompute the layers' statistics in one pass over the training data and return the number of samples."""
    steps, accelerator = trainer.steps, trainer.accelerator
    assert steps is not None
    step = accelerator.local_method(task, "training_step")
    for layer in layers:
        layer.reset_running_stats()  # type: ignore[operator]
    total_samples = 0.0
    for index, batch in enumerate(trainer.sources.train):  # type: ignore[union-attr]
        samples = accelerator.cursor.micro.samples  # type: ignore[union-attr]
        total_samples += samples
        for layer in layers:  # a placeholder batch, which keeps the ranks in step, has weight 0
            layer.momentum = samples / total_samples if samples else 0.0  # type: ignore[assignment]
        if steps.takes_index:
            step(batch, index)
        else:
            step(batch)
    return total_samples


def _average_statistics(trainer: Trainer, layers: list[nn.Module], samples: float) -> bool:
    """Average the statistics over all processes, weighted by samples. Return False if there were no samples."""
    world = trainer.accelerator.data_world
    statistics: list[Tensor] = [t for layer in layers for t in (layer.running_mean, layer.running_var)]  # type: ignore
    flat = torch.cat([t.double().flatten() for t in statistics] if world.device.type != "mps" else statistics)
    total = world.all_reduce(torch.cat([flat * samples, flat.new_tensor([samples])]))
    if not total[-1]:
        return False
    if world.size > 1:
        mean = total[:-1] / total[-1]
        for tensor, part in zip(statistics, mean.split([t.numel() for t in statistics]), strict=True):
            tensor.copy_(part.view_as(tensor))
    return True
