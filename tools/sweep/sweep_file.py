"""Parsing and checks of sweep files, with their parameters."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

from ...cli.config import SECTIONS, ConfigError, Value, merge_sources, parse_path, read, resolve_references, to_plain
from ...common.messages import nearest
from ...trainer.runs import check_name

Number = int | float

_PARAMETER_SYNONYMS = {"low": "min", "high": "max", "q": "step", "choices": "values", "type": "distribution"}
_PARAMETER_WORDS = ("values", "value", "min", "max", "step", "log", "distribution", "parameters")
_CATEGORICAL = ("categorical", "choice")
_FLOATS = ("uniform", "float", "q_uniform", "log_uniform_values", "loguniform")
_INTEGERS = ("int_uniform", "int")
_LOGARITHMIC = ("log_uniform_values", "loguniform")
_DISTRIBUTIONS = (*_CATEGORICAL, "constant", *_FLOATS, *_INTEGERS)
MOST_GRID_VALUES = 100_000
_REFUSED = {
    "log_uniform": "its min and max are exponents. Use log_uniform_values, which takes the values themselves.",
    "probabilities": "every value is equally likely, so probabilities are not supported. Remove them.",
}


@dataclass(frozen=True)
class Choices:
    """Finite set of values that a parameter can have."""

    values: tuple[Value, ...]

    @property
    def labels(self) -> list[Any]:
        """Values as a study stores them: lists and mappings as JSON."""
        return [v.data if v.data is None or isinstance(v.data, str | int | float) else _label(v) for v in self.values]

    def describe(self) -> dict[str, Any]:
        """Return the values in the canonical form of a sweep file."""
        return {"values": [to_plain(value) for value in self.values]}


@dataclass(frozen=True)
class Range:
    """Range of numbers that includes both ends.

    Attributes:
        step: The distance between neighboring values. None stands for a continuous range or, for integers, for 1.
        log: Whether values are drawn on a logarithmic scale.
    """

    low: Number
    high: Number
    step: Number | None
    log: bool
    integer: bool

    def describe(self) -> dict[str, Any]:
        """Return the range in the canonical form of a sweep file."""
        words: dict[str, Any] = {"distribution": "int" if self.integer else "float", "min": self.low, "max": self.high}
        return words | ({"step": self.step} if self.step is not None else {}) | ({"log": True} if self.log else {})


@dataclass(frozen=True)
class Parameter:
    """Configuration key whose value varies between trials."""

    key: str
    source: str
    space: Choices | Range

    def list_grid(self) -> list[Any] | None:
        """Return all values as a study stores them; None if they cannot be listed, as in a continuous range."""
        space = self.space
        if isinstance(space, Choices):
            return space.labels
        step = space.step if space.step is not None else 1 if space.integer and not space.log else None
        if step is None:
            return [space.low] if space.low == space.high else None
        low, distance = Decimal(str(space.low)), Decimal(str(step))
        count = math.floor((Decimal(str(space.high)) - low) / distance) + 1
        if count > MOST_GRID_VALUES:
            return None
        return [(int if space.integer else float)(low + number * distance) for number in range(count)]

    def list_samples(self) -> Iterator[Value]:
        """Yield the values to check before the sweep: every choice, or the ends of the range."""
        if isinstance(self.space, Choices):
            yield from (Value(value.data, self.source, value.text) for value in self.space.values)
        else:
            yield from (Value(end, self.source) for end in dict.fromkeys((self.space.low, self.space.high)))

    def to_value(self, stored: Any) -> Value:
        """Convert a value stored in a study to the configuration's value."""
        if isinstance(self.space, Range):
            return Value(int(stored) if self.space.integer else float(stored), self.source)
        value = self.space.values[self.space.labels.index(stored)]
        return Value(value.data, self.source, value.text)


def parse_parameters(section: Value, problems: list[str]) -> list[Parameter]:
    """Parse the section ``parameters`` of a sweep file. Append problems to ``problems``."""
    parameters = []
    for key, source, value in _iterate_entries(section, "", problems):
        try:
            parse_path(key)
            parameters.append(Parameter(key, source, _parse_space(value)))
        except ConfigError as error:
            problems.append(f"{source}: parameters: {key}: {error}")
    keys = [parameter.key for parameter in parameters]
    for parameter in parameters:
        inside = [key for key in keys if key.startswith(f"{parameter.key}.")]
        if inside or keys.count(parameter.key) > 1:
            clash = f"and {inside[0]} set the same value" if inside else "is set twice"
            problems.append(f"{parameter.source}: parameters: {parameter.key} {clash}. Keep one of them.")
    return parameters


def _iterate_entries(section: Value, before: str, problems: list[str]) -> Iterator[tuple[str, str, Value]]:
    """Yield the key, source and values of each parameter, with W&B's nested form flattened."""
    if not isinstance(section.data, dict) or not section.data:
        problems.append(
            f"{section.source}: parameters must be a mapping of keys to values, such as model.lr: [0.1, 0.01]."
        )
        return
    for key, value in section.data.items():
        nested = value.data.get("parameters") if isinstance(value.data, dict) else None
        if nested is not None:
            yield from _iterate_entries(nested, f"{before}{key}.", problems)
        else:
            yield f"{before}{key}", value.source, value


def _parse_space(value: Value) -> Choices | Range:
    """Return the choices or the range that a sweep file specifies for a parameter."""
    if isinstance(value.data, list):
        return _parse_choices(value)
    if not isinstance(value.data, dict):
        return Choices((value,))
    words = _read_words(value.data)
    distribution = to_plain(words["distribution"]) if "distribution" in words else None
    if distribution is not None and str(distribution) not in _DISTRIBUTIONS:
        if str(distribution) in _REFUSED:
            raise ConfigError(f"distribution={distribution!r}: {_REFUSED[str(distribution)]}")
        hint = nearest(distribution, _DISTRIBUTIONS)
        raise ConfigError(f"distribution={distribution!r} is not one of {', '.join(_DISTRIBUTIONS)}.{hint}")
    if "values" in words:
        _refuse_others(words, "values", distribution, _CATEGORICAL)
        return _parse_choices(words["values"])
    if "value" in words:
        _refuse_others(words, "value", distribution, ("constant",))
        return Choices((words["value"],))
    if distribution in _CATEGORICAL:
        raise ConfigError(f"distribution={distribution!r} needs 'values'. Add the key, as in values: [0.1, 0.01].")
    if distribution == "constant":
        raise ConfigError("distribution='constant' needs 'value'. Add the key, as in value: 0.1.")
    if "min" not in words or "max" not in words:
        raise ConfigError(
            "a parameter needs 'values', 'value', or both 'min' and 'max'. Add the missing keys, as in "
            "{min: 0.1, max: 1}."
        )
    return _parse_range(words, distribution)


def _read_words(entries: Mapping[Any, Value]) -> dict[str, Value]:
    words: dict[str, Value] = {}
    for word, item in entries.items():
        if word in _REFUSED:
            raise ConfigError(f"{word}: {_REFUSED[str(word)]}")
        known = _PARAMETER_SYNONYMS.get(str(word), str(word))
        if known not in _PARAMETER_WORDS:
            hint = nearest(word, (*_PARAMETER_WORDS, *_PARAMETER_SYNONYMS))
            raise ConfigError(
                f"a parameter has no key {word!r}.{hint} Its keys are 'values', 'value', 'min', 'max', 'step', "
                "'log', 'distribution' and, for nested keys, 'parameters'."
            )
        if known in words:
            raise ConfigError(f"{word} and {known} mean the same. Keep one of them.")
        words[known] = item
    return words


def _refuse_others(words: Mapping[str, Value], kept: str, distribution: Any, allowed: tuple[str, ...]) -> None:
    others = [word for word in words if word not in (kept, "distribution")]
    if others:
        raise ConfigError(f"{kept} and {others[0]} can't be combined. Keep one of them.")
    if distribution not in (None, *allowed):
        raise ConfigError(f"distribution={distribution!r} and {kept} can't be combined. Keep one of them.")


def _parse_choices(value: Value) -> Choices:
    if not isinstance(value.data, list) or not value.data:
        raise ConfigError(f"values={to_plain(value)!r} must be a list of at least one value.")
    labels: list[Any] = []
    for label in Choices(tuple(value.data)).labels:
        if label in labels:  # 1, 1.0 and true are the same value in a study
            raise ConfigError(f"the value {label!r} appears twice. Keep one of them.")
        labels.append(label)
    return Choices(tuple(value.data))


def _parse_range(words: Mapping[str, Value], distribution: str | None) -> Range:
    numbers: dict[str, Number] = {}
    for word in ("min", "max", "step"):
        if word in words and words[word].data is not None:
            number = to_plain(words[word])
            if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
                raise ConfigError(f"{word}={number!r} must be a finite number.")
            numbers[word] = number
    if "min" not in numbers or "max" not in numbers:
        raise ConfigError("min and max must be numbers, not null.")
    log = to_plain(words["log"]) if "log" in words else distribution in _LOGARITHMIC
    if not isinstance(log, bool):
        raise ConfigError(f"log={log!r} must be true or false.")
    whole = all(isinstance(number, int) for number in numbers.values())
    integer = distribution in _INTEGERS or (distribution is None and whole)
    low, high, step = numbers["min"], numbers["max"], numbers.get("step")
    if integer and not whole:
        floats = ", ".join(f"{word}={number}" for word, number in numbers.items() if not isinstance(number, int))
        raise ConfigError(f"distribution={distribution!r} takes integers for min, max and step, not {floats}.")
    if low > high:
        raise ConfigError(f"min={low} must not be larger than max={high}.")
    if log and low <= 0:
        raise ConfigError(f"min={low} must be larger than 0, because values are drawn on a logarithmic scale.")
    if log and step is not None:
        raise ConfigError("log and step can't be combined. Keep one of them.")
    if distribution == "q_uniform" and step is None:
        step = 1
    if step is not None and step <= 0:
        raise ConfigError(f"step={step} must be larger than 0.")
    if not integer:
        low, high, step = float(low), float(high), None if step is None else float(step)
    if step is not None:  # as Optuna would do, with a warning
        first, distance = Decimal(str(low)), Decimal(str(step))
        high = type(low)(first + math.floor((Decimal(str(high)) - first) / distance) * distance)
    return Range(low, high, step, log, integer)


def _label(value: Value) -> str:
    return json.dumps(to_plain(value), ensure_ascii=False)


KEYS = {
    "config": "the configuration of every trial: a file, a mapping, or a list of these",
    "name": "the name of the sweep; its trials are the runs NAME/1, NAME/2, ... (default: the file's name)",
    "method": "grid, random or tpe; or a mapping, {type: tpe, n_startup_trials: 5}",
    "metric": "{name: val_loss, goal: minimize, take: best}: the logged value to optimize; take its best or last value",
    "parameters": "keys of the configuration with their values",
    "trials": "number of trials; a grid has one per combination",
    "processes": "number of trials at a time, 1 by default",
    "prune": "hyperband, asha, median, percentile, threshold or none; or a mapping, {type: hyperband, min_resource: 1}",
    "seed": "the seed for drawing values, 0 by default",
    "storage": "an Optuna storage URL, or journal; by default an SQLite file in the sweep's folder",
    "max_failures": "number of failed trials that ends the sweep if none succeeded, 3 by default; null for no limit",
}
"""Keys of a sweep file, with their descriptions."""

METHODS = ("grid", "random", "tpe")
PRUNERS = ("hyperband", "asha", "median", "percentile", "threshold")
GOALS = ("minimize", "maximize")
TAKES = ("best", "last")
_SYNONYMS = {
    "early_terminate": "prune",
    "pruner": "prune",
    "run_cap": "trials",
    "n_trials": "trials",
    "n_jobs": "processes",
    "study_name": "name",
    "sampler": "method",
    "objective": "metric",
}
_METHOD_SYNONYMS = {"bayes": "tpe", "bayesian": "tpe"}
_GOAL_SYNONYMS = {"min": "minimize", "max": "maximize"}
_PRUNER_SYNONYMS = {"successive_halving": "asha", "sha": "asha", "nop": "none"}
_OPTION_SYNONYMS = {"min_iter": "min_resource", "max_iter": "max_resource", "eta": "reduction_factor"}
_ELSEWHERE = {
    "program": "a sweep runs `treadle fit` with the configuration that 'config' names",
    "command": "a sweep runs `treadle fit` with the configuration that 'config' names",
    "project": "loggers are set in the configuration",
    "entity": "loggers are set in the configuration",
    "direction": "the goal is part of the metric, as in metric: {name: ..., goal: ...}",
}
_METRIC_EXAMPLE = "metric: {name: val_loss, goal: minimize}"
_CONTINUABLE = ("trials", "processes", "max_failures")
"""Keys whose values may change between two sessions of one sweep."""


Goal = Literal["minimize", "maximize"]


@dataclass(frozen=True)
class Metric:
    """Logged value that a sweep optimizes.

    Attributes:
        take: ``"best"`` if a trial's best logged value is its result, ``"last"`` if its last one is.
    """

    name: str = ""
    goal: Goal = "minimize"
    take: str = "best"

    @property
    def mode(self) -> str:
        """Goal as callbacks name it, ``"min"`` or ``"max"``."""
        return self.goal[:3]


@dataclass(frozen=True)
class Choice:
    """Method or pruner with its options.

    Attributes:
        options: Arguments of Optuna's class by name.
    """

    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""

    def describe(self) -> dict[str, Any]:
        """Return the name and options in the canonical form of a sweep file."""
        return {"type": self.kind, **self.options}


@dataclass(frozen=True)
class Sweep:
    """Sweep described by a file.

    Attributes:
        base: The configuration of every trial, with unresolved references.
        name: The name of the sweep and of its folder.
        directory: The folder of all runs, which contains the sweep's folder.
        processes: The maximum number of trials that one `treadle sweep` process runs at the same time.
        prune: The pruner, which ends unpromising trials early; None if no trial is pruned.
        storage: An Optuna URL or ``"journal"``; None for an SQLite file in the sweep's folder.
        max_failures: The number of failures in one session after which the sweep ends if no trial has been completed or
            pruned; None for no limit.
    """

    file: str
    base: Value
    name: str
    directory: str
    method: Choice
    metric: Metric
    parameters: tuple[Parameter, ...]
    trials: int
    processes: int
    prune: Choice | None
    seed: int
    storage: str | None
    max_failures: int | None

    @property
    def folder(self) -> Path:
        """Folder of the sweep, which contains a folder for each trial."""
        return Path(self.directory).expanduser().absolute() / self.name

    def get_combination(self, number: int) -> dict[str, Any]:
        """Return the values of the n-th trial of a grid as a study stores them. The last parameter changes fastest."""
        combination = {}
        for parameter in reversed(self.parameters):
            values = parameter.list_grid() or []
            number, place = divmod(number, len(values))
            combination[parameter.key] = values[place]
        return combination

    def describe(self) -> dict[str, Any]:
        """Return the sweep as plain data in the format of a sweep file, without ``storage``."""
        return {
            "name": self.name,
            "method": self.method.describe(),
            "metric": vars(self.metric),
            "parameters": {parameter.key: parameter.space.describe() for parameter in self.parameters},
            "trials": self.trials,
            "processes": self.processes,
            "prune": None if self.prune is None else self.prune.describe(),
            "seed": self.seed,
            "max_failures": self.max_failures,
            "config": to_plain(self.base),
        }


def list_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return a message for each setting that differs between two descriptions of a sweep, but must not change."""
    old, new = (dict(_flatten(json.loads(json.dumps(description)))) for description in (before, after))
    lines = []
    for key in sorted(old.keys() | new.keys()):
        if old.get(key, "") != new.get(key, "") and key not in _CONTINUABLE:
            lines.append(f"{key}: {json.dumps(old.get(key))} is now {json.dumps(new.get(key))}")
    return lines


def _flatten(data: Any, before: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(data, dict) and data:
        for key, item in data.items():
            yield from _flatten(item, f"{before}.{key}" if before else str(key))
    else:
        yield before, data


def read_sweep(file: str | Path, overrides: Sequence[str] = (), defaults: Mapping[str, Any] | None = None) -> Sweep:
    """Read a sweep file and return the sweep that it describes.

    An override whose key is in a section of the configuration, except ``seed``, changes the configuration; any other
    override changes the sweep.
    """
    of_sweep: list[str] = []
    of_config: list[str] = []
    for override in overrides:
        first = override.lstrip("~").partition("=")[0].rstrip("+").partition(".")[0]
        (of_config if first in SECTIONS and first not in KEYS else of_sweep).append(override)
    entries = dict(merge_sources([read(file)], of_sweep).data)
    problems: list[str] = []
    for synonym in [key for key in entries if key in _SYNONYMS]:
        if _SYNONYMS[synonym] in entries:
            problems.append(
                f"{entries[synonym].source}: {synonym} and {_SYNONYMS[synonym]} mean the same. Keep one of them."
            )
        entries[_SYNONYMS[synonym]] = entries.pop(synonym)
    for key in [key for key in entries if key not in KEYS]:
        hint = f": {_ELSEWHERE[key]}. Remove it." if key in _ELSEWHERE else f".{nearest(key, KEYS)}"
        if key in SECTIONS:
            hint = ": it is a section of the configuration. Put it below 'config'."
        problems.append(f"{entries.pop(key).source}: a sweep has no key {key!r}{hint}")
    base = _read_base(entries.pop("config", None), Path(file).parent, of_config, defaults)
    parameters = entries.pop("parameters", None)
    values = resolve_references(Value(entries, str(file))).data
    return _Reader(str(file), values, problems).read(base, parameters)


def _read_base(
    value: Value | None, folder: Path, overrides: Sequence[str], defaults: Mapping[str, Any] | None
) -> Value:
    """Return the configuration of every trial. Paths of configuration files are relative to the sweep file."""
    sources: list[str | Path | Value] = []
    for item in [] if value is None else value.data if isinstance(value.data, list) else [value]:
        if not isinstance(item.data, str | dict):
            raise ConfigError(
                f"{item.source}: config={to_plain(item)!r} must be a file, a mapping, or a list of files and mappings."
            )
        path = folder / item.data if isinstance(item.data, str) else item
        if isinstance(path, Path) and not path.is_file():
            raise ConfigError(
                f"{item.source}: config: the file {str(path)!r} does not exist. Paths are relative to the sweep file."
            )
        sources.append(path)
    base = merge_sources(sources, overrides, defaults=defaults)
    for key, words in (
        ("ckpt_path", "each trial resumes from its own checkpoints"),
        ("schedule", "each trial resumes with its own schedule"),
    ):
        if key in base.data and base.data[key].data is not None:
            raise ConfigError(f"{base.data[key].source}: {key} can't be set in a sweep, because {words}. Remove it.")
    return base


class _Reader:
    """Reader of the values of one sweep file that collects every problem."""

    def __init__(self, file: str, values: Mapping[str, Value], problems: list[str]) -> None:
        self.file, self.values, self.problems = file, values, problems

    def read(self, base: Value, section: Value | None) -> Sweep:
        method = self._read_choice("method", METHODS, _METHOD_SYNONYMS)
        prune = self._read_choice("prune", (*PRUNERS, "none"), _PRUNER_SYNONYMS)
        parameters: list[Parameter] = []
        if section is None:
            self.problems.append(f"{self.file}: there are no parameters. Add parameters: {{model.lr: [0.1, 0.01]}}.")
        else:
            parameters = parse_parameters(section, self.problems)
        if method is None:
            if self._get("method") is None:
                self.problems.append(
                    f"{self.file}: there is no method. Add one of 'method: grid', 'method: random' and 'method: tpe'."
                )
            method = Choice("random")
        sweep = Sweep(
            file=self.file,
            base=base,
            name=self._read_name(),
            directory=self._read_directory(base),
            method=method,
            metric=self._read_metric(),
            parameters=tuple(parameters),
            trials=self._read_trials(method, parameters),
            processes=self._read_number("processes", 1, 1) or 1,
            prune=prune if prune is not None and prune.kind != "none" else None,
            seed=self._read_number("seed", 0, 0) or 0,
            storage=self._read_storage(),
            max_failures=self._read_number("max_failures", 1, 3),
        )
        self._check_keys(sweep)
        if self.problems:
            raise ConfigError(*self.problems)
        return sweep

    def _report(self, key: str, words: str) -> None:
        self.problems.append(f"{self.values[key].source}: {key}{words}")

    def _get(self, key: str) -> Any:
        return self.values[key].data if key in self.values else None

    def _read_name(self) -> str:
        name = self._get("name")
        try:
            return check_name(Path(self.file).stem if name is None else name)
        except (ValueError, TypeError) as error:
            self.problems.append(f"{self.values['name'].source if name is not None else self.file}: {error}")
            return ""

    def _read_directory(self, base: Value) -> str:
        run = base.data.get("run")
        directory = run.data.get("dir") if run is not None and isinstance(run.data, dict) else None
        if directory is None:
            return "runs"
        if not isinstance(directory.data, str) or "://" in directory.data:
            self.problems.append(
                f"{directory.source}: run.dir={to_plain(directory)!r} must be a local folder, because it contains the "
                "sweep's locks and study. Upload the folder after the sweep."
            )
            return "runs"
        return directory.data

    def _read_number(self, key: str, low: int, default: int | None) -> int | None:
        if key not in self.values:
            return default
        number = self._get(key)
        if number is None and key == "max_failures":
            return None
        if isinstance(number, bool) or not isinstance(number, int) or not low <= number < 2**32:
            self._report(key, f"={number!r} must be an integer of at least {low}.")
            return default
        return number

    def _read_storage(self) -> str | None:
        storage = self._get("storage")
        if storage is not None and not (isinstance(storage, str) and ("://" in storage or storage == "journal")):
            self._report("storage", f"={storage!r} must be a URL such as sqlite:///study.db, or journal.")
            return None
        return storage

    def _read_choice(self, key: str, names: Sequence[str], synonyms: Mapping[str, str]) -> Choice | None:
        """Return a method or pruner, set by its name or by a mapping with options; None if it is missing or invalid."""
        value = self.values.get(key)
        if value is None or value.data is None:
            return None
        plain = to_plain(value)
        options = dict(plain) if isinstance(plain, dict) else {"type": plain}
        kind = options.pop("type", options.pop("method", None))
        kind = synonyms.get(str(kind), kind)
        if kind not in names:
            words = f"{'.type' if isinstance(plain, dict) else ''}={kind!r} is not one of {', '.join(names)}."
            self._report(key, words + nearest(kind, names))
            return None
        return Choice(
            str(kind), {_OPTION_SYNONYMS.get(name, name): item for name, item in options.items()}, value.source
        )

    def _read_metric(self) -> Metric:
        value = self.values.get("metric")
        plain = None if value is None else to_plain(value)
        if not isinstance(plain, dict):
            if plain is None:
                self.problems.append(f"{self.file}: there is no metric. Add {_METRIC_EXAMPLE}.")
            else:
                self._report("metric", f"={plain!r} must be a mapping, such as {_METRIC_EXAMPLE}.")
            return Metric()
        words = {"goal": plain.get("direction", plain.get("mode")), "take": "best", **plain}
        words = {word: item for word, item in words.items() if word not in ("direction", "mode")}
        words["goal"] = _GOAL_SYNONYMS.get(str(words["goal"]), words["goal"])
        for word in words:
            if word not in ("name", "goal", "take"):
                self._report("metric", f" has no key {word!r}.{nearest(word, ('name', 'goal', 'take'))}")
        if not isinstance(words.get("name"), str) or not words["name"]:
            self._report("metric", f".name={words.get('name')!r} must be the name of a logged value, such as val_loss.")
        for word, names in (("goal", GOALS), ("take", TAKES)):
            if words[word] not in names:
                hint = nearest(words[word], names)
                self._report("metric", f".{word}={words[word]!r} is not one of {', '.join(names)}.{hint}")
        goal: Goal = "maximize" if words["goal"] == "maximize" else "minimize"
        return Metric(str(words.get("name")), goal, str(words["take"]))

    def _read_trials(self, method: Choice, parameters: Sequence[Parameter]) -> int:
        trials = self._read_number("trials", 1, None)
        if method.kind != "grid":
            if trials is None and "trials" not in self.values:
                self.problems.append(f"{self.file}: the number of trials is missing. Add trials: 20.")
            return trials or 1
        count = 1
        for parameter in parameters:
            values = parameter.list_grid()
            if values is None:
                self.problems.append(
                    f"{parameter.source}: parameters: {parameter.key}: a grid needs a list of values, or min, max and "
                    f"step, with at most {MOST_GRID_VALUES:,} values."
                )
            count *= len(values or [0])
        return count if trials is None else min(trials, count)

    def _check_keys(self, sweep: Sweep) -> None:
        """Report parameters that would change where a trial is stored or what it resumes from."""
        for parameter in sweep.parameters:
            if parameter.key.partition(".")[0] in ("run", "ckpt_path", "schedule"):
                self.problems.append(
                    f"{parameter.source}: parameters: {parameter.key} can't be varied, because the sweep decides where "
                    "its trials are saved and what they resume from. Remove it."
                )
