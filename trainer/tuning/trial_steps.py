"""Optimizer steps that a search takes on a copy of the task."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from ...callbacks import Callback
from ..loop import Hooks, Schedules, choose_steps, prepare_training

if TYPE_CHECKING:
    from ..trainer import Trainer


def take_trial_steps(
    inner: Trainer,
    count: int,
    callbacks: Iterable[Callback] = (),
    before_step: Callable[[int], None] | None = None,
) -> Iterator[int]:
    """Take ``count`` optimizer steps, over as many epochs as needed, and yield the index of each completed step.

    ``before_step`` is called before each step, with its index.

    Raises:
        ValueError: If an epoch has no batch to train on, or the task cannot be trained.
    """
    task = inner.task
    assert task is not None
    assert inner.sources is not None
    hooks = inner.hooks = Hooks(inner, task, list(callbacks))
    model = prepare_training(inner, task)
    for hook in hooks.on_fit_start:
        hook()
    loader = inner.sources.train
    kind = choose_steps(inner, task)
    steps = inner.steps = kind(inner, task, model, hooks, Schedules(inner, task, []), lambda: False)
    done = 0
    with inner.logging_to(inner.metrics):
        for hook in hooks.on_train_start:
            hook()
        while True:
            done_before = done
            for hook in hooks.on_train_epoch_start:
                hook()
            for group in loader.groups():
                if before_step is not None:
                    before_step(done)
                steps.take(group)
                if steps.skip_rest:
                    break
                yield done
                done += 1
                if done == count:
                    return
            if done == done_before:
                raise ValueError(
                    "an epoch had no batch to train on, but a search needs at least one. Check the training "
                    "dataloader, and any on_train_batch_start hook that returns -1."
                )
            steps.skip_rest = False
            loader.end_epoch()
            for hook in hooks.on_train_epoch_end:
                hook()
            inner.metrics.reset()
            inner.progress.next_epoch()
