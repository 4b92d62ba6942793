"""Parameters of a sweep and their values."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from ...cli.config import ConfigError, Value, parse_path, to_plain
from ...common.messages import nearest

Number = int | float

_SYNONYMS = {"low": "min", "high": "max", "q": "step", "choices": "values", "type": "distribution"}
_WORDS = ("values", "value", "min", "max", "step", "log", "distribution", "parameters")
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
        known = _SYNONYMS.get(str(word), str(word))
        if known not in _WORDS:
            hint = nearest(word, (*_WORDS, *_SYNONYMS))
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
