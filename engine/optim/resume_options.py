"""Comparison of a script's optimizers and schedules with those of the checkpoint from which it resumes."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any, NamedTuple

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from ...common.messages import abbreviate, announce, format_count, warn
from ...common.remote_path import AnyPath
from ...common.validation import choose
from ..checkpoint import TrainState
from .accumulation import PreparedOptimizer
from .optimizer_state import BuiltSchedule, State, to_plain

SCHEDULES = ("saved", "script")
"""Values of ``schedule=`` in a resume."""

_RATES = ("lr", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum")
_SHOWN = 12


class LoadedOptimizer(NamedTuple):
    """Optimizer whose state is about to be loaded.

    Attributes:
        prepared: The optimizer.
        state: The state to pass to its ``load_state_dict``.
        options: The saved `PreparedOptimizer.effective_options`, if the checkpoint contains them.
        groups: The number of the optimizer's parameter groups in the checkpoint.
    """

    prepared: PreparedOptimizer
    state: State
    options: list[State] | None
    groups: int


class SavedSchedule(NamedTuple):
    """Scheduler whose state is about to be loaded.

    Attributes:
        scheduler: The user's scheduler.
        built: Its state and arguments before the resume.
        state: The saved state.
        kind: The name of its class, which is also that of the saved one.
        arguments: The saved arguments; None if the checkpoint does not contain them.
    """

    scheduler: Any
    built: BuiltSchedule
    state: State
    kind: str
    arguments: Any


def match_schedules(schedulers: list[Any], built: list[BuiltSchedule], state: TrainState) -> list[SavedSchedule]:
    """Return the schedulers whose class is the same in the checkpoint.

    Args:
        schedulers: The prepared schedulers.
        built: Their states and arguments before the resume.
        state: The checkpoint's state.
    """
    arguments = state.get("schedules_built")
    if not isinstance(arguments, list):
        arguments = []
    matched = []
    for number, (scheduler, own) in enumerate(zip(schedulers, built, strict=True)):
        if number >= len(state["schedulers"]):
            break
        inner, saved = getattr(scheduler, "scheduler", scheduler), state["schedulers"][number]
        kind = type(inner).__qualname__
        if kind == state["scheduler_kinds"][number] and isinstance(saved, dict):
            saved_arguments = arguments[number] if number < len(arguments) else None
            matched.append(SavedSchedule(inner, own, saved, kind, saved_arguments))
    return matched


def _to_numbers(value: Any) -> list[int | float]:
    """Return a list of numbers as plain data; an empty list for any other value, such as one from a damaged file."""
    numbers = to_plain(value)
    return numbers if isinstance(numbers, list) and all(isinstance(item, int | float) for item in numbers) else []


# -- differences ---------------------------------------------------------------------------------------------------


def compare(path: AnyPath, optimizers: list[LoadedOptimizer], schedules: list[SavedSchedule]) -> None:
    """Warn if the options of the script's optimizers or schedules differ from those at the start of the saved run.

    Raises:
        ValueError: If a saved ``OneCycleLR`` schedule ends before that of the script, because torch would end the run
            with an error.
    """
    of_schedules, rates = _compare_schedules(schedules)
    lines = _compare_options(optimizers) + of_schedules
    if not (lines or rates):
        return
    text = "\n  ".join(filter(None, [abbreviate(lines, _SHOWN, "\n  "), *rates]))
    if _ends_early(schedules):
        raise ValueError(
            f"{path} was saved with a schedule that ends before this script's:\n  {text}\nOneCycleLR can't be stepped "
            "beyond its total_steps. Resume with schedule='script' to follow the script's schedule from here on, or "
            "with schedule='saved' to follow the saved one to its end."
        )
    if lines:
        text += "\nThe saved values are used. Pass schedule='script' to use the script's learning rate and schedule."
    warn(f"{path} was saved by a run with a different optimizer configuration or schedule:\n  {text}")


def _compare_options(optimizers: list[LoadedOptimizer]) -> list[str]:
    lines = []
    for prepared, _, saved, _ in optimizers:
        groups, optimizer = prepared.built, prepared.optimizer
        if saved is None or len(saved) != len(groups):
            continue
        for number, (old, new) in enumerate(zip(saved, groups, strict=True)):
            scheduled = "initial_lr" in old and "initial_lr" in new  # ``lr`` is then the schedule's first value
            label = f" group {number}" if len(groups) > 1 else ""
            lines += [
                f"{type(optimizer).__name__}{label}: {'lr' if name == 'initial_lr' else name} {_format(old[name])} "
                f"in the checkpoint, {_format(new[name])} in this script"
                for name in new
                if name in old and not (name == "lr" and scheduled) and _is_different(old[name], new[name])
            ]
    return lines


def _compare_schedules(schedules: list[SavedSchedule]) -> tuple[list[str], list[str]]:
    lines, rates = [], []
    for scheduler, built, saved, kind, arguments in schedules:
        new, old = built.arguments, arguments if isinstance(arguments, dict) else {}
        lines += [
            f"{kind}: {name.replace('_milestones', 'milestones')} {_format(old[name])} in the checkpoint, "
            f"{_format(new[name])} in this script"
            for name in new
            if name in old and _is_different(old[name], new[name])
        ]
        if isinstance(scheduler, LambdaLR):
            rates += _compare_rates(scheduler, saved)
    return lines, rates


def _compare_rates(scheduler: LambdaLR, saved: State) -> list[str]:
    step, saved_rates, bases = (
        saved.get("last_epoch"),
        _to_numbers(saved.get("_last_lr")),
        _to_numbers(saved.get("base_lrs")),
    )
    if not isinstance(step, int) or not len(saved_rates) == len(bases) == len(scheduler.lr_lambdas):
        return []
    if any(saved.get("lr_lambdas") or ()):  # the attributes of callable objects, which are compared like arguments
        return []
    rates = [base * function(step) for base, function in zip(bases, scheduler.lr_lambdas, strict=True)]
    if all(math.isclose(old, new, rel_tol=1e-5, abs_tol=1e-12) for old, new in zip(saved_rates, rates, strict=True)):
        return []
    return [
        f"LambdaLR: lr {_format(saved_rates)} in the checkpoint, {_format(rates)} from this script's function at step "
        f"{step}. Functions are not saved, so the resumed run uses the script's function"
    ]


def _ends_early(schedules: list[SavedSchedule]) -> bool:
    return any(
        kind == "OneCycleLR"
        and any(end < built.state["total_steps"] for end in _to_numbers([saved.get("total_steps")]))
        for _, built, saved, kind, _ in schedules
    )


def _is_different(old: Any, new: Any) -> bool:
    both_nan = old != old and new != new
    return bool(old != new and not both_nan)


def _format(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return f"[{', '.join(map(_format, value))}]" if len(value) != 1 else _format(value[0])
    return repr(value)


def is_scheduled(prepared: PreparedOptimizer, schedulers: list[Any]) -> bool:
    """Return whether a scheduler sets the learning rate of an optimizer."""
    return any(getattr(scheduler, "optimizer", None) in (prepared.optimizer, prepared) for scheduler in schedulers)


# -- the script's schedule -----------------------------------------------------------------------------------------


def follow_script(optimizers: list[LoadedOptimizer], schedules: list[SavedSchedule]) -> None:
    """Replace learning rates and schedules in the saved states with the script's, before these states are loaded.

    A copy of each of the script's schedules is stepped as many times as the saved schedule was. An optimizer with a
    ``ReduceLROnPlateau`` keeps the saved schedule, with a warning.

    Raises:
        ValueError: If the script's schedule cannot be applied to the saved state.
    """
    for prepared, saved, *_ in optimizers:
        optimizer = prepared.optimizer
        driving = [s for s in schedules if getattr(s.scheduler, "optimizer", None) in (optimizer, prepared)]
        groups, options = saved["param_groups"], driving[-1].built.options if driving else prepared.built
        if any(isinstance(scheduler, ReduceLROnPlateau) for scheduler, *_ in driving):
            warn(
                f"schedule='script': ReduceLROnPlateau depends on past metrics, so {_name_class(optimizer)} keeps the "
                "saved schedule."
            )
            continue
        if len(options) != len(groups):
            raise ValueError(
                f"schedule='script' can't set the learning rate of {_name_class(optimizer)}, which has "
                f"{format_count(len(options), 'parameter group')} in the script, but {len(groups)} in the checkpoint. "
                "Resume with schedule='saved'."
            )
        substitute = _Groups(options)
        for scheduler, built, saved_schedule, kind, _ in driving:
            copied = _step_copy(scheduler, built, saved_schedule, kind, substitute)
            saved_schedule.clear()
            saved_schedule.update(copy.deepcopy(copied.state_dict()))
        for group, old, new in zip(groups, options, substitute.param_groups, strict=True):
            group.update({name: new[name] for name in new if name in _RATES or new[name] != old.get(name)})
        rates = _format([group["lr"] for group in substitute.param_groups])
        announce(f"schedule='script': {_name_class(optimizer)} resumes with lr {rates} from this script's schedule.")


class _Groups:
    """Substitute for an optimizer, with only the attributes that a scheduler needs."""

    def __init__(self, options: list[State]) -> None:
        self.param_groups = copy.deepcopy(options)
        self.defaults: State = {}
        self._opt_called = True

    def step(self) -> None:
        """Do nothing; the method exists because schedulers require it."""


def _step_copy(scheduler: Any, built: BuiltSchedule, saved: State, kind: str, optimizer: _Groups) -> Any:
    """Return a copy of ``scheduler`` for ``optimizer``, stepped from its initial state to the position in ``saved``."""
    first, last = _read_position(built.state), _read_position(saved)
    if not isinstance(scheduler, LRScheduler) or first is None or last is None or last < first:
        if not isinstance(scheduler, LRScheduler):
            reason = "it is not a torch LRScheduler"
        elif first is None or last is None:
            reason = "its state does not contain a step count"
        else:
            reason = f"it begins at step {first}, but the checkpoint is at step {last}"
        raise ValueError(
            f"schedule='script' can't advance this script's {kind} to the checkpoint's position, because {reason}. "
            "Resume with schedule='saved'."
        )
    copied = copy.deepcopy(scheduler, {id(scheduler.optimizer): optimizer})
    copied.load_state_dict(copy.deepcopy(built.state))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch expects an optimizer step before each
            for _ in range(last - first):
                copied.step()
    except ValueError as error:
        raise ValueError(
            f"schedule='script' can't advance this script's {kind} to step {last} of the checkpoint ({error}). Resume "
            "with schedule='saved'."
        ) from error
    return copied


def _read_position(state: State) -> int | None:
    nested = state.get("_schedulers")
    if "last_epoch" not in state and isinstance(nested, list) and nested:
        return _read_position(nested[0])
    last_epoch = state.get("last_epoch")
    return last_epoch if isinstance(last_epoch, int) else None


def _name_class(optimizer: Optimizer) -> str:
    return type(optimizer).__name__


def hold(optimizers: list[LoadedOptimizer], schedules: list[SavedSchedule], script: bool) -> None:
    """Record the options and arguments that are in effect after the resume, so that later checkpoints contain them.

    If ``script``, the learning rates and schedules are those of the script. Other options are those of the checkpoint.
    """
    for prepared, _, options, _ in optimizers:
        if options is not None and len(options) == len(prepared.built):
            rates = [{name: group[name] for name in group if script and name in _RATES} for group in prepared.built]
            prepared.effective_options = [
                {**saved, **of_script} for saved, of_script in zip(options, rates, strict=True)
            ]
    for _, built, _, _, arguments in schedules:
        built.effective_arguments = arguments if isinstance(arguments, dict) and not script else built.arguments


def check_schedule(schedule: str | None) -> str | None:
    """Return ``schedule``, or raise an error if it is not a valid value of ``schedule=``.

    Args:
        schedule: ``"saved"``, ``"script"`` or None.

    Raises:
        ValueError: For any other value.
    """
    return None if schedule is None else choose("schedule", schedule, SCHEDULES)
