"""Validation, testing and prediction."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...common.messages import announce, format_count, warn
from ...engine import Loader, Metrics, evaluation_mode, move_data_to_device
from ...strategies import World
from ...strategies.distributed import name_phase
from ..checkpointing import ValidationSnapshot
from ..core import TaskModule, overrides
from .dataloaders import explain_empty
from .hook_table import Hook, Hooks, count_arguments
from .preemption import leave_now, save_and_leave

if TYPE_CHECKING:
    from ..trainer import Trainer

_NO_BATCH = object()


class _EndedBySignal(Exception):
    """Error that leaves an evaluation because a signal ends the run."""


STAGES = {"validate": "validation", "test": "test", "predict": "predict"}


@dataclass
class Evaluation:
    """Result of an evaluation.

    Attributes:
        metrics: Logged values by name, in one dict for each dataloader.
        predictions: Results of ``predict_step`` on this process, in one list for each dataloader.
    """

    metrics: list[dict[str, float]]
    predictions: list[list[Any]]


class EvaluationLoop:
    """One pass through evaluation dataloaders, in evaluation mode and without gradients.

    Args:
        trainer: Trainer of the run.
        task: The user's task.
        hooks: The overridden hooks.
        loaders: The prepared dataloaders.
        stage: ``"validate"``, ``"test"`` or ``"predict"``.
        within_fit: Whether this is a validation within ``fit``.
        keep_predictions: Collect the results of ``predict_step``. Default: False.
    """

    def __init__(
        self,
        trainer: Trainer,
        task: TaskModule,
        hooks: Hooks,
        loaders: list[Loader],
        stage: str,
        *,
        within_fit: bool,
        keep_predictions: bool = False,
    ) -> None:
        self.trainer = trainer
        self.task = task
        self.hooks = hooks
        self.loaders = loaders
        self.stage = stage
        self.name = STAGES[stage]
        self.within_fit = within_fit
        self.keep_predictions = keep_predictions
        self.metrics = trainer.new_metrics(training=False)
        self._snapshot: ValidationSnapshot | None = None

    @name_phase("evaluation", loop=True)
    def run(self) -> Evaluation:
        """Return the logged values and predictions for all dataloaders. Call it on all processes.

        Raises:
            ValueError: If a dataloader is empty, unless within ``fit``, or a step or hook does not fit the dataloaders.
            Preempted: If a signal ended the run.
            KeyboardInterrupt: If Ctrl-C ended the run.
        """
        if self.within_fit and not self.trainer.sanity_checking:
            self._snapshot = ValidationSnapshot(self.trainer, self.task)
        try:
            evaluation = self._run()
        except _EndedBySignal:
            if self._snapshot is None:
                leave_now(self.trainer)
            if (restore := self._own_hook("model_train")) is not None:
                restore()
            self._snapshot.restore()
            save_and_leave(self.trainer)
        if self._snapshot is not None:
            self._snapshot.discard()
        return evaluation

    def _run(self) -> Evaluation:
        """Evaluate the task on all dataloaders; a signal that ends the run raises `_EndedBySignal`."""
        trainer, task, metrics = self.trainer, self.task, self.metrics
        on_start, on_end = (self.hooks.of_batches(self.name, at, len(self.loaders)) for at in ("start", "end"))
        inference_mode = trainer.inference_mode and not self.within_fit
        trainer.metrics.evaluation = metrics
        predictions: list[list[Any]] = []
        counts: list[int] = []
        lengths = [loader.length for loader in self.loaders]
        trainer.evaluation_batch = -1
        trainer.evaluation_total = None if None in lengths else sum(filter(None, lengths))
        if self.within_fit and (zero_grad := self._own_hook("model_zero_grad")) is not None:
            zero_grad()
        with (
            torch.inference_mode() if inference_mode else torch.no_grad(),
            evaluation_mode(task, self._own_hook("model_eval")),
            trainer.logging_to(metrics),
        ):
            trainer.accelerator.strategy.sync_buffers(task)
            metrics.between_batches(True)
            self._fire("start")
            self._fire("epoch_start")
            if self._snapshot is not None:
                self._snapshot.note_start()
            for number in range(len(self.loaders)):
                metrics.between_batches(False)
                first_batch = trainer.evaluation_batch
                predictions.append(self._run_loader(number, on_start, on_end))
                counts.append(trainer.evaluation_batch - first_batch)
            values = self._end_epoch(counts)
            if self.within_fit and not trainer.sanity_checking:  # checkpoints from here on count it as done
                trainer.progress.validated = trainer.progress.batches
                trainer.logbook.latest_validation.end(trainer)
            with trainer.logging_to(None):  # the values are written: self.log warns that another one would be lost
                self._fire("end")
        if (restore := self._own_hook("model_train")) is not None:
            restore()
        if self.within_fit:
            _warn_of_shared_metrics(trainer.metrics, metrics)
        for entry in metrics.entries:
            if entry.metric is not None:
                entry.metric.reset()
        trainer.metrics.evaluation = None
        return Evaluation(_split_by_loader(values, len(self.loaders)), predictions)

    @name_phase("evaluation", loop=True)
    def _run_loader(self, number: int, on_start: list[Hook], on_end: list[Hook]) -> list[Any]:
        trainer, task, metrics, loader = self.trainer, self.task, self.metrics, self.loaders[number]
        metrics.suffix = f"/dataloader_idx_{number}" if len(self.loaders) > 1 else ""
        step = trainer.accelerator.local_method(task, f"{self.name}_step")
        takes = step_arguments(getattr(task, f"{self.name}_step"), len(self.loaders))
        cursor = trainer.accelerator.cursor
        predictions: list[Any] = []
        departure = trainer.preemption.departure
        departure.begin_loop()
        index = -1
        for index, batch in enumerate(metrics.counted(loader, cursor, task)):
            if departure.must_leave(index) and self._try_to_leave():
                break
            metrics.weight, metrics.place = cursor.micro.samples, (number, index)  # type: ignore[union-attr]
            trainer.evaluation_batch += 1
            for hook in on_start:
                hook(batch, index, number)
            output = step(batch, *(index, number)[: takes - 1])
            if index == 0 and isinstance(output, dict):
                trainer.logbook.returned.update(output)
            for hook in on_end:
                hook(output, batch, index, number)
            if self.keep_predictions and metrics.weight:
                predictions.append(move_data_to_device(output, "cpu"))
        else:
            departure.end_loop()
            self._check_empty(index, loader)
            return predictions
        raise _EndedBySignal  # raised outside of the loop: a traceback would keep the iterator alive

    def _check_empty(self, index: int, loader: Loader) -> None:
        trainer = self.trainer
        if trainer.accelerator.world.all(index < 0):
            reason = explain_empty(loader, trainer.world_size)
            position = f" with index {self.loaders.index(loader)}" if len(self.loaders) > 1 else ""
            message = f"the {self.name} dataloader{position} yielded no batch. {reason}"
            if not self.within_fit:
                raise ValueError(message)
            if loader.length != 0:  # otherwise fit warned at its start
                warn(message)

    def _try_to_leave(self) -> bool:
        """Return whether the run can end within this evaluation. If not, announce that it ends after the evaluation."""
        if self._snapshot is None or self._snapshot.try_to_leave():
            return True
        self.trainer.preemption.departure.stay()
        announce(
            "the run ends after this validation, not during it, because the model's weights were replaced for "
            "validation"
        )
        return False

    def _end_epoch(self, counts: list[int]) -> dict[str, float]:
        trainer, metrics = self.trainer, self.metrics
        metrics.suffix = ""
        metrics.between_batches(True)
        # Always with several ranks, because only some of them may have the hook.
        if self._get_hooks("epoch_end") or trainer.world_size > 1:
            trainer.logbook.update_epoch(metrics)  # the hooks may read values that the steps logged
            self._fire("epoch_end")
        values = trainer.logbook.update_epoch(metrics)
        if not trainer.sanity_checking:
            trainer.logbook.write_batches(metrics, counts, trainer.progress.step, keep_counting=self.within_fit)
            trainer.logbook.write_epoch(trainer.progress.step, trainer.progress.epoch)
        return values

    def _get_hooks(self, moment: str) -> tuple[Any, ...]:
        return getattr(self.hooks, f"on_{self.name}_{moment}")

    def _own_hook(self, moment: str) -> Callable[[], Any] | None:
        """Return the task's hook for a moment, such as ``on_validation_model_eval``; None if it is not overridden.

        The loop itself performs the default action.
        """
        name = f"on_{self.name}_{moment}"
        return getattr(self.task, name) if hasattr(TaskModule, name) and overrides(self.task, name) else None

    @name_phase("evaluation", loop=True)
    def _fire(self, moment: str) -> None:
        for hook in self._get_hooks(moment):
            hook()


def _warn_of_shared_metrics(training: Metrics, validation: Metrics) -> None:
    """Warn about a metric object that training and validation both log."""
    trained = {id(entry.metric): entry.name for entry in training.entries if entry.metric is not None}
    for entry in validation.entries:
        if id(entry.metric) in trained:
            warn(
                f"training logs {trained[id(entry.metric)]!r} and validation logs {entry.name!r} with the same "
                f"{type(entry.metric).__name__} object. It mixes the values of both, and is reset at the end of the "
                "validation. Use one metric object for each stage."
            )


def check_step(task: TaskModule, stage: str) -> None:
    """Raise a ValueError if the task lacks the step of a stage. For ``"predict"``, ``forward`` is sufficient.

    Args:
        task: Task to check.
        stage: ``"validate"``, ``"test"`` or ``"predict"``.
    """
    name = f"{STAGES[stage]}_step"
    if overrides(task, name):
        return
    if stage == "predict" and type(task).forward is not nn.Module.forward:
        return
    needed = "predict_step or forward, but {} defines neither" if stage == "predict" else f"{name}, but {{}} has none"
    raise ValueError(f"{stage} needs {needed.format(type(task).__name__)}. Define {name}.")


def step_arguments(step: Callable[..., Any], loaders: int) -> int:
    """Return how many of the arguments (batch, batch_idx, dataloader_idx) a step accepts."""
    count = count_arguments(step, 3, several=loaders > 1)
    if loaders > 1 and count < 3:
        raise ValueError(
            f"{step.__name__} accepts {format_count(count, 'argument')}, but with {loaders} dataloaders it must "
            "accept (batch, batch_idx, dataloader_idx). Add the missing arguments."
        )
    return count


def _split_by_loader(values: dict[str, float], loaders: int) -> list[dict[str, float]]:
    """Return a dict of logged values for each dataloader; values without a dataloader's suffix are in every dict."""
    if loaders <= 1:
        return [values]
    marks = [f"/dataloader_idx_{number}" for number in range(loaders)]
    return [
        {name: value for name, value in values.items() if name.endswith(mark) or not name.endswith(tuple(marks))}
        for mark in marks
    ]


def predictions_in_order(evaluation: Evaluation, world: World) -> list[Any]:
    """Return the predictions of all processes, in the dataset's order if Treadle shards the dataset.

    Args:
        evaluation: Result of the evaluation on this process.
        world: Processes among which the dataset is sharded.
    """
    loaders = []
    for predictions in evaluation.predictions:
        # Each round of batches was dealt in rank order, so alternating between ranks restores the order.
        rounds = itertools.zip_longest(*world.gather_objects(predictions), fillvalue=_NO_BATCH)
        loaders.append([batch for dealt in rounds for batch in dealt if batch is not _NO_BATCH])
    return loaders[0] if len(loaders) == 1 else loaders
