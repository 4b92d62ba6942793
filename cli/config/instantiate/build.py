"""Checks of a configuration's sections, and construction of their objects."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ....common.messages import closest_name, nearest
from ....engine.optim import SCHEDULES
from ....strategies import strategy_names
from ....strategies.distributed import ACCELERATORS
from ....trainer import Trainer, arguments
from ....trainer.core import DataModule, SchedulerConfig, TaskModule, signature
from ..resolve import SECTIONS, Config
from ..values import DEFAULT, ConfigError, Value
from .annotations import Checker, format_value
from .buildable import ObjectRecipe, PlainRecipe, Recipe, make_default_value

_ELSEWHERE = {
    "seed_everything": "seed",
    "optimizers": "optimizer",
    "scheduler": "lr_scheduler",
    "datamodule": "data",
    "task": "model",
}
_SCHEDULE_OPTIONS = tuple(
    field.name for field in fields(SchedulerConfig) if field.name not in ("scheduler", "reduce_on_plateau")
)


@dataclass(frozen=True)
class Optimizers:
    """Replacement for a task's ``configure_optimizers``.

    Attributes:
        schedule_options: Options of `SchedulerConfig`, such as interval and monitor.
    """

    optimizer: ObjectRecipe
    scheduler: ObjectRecipe | None
    schedule_options: Mapping[str, Any]

    def __call__(self, task: TaskModule) -> Any:
        """Return the optimizer, and the scheduler if there is one, as ``configure_optimizers`` does."""
        parameters = [parameter for parameter in task.parameters() if parameter.requires_grad]
        optimizer = self.optimizer.make({"params": parameters})
        if self.scheduler is None:
            return optimizer
        scheduler = self.scheduler.make({"optimizer": optimizer})
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **self.schedule_options}}


@dataclass(frozen=True)
class CheckedConfig:
    """Valid configuration whose objects have not been built.

    Attributes:
        trainer: Recipes of the Trainer's flags that the configuration sets, by name.
        seed: Seed of the run. None leaves the RNG state unchanged.
        schedule: Source of the schedule after a resume, ``"saved"`` or ``"script"``; None if not set.
        run_dir: The parent folder of all runs.
    """

    config: Config
    trainer: dict[str, Recipe]
    model: ObjectRecipe
    data: ObjectRecipe | None
    optimizers: Optimizers | None
    seed: int | None
    ckpt_path: str | None
    schedule: str | None
    run_name: str
    run_dir: str

    def build_flags(self) -> dict[str, Any]:
        """Return all of the Trainer's flags by name, with callbacks and loggers built."""
        defaults = {name: argument.default for name, argument in signature(Trainer).arguments.items()}
        return defaults | {name: recipe.make() for name, recipe in self.trainer.items()}

    def build_task(self) -> TaskModule:
        """Build the task. A configured optimizer replaces its ``configure_optimizers``."""
        task: TaskModule = self.model.make()
        if self.optimizers is not None:
            task.__dict__["configure_optimizers"] = partial(self.optimizers, task)
        return task

    def build_datamodule(self) -> DataModule | None:
        """Build the data module; return None if the configuration has none."""
        return None if self.data is None else self.data.make()

    def resolve_defaults(self) -> Value:
        """Return the configuration with defaults and without ``vars``."""
        trainer = {
            name: self.trainer[name].resolve_defaults()
            if name in self.trainer
            else make_default_value(argument.default)
            for name, argument in signature(Trainer).arguments.items()
        }
        sections = {"trainer": Value(trainer, DEFAULT), "model": self.model.resolve_defaults()}
        if self.data is not None:
            sections["data"] = self.data.resolve_defaults()
        if self.optimizers is not None:
            sections["optimizer"] = self.optimizers.optimizer.resolve_defaults()
            if (scheduler := self.optimizers.scheduler) is not None:
                section_values = self.config.root.data["lr_scheduler"].data
                schedule_options = {name: section_values[name] for name in self.optimizers.schedule_options}
                sections["lr_scheduler"] = replace(
                    resolved_scheduler := scheduler.resolve_defaults(),
                    data={**resolved_scheduler.data, **schedule_options},
                )
        simple = {"seed": self.seed, "ckpt_path": self.ckpt_path}
        for name, value in simple.items():
            sections[name] = self.config.root.data.get(name, Value(value, DEFAULT))
        if self.schedule is not None:
            sections["schedule"] = self.config.root.data["schedule"]
        run = {"name": self.run_name, "dir": self.run_dir}
        run_section = self.config.get_section("run")
        section_values = {} if run_section is None else run_section.data
        sections["run"] = Value(
            {key: section_values.get(key, Value(value, DEFAULT)) for key, value in run.items()}, DEFAULT
        )
        return Value(sections, "")


def check(config: Config, model: type[TaskModule] | None = None, data: type[DataModule] | None = None) -> CheckedConfig:
    """Check a whole configuration against the signatures of its classes. Import modules, but build nothing.

    ``model`` and ``data`` are used unless the configuration names subclasses of them.

    Raises:
        ConfigError: If the configuration is invalid.
    """
    checker = Checker(config.secrets)
    root = config.root
    for key, item in root.data.items():
        if key not in SECTIONS:
            close = _ELSEWHERE.get(str(key)) or closest_name(str(key), SECTIONS)
            hint = f" Did you mean {close!r}?" if close else ""
            checker.report(
                item, (key,), f": there is no section {key!r}.{hint} The sections are {', '.join(SECTIONS)}."
            )
    trainer = _check_trainer(checker, config)
    task = _check_object(checker, config, "model", TaskModule, model)
    module = _check_object(checker, config, "data", DataModule, data)
    optimizers = _check_optimizers(checker, config)
    seed = _check_simple(checker, root.data.get("seed"), "seed", int | None, 0)
    ckpt_path = _check_simple(checker, config.get_section("ckpt_path"), "ckpt_path", str | None, None)
    schedule = _check_simple(checker, config.get_section("schedule"), "schedule", str | None, None)
    if isinstance(schedule, str) and schedule not in SCHEDULES:
        checker.report(root.data["schedule"], ("schedule",), f"={schedule!r} is not one of {', '.join(SCHEDULES)}.")
    if isinstance(seed, int) and not 0 <= seed < 2**32:
        checker.report(root.data["seed"], ("seed",), f"={seed} must be between 0 and 2**32 - 1.")
    run = _check_run(checker, config)
    if task is None and not checker.problems:
        checker.problems.append(
            "there is no model. Add a section, such as 'model: {class: my_module.MyTask}', or set "
            "model=my_module.MyTask on the command line."
        )
    if checker.problems or task is None:
        raise ConfigError(*checker.problems)
    return CheckedConfig(config, trainer, task, module, optimizers, seed, ckpt_path, schedule, run["name"], run["dir"])


def _read_mapping(checker: Checker, config: Config, name: str) -> dict[str, Value]:
    section = config.get_section(name)
    if section is None:
        return {}
    if not isinstance(section.data, dict):
        shown = format_value(section, checker.secrets)
        checker.report(section, (name,), f"={shown} must be a mapping ({SECTIONS[name]}).")
        return {}
    return section.data


def _check_trainer(checker: Checker, config: Config) -> dict[str, Recipe]:
    takes, flags = signature(Trainer), {}
    for key, item in _read_mapping(checker, config, "trainer").items():
        if key in takes.arguments:
            flags[key] = item
            continue
        try:
            arguments.refuse_unknown({key: item}, takes.arguments)
        except TypeError as error:
            checker.report(item, ("trainer", key), f": {error}")
    for flag, names in (("strategy", strategy_names()), ("accelerator", ACCELERATORS)):
        value = flags.get(flag)
        if value is not None and isinstance(value.data, str) and value.data not in names:
            hint = nearest(value.data, names)
            checker.report(value, ("trainer", flag), f"={value.data!r} is not one of {', '.join(names)}.{hint}")
            del flags[flag]
    section = config.get_section("trainer") or config.root
    recipes = checker.check_arguments(section, flags, takes, "Trainer", ("trainer",))
    return recipes or {}


def _check_object(
    checker: Checker, config: Config, name: str, base: type, default_class: type | None
) -> ObjectRecipe | None:
    section = config.get_section(name)
    if section is None and default_class is not None:
        section = Value({}, config.root.source)
    return (
        None if section is None else checker.check_object(section, default_class or base, (name,), target=default_class)
    )


def _check_optimizers(checker: Checker, config: Config) -> Optimizers | None:
    section, after = config.get_section("optimizer"), config.get_section("lr_scheduler")
    if section is None:
        if after is not None:
            words = " replaces configure_optimizers only together with an optimizer. Add a section 'optimizer'."
            checker.report(after, ("lr_scheduler",), words)
        return None
    optimizer = checker.check_object(section, Optimizer, ("optimizer",), ("params",))
    scheduler: ObjectRecipe | None = None
    schedule_options: dict[str, Any] = {}
    if after is not None:
        scheduler, schedule_options = _check_scheduler(checker, after)
    if optimizer is None:
        return None
    return Optimizers(optimizer, scheduler, schedule_options)


def _check_scheduler(checker: Checker, section: Value) -> tuple[ObjectRecipe | None, dict[str, Any]]:
    path = ("lr_scheduler",)
    schedule_options: dict[str, Any] = {}
    if isinstance(section.data, dict):
        annotations = signature(SchedulerConfig).arguments
        scheduler_data = dict(section.data)
        for name in [name for name in _SCHEDULE_OPTIONS if name in scheduler_data]:
            recipe = checker.check(scheduler_data[name], annotations[name].type, (*path, name))
            schedule_options[name] = None if recipe is None else recipe.make()
            del scheduler_data[name]
        if schedule_options.get("interval", "step") not in ("step", "epoch"):
            interval = section.data["interval"]
            checker.report(
                interval, (*path, "interval"), f"={schedule_options['interval']!r} must be 'epoch' or 'step'."
            )
        section = replace(section, data=scheduler_data)
    scheduler = checker.check_object(section, LRScheduler, path, ("optimizer",))
    if scheduler is not None and scheduler.target is ReduceLROnPlateau and schedule_options.get("monitor") is None:
        checker.report(section, path, ": ReduceLROnPlateau needs a metric. Add one, such as 'monitor: val_loss'.")
    return scheduler, schedule_options


def _check_run(checker: Checker, config: Config) -> dict[str, str]:
    run = {"name": "default", "dir": "runs"}
    for key, item in _read_mapping(checker, config, "run").items():
        if key not in run:
            hint = nearest(str(key), run)
            checker.report(item, ("run", key), f": the section has no key {key!r}.{hint} Its keys are name and dir.")
        elif isinstance(recipe := checker.check(item, str, ("run", key)), PlainRecipe):
            run[key] = recipe.built_value
    return run


def _check_simple(checker: Checker, value: Value | None, name: str, annotation: Any, default: Any) -> Any:
    if value is None:
        return default
    recipe = checker.check(value, annotation, (name,))
    return None if recipe is None else recipe.make()


def locate_error(config: Config, error: Exception, section: str = "trainer") -> ConfigError:
    """Convert an error of the Trainer or the run folder to a ConfigError that names the key and its source.

    The key is ``section`` if the message does not begin with the name of a flag or section.
    """
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    name = (re.match(r"\w*", text) or [""])[0]
    key = f"trainer.{name}" if name in signature(Trainer).arguments else name if name in SECTIONS else section
    return ConfigError(f"{config.find_source(key)}: {key}: {text}")
