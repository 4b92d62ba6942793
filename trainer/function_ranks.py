"""Stages that run in processes which the Trainer starts for each stage, as with ``strategy="ddp_spawn"``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import engine, strategies
from . import core

if TYPE_CHECKING:
    from ..strategies.launch import FunctionLaunch
    from .trainer import Trainer


def plan_ranks(place: dict[str, Any], flags: Mapping[str, Any]) -> tuple[FunctionRanks | None, dict[str, Any]]:
    """Return the processes in which a Trainer's stages run, or None, and where its own Accelerator is.

    Args:
        place: The Trainer's ``strategy``, ``accelerator``, ``devices`` and ``num_nodes``.
        flags: All flags that differ from their defaults.
    """
    launch = strategies.plan_function_launch(**place)
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

    def run(self, trainer: Trainer, method: str, task: core.TaskModule | None, **arguments: Any) -> Any:
        """Call a method of the Trainer, such as ``fit``, in the processes, and return rank zero's result.

        Raises:
            ValueError: If the processes cannot be started.
            RuntimeError: If a process fails. The message contains its traceback, signal or exit status.
        """
        _ = trainer.log_dir  # chooses the version of the logger's folder
        flags = self._flags | {"callbacks": trainer.callbacks, "logger": trainer.loggers or False}
        plain = (bool, int, float, str, Path, type(None))
        flag_names = type(trainer).__init__.__kwdefaults__ or {}
        changed = {n: v for n, v in vars(trainer).items() if n in flag_names and isinstance(v, plain)}
        state = {**changed, "progress": trainer.progress, "task": trainer.task, "datamodule": trainer.datamodule}
        arguments["model"] = task
        outcome = self._launch.run(_run_stage, type(trainer), flags, state, engine.random_state(), method, arguments)
        _apply(trainer, trainer.task if task is None else task, outcome)
        if trainer.task is not None and isinstance(arguments.get("datamodule"), core.DataModule):
            trainer.datamodule = arguments["datamodule"]
        return outcome["result"]


def _run_stage(
    kind: type[Trainer],
    flags: dict[str, Any],
    state: dict[str, Any],
    random: dict[str, Any],
    method: str,
    arguments: dict[str, Any],
) -> dict[str, Any] | None:
    """Run a stage in one of the processes. On rank zero, return its result and the state of the Trainer after it."""
    engine.set_random_state(random)
    trainer = kind(**flags)
    for name, value in state.items():
        setattr(trainer, name, value)
    result = getattr(trainer, method)(**arguments)
    weights = trainer.task.state_dict()  # on all ranks, because a metric may gather its state
    if not trainer.is_global_zero:
        return None
    outcome = {
        "result": result,
        "weights": weights,
        "callbacks": [(type(callback), callback.state_dict()) for callback in trainer.callbacks],
        "values": dict(trainer.callback_metrics),
        "bar_values": trainer.progress_bar_metrics,
        "attributes": {name: getattr(trainer, name) for name in ("latest_stage", "progress", "status", "interrupted")},
    }
    return engine.move_data_to_device(outcome, "cpu")  # type: ignore[no-any-return]


def _apply(trainer: Trainer, task: Any, outcome: dict[str, Any]) -> None:
    """Give the caller's Trainer and task the state of rank zero's."""
    trainer.task = task
    task.trainer = trainer
    task.load_state_dict(outcome["weights"], strict=False)  # the task may have built layers in the processes
    trainer.strategy.connect(task)  # so that its weights can be saved
    for name, value in outcome["attributes"].items():
        setattr(trainer, name, value)
    trainer.logbook.clear()
    trainer.callback_metrics.update(outcome["values"])
    trainer.logbook.bar_values.update(outcome["bar_values"])
    states = outcome["callbacks"]
    for callback in trainer.callbacks:
        match = next((n for n, (kind, _) in enumerate(states) if kind is type(callback)), None)
        state = {} if match is None else states.pop(match)[1]
        if not state:
            continue
        if getattr(callback, "dirpath", "") is None:
            callback.dirpath = state["dirpath"]  # type: ignore[attr-defined]
        callback.load_state_dict(state)
