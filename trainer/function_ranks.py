"""Stages that run in processes which the Trainer starts for each stage, as with ``strategy="ddp_spawn"``."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..callbacks import Callback
from ..engine import move_data_to_device, random_state, set_random_state
from ..strategies import plan_function_launch
from ..strategies.launch import FunctionLaunch
from .core import DataModule, TaskModule
from .loop import Progress
from .states import TrainerStatus

if TYPE_CHECKING:
    from .trainer import Trainer


@dataclass
class _Call:
    """Call of a Trainer's method, and what the Trainer in each process needs for it."""

    kind: type[Trainer]
    flags: dict[str, Any]
    changed: dict[str, Any]
    progress: Progress
    task: TaskModule | None
    datamodule: DataModule | None
    random_state: dict[str, Any]
    method: str
    arguments: dict[str, Any]


@dataclass
class _Outcome:
    """Result of a call, and the state of rank zero's Trainer after it."""

    result: Any
    weights: dict[str, Any]
    callbacks: list[tuple[type[Callback], dict[str, Any]]]
    values: dict[str, Any]
    bar_values: dict[str, Any]
    progress: Progress
    stage: str
    status: TrainerStatus
    interrupted: bool


def plan_ranks(place: dict[str, Any], flags: Mapping[str, Any]) -> tuple[FunctionRanks | None, dict[str, Any]]:
    """Return the processes in which a Trainer's stages run, or None, and where its own Accelerator is.

    Args:
        place: The Trainer's ``strategy``, ``accelerator``, ``devices`` and ``num_nodes``.
        flags: All flags that differ from their defaults.
    """
    launch = plan_function_launch(**place)
    if launch is None:
        return None, place
    # This process computes nothing, and must not use a GPU, with which it could not be forked.
    return FunctionRanks(launch, flags), {"strategy": "auto", "accelerator": "cpu", "devices": 1}


class FunctionRanks:
    """Processes in which each stage of a Trainer runs.

    After a stage, the caller's Trainer and task have rank zero's weights, logged values, progress and states of
    callbacks. Other changes, such as those of the task's attributes, are lost with the processes.

    Args:
        launch: Number of processes, and how they start.
        flags: The Trainer's flags.
    """

    def __init__(self, launch: FunctionLaunch, flags: Mapping[str, Any]) -> None:
        self._launch = launch
        self._flags = dict(flags)

    def fit(self, trainer: Trainer, task: TaskModule, loaders: Mapping[str, Any], datamodule: Any, **more: Any) -> None:
        """Run ``trainer.fit`` in the processes, with the training and validation loaders by kind; see `evaluate`."""
        named = {f"{kind}_dataloaders": value for kind, value in loaders.items()}
        self._call(trainer, "fit", task, {**named, "datamodule": datamodule, **more})

    def evaluate(
        self, trainer: Trainer, stage: str, task: TaskModule | None, loaders: Any, datamodule: Any, **more: Any
    ) -> Any:
        """Run another stage of the Trainer in the processes, and return rank zero's result.

        Raises:
            ValueError: If the processes cannot be started.
            RuntimeError: If a process fails. The message contains its traceback, signal or exit status.
        """
        return self._call(trainer, stage, task, {"dataloaders": loaders, "datamodule": datamodule, **more})

    def _call(self, trainer: Trainer, method: str, task: TaskModule | None, arguments: dict[str, Any]) -> Any:
        _ = trainer.log_dir  # chooses the version of the logger's folder
        flags = self._flags | {"callbacks": trainer.callbacks, "logger": trainer.loggers or False}
        plain = (bool, int, float, str, Path, type(None))
        flag_names = type(trainer).__init__.__kwdefaults__ or {}
        changed = {n: v for n, v in vars(trainer).items() if n in flag_names}
        call = _Call(
            kind=type(trainer),
            flags=flags,
            changed={name: value for name, value in changed.items() if isinstance(value, plain)},
            progress=trainer.progress,
            task=trainer.task,
            datamodule=trainer.datamodule,
            random_state=random_state(),
            method=method,
            arguments={"model": task, **arguments},
        )
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "outcome"
            self._launch.run(_run_call, call, path)
            # Written by this process's own child, in a folder that only this user can write to.
            outcome: _Outcome = pickle.loads(path.read_bytes())
        _apply(trainer, trainer.task if task is None else task, outcome)
        if trainer.task is not None and isinstance(arguments.get("datamodule"), DataModule):
            trainer.datamodule = arguments["datamodule"]
        return outcome.result


def _run_call(call: _Call, path: Path) -> None:
    """Run the call in one of the processes. Rank zero writes the outcome."""
    set_random_state(call.random_state)
    trainer = call.kind(**call.flags)
    for name, value in call.changed.items():
        setattr(trainer, name, value)
    trainer.progress, trainer.task, trainer.datamodule = call.progress, call.task, call.datamodule
    result = getattr(trainer, call.method)(**call.arguments)
    assert trainer.task is not None
    weights = trainer.task.state_dict()  # on all ranks, because a metric may gather its state
    if not trainer.is_global_zero:
        return
    outcome = _Outcome(
        result=result,
        weights=weights,
        callbacks=[(type(callback), callback.state_dict()) for callback in trainer.callbacks],
        values=trainer.callback_metrics,
        bar_values=trainer.progress_bar_metrics,
        progress=trainer.progress,
        stage=call.method,
        status=trainer.status,
        interrupted=trainer.interrupted,
    )
    path.write_bytes(pickle.dumps(move_data_to_device(outcome, "cpu")))


def _apply(trainer: Trainer, task: Any, outcome: _Outcome) -> None:
    """Give the caller's Trainer and task the state of rank zero's."""
    trainer.task = task
    task.trainer = trainer
    task.load_state_dict(outcome.weights, strict=False)  # the task may have built layers in the processes
    trainer.strategy.connect(task)  # so that its weights can be saved
    trainer.latest_stage = outcome.stage
    trainer.progress, trainer.status, trainer.interrupted = outcome.progress, outcome.status, outcome.interrupted
    trainer.logbook.clear()
    trainer.callback_metrics.update(outcome.values)
    trainer.logbook.bar_values.update(outcome.bar_values)
    states = list(outcome.callbacks)
    for callback in trainer.callbacks:
        match = next((n for n, (kind, _) in enumerate(states) if kind is type(callback)), None)
        state = {} if match is None else states.pop(match)[1]
        if not state:
            continue
        if getattr(callback, "dirpath", "") is None:
            callback.dirpath = state["dirpath"]  # type: ignore[attr-defined]
        callback.load_state_dict(state)
