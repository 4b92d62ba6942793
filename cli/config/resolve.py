"""Merging of files and overrides, and resolution of ``${...}`` with OmegaConf's grammar."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ...common.messages import nearest
from ...trainer.checkpointing import WORDS_FOR_CHECKPOINTS
from .values import (
    ConfigError,
    Path,
    Value,
    format_path,
    hide_secrets,
    iterate_values,
    make_value,
    merge,
    normalize,
    place_value,
    to_plain,
)
from .yaml_loader import parse, parse_scalar, read

SECTIONS = {
    "trainer": "the Trainer's flags",
    "model": "the task: {class: my_module.MyTask, argument: ...}",
    "data": "the data module, likewise",
    "optimizer": "AdamW or {class: AdamW, lr: 1e-3}, instead of the task's configure_optimizers",
    "lr_scheduler": "{class: CosineAnnealingLR, T_max: 10, interval: step}, likewise",
    "seed": "the seed of all random number generators; null sets none",
    "ckpt_path": "a checkpoint to resume from or to evaluate",
    "schedule": "for fit with ckpt_path: which learning rates and schedule apply, saved or script",
    "run": "{name: default, dir: runs}: name of the run and folder of all runs",
    "vars": "user-defined values, for references such as ${vars.name}",
}
"""Sections of a configuration, with their descriptions."""

COMMAND_LINE = "command line"
MOST_EXPANDED = 100_000

_OPEN = re.compile(r"(?<!\\)(?:\\\\)*\$\{")  # two backslashes before it represent one
_SOURCE = re.compile(r"  # ([^,#]+)[^#]*$")  # in the form that `yaml_dump.dump_yaml` writes
_REFERENCE = re.compile(_OPEN.pattern + r"\s*(\.*[^\s${}:'\"()\\]+)\s*\}")
_RESOLVER = re.compile(_OPEN.pattern + r"\s*([\w.]+)\s*:")
_VARIABLE = re.compile(r"\$\{\s*oc\.env\s*:\s*(\w+)\s*(?:\}|,)")
_SINGLE_VARIABLE = re.compile(r"\$\{\s*oc\.env\s*:\s*(\w+)\s*(?:,(.*))?\}", re.DOTALL)
_REFUSED = re.compile(r"oc\.(?!env$|decode$)")  # they create configurations, or depend on the environment
_REFERENCE_HINT = "Write ${section.key}, ${oc.env:NAME,default}, or \\${ for a literal ${."
_SECRET = re.compile(r"KEY|TOKEN(?!S|IZ)|SECRET|PASSW|PASS$|_PWD|CREDENTIAL|_AUTH$", re.IGNORECASE)


@dataclass(frozen=True)
class Config:
    """Resolved configuration.

    Attributes:
        secrets: Mapping from the values of referenced environment variables with secret-like names, such as
            ``API_KEY``, to the references that replace them.
    """

    root: Value
    secrets: Mapping[str, str] = field(default_factory=dict)

    def get_section(self, name: str) -> Value | None:
        """Return a section; None if it is missing or null."""
        section = self.root.data.get(name)
        return None if section is None or section.data is None else section

    def to_plain(self) -> dict[str, Any]:
        """Return the configuration as nested dicts, lists and scalars."""
        return dict(to_plain(self.root))

    def find_source(self, key: str) -> str:
        """Return the source of the value at a dotted key, or of the closest value above it.

        The source is ``"defaults"`` if not even the key's section is set.
        """
        value = self.root
        for part in key.split("."):
            entries = value.data
            if isinstance(entries, list) and part.isdecimal() and int(part) < len(entries):
                value = entries[int(part)]
            elif isinstance(entries, dict) and part in entries:
                value = entries[part]
            else:
                break
        return value.source if value is not self.root else "defaults"


def load(
    files: Sequence[str | FilePath],
    overrides: Sequence[str] = (),
    *,
    defaults: Mapping[str, Any] | None = None,
    earlier: tuple[str, str] | None = None,
) -> Config:
    """Read, merge and resolve a configuration, without importing or building anything in it.

    ``overrides`` are ``key.path=value``, ``key.path+=value`` to append to a list, and ``~key.path`` to remove a key.
    The precedence, from high to low, is ``overrides``, later ``files``, earlier ``files``, ``earlier``, ``defaults``.
    ``earlier`` is the name and YAML text of an earlier run's configuration.
    """
    return resolve(merge_sources(files, overrides, defaults=defaults, earlier=earlier))


def merge_sources(
    files: Sequence[str | FilePath | Value],
    overrides: Sequence[str] = (),
    *,
    defaults: Mapping[str, Any] | None = None,
    earlier: tuple[str, str] | None = None,
) -> Value:
    """Read and merge a configuration without resolving its references; see `load`."""
    root = normalize(make_value(dict(defaults or {}), "script"))
    if earlier is not None:
        root = merge(root, _parse_earlier_config(*earlier))
    for file in files:
        root = merge(root, normalize(file if isinstance(file, Value) else read(file)))
    for override in overrides:
        root = _apply_override(root, override)
    return root


def resolve(root: Value, settings: Mapping[str, Value] | None = None) -> Config:
    """Resolve the references of a merged configuration.

    ``settings`` are values by dotted key, which override the configuration.
    """
    settings = settings or {}
    for key, value in settings.items():
        try:
            root = normalize(place_value(root, parse_path(key), value))
        except ConfigError as error:
            raise ConfigError(f"{value.source}: {key}: {error}") from None
    secrets = _collect_secrets(root)
    try:
        return Config(resolve_references(root, {COMMAND_LINE, *(value.source for value in settings.values())}), secrets)
    except ConfigError as error:  # OmegaConf may have quoted a variable's value
        raise ConfigError(hide_secrets(str(error), secrets)) from None


def _parse_earlier_config(name: str, text: str) -> Value:
    """Parse an earlier run's configuration.

    A ``ckpt_path`` of ``"last"``, ``"best"`` or ``"auto"`` is removed, together with ``schedule``.
    """
    parsed = parse(text, name)
    if parsed is None or parsed.data is None:
        return Value({}, name)
    places = {}
    for number, line in enumerate(text.splitlines(), 1):
        if first := _SOURCE.search(line):
            places[f"{name}:{number}"] = f"{first[1]}, {name}:{number}"
    root = _replace_sources(normalize(parsed), lambda place: places.get(place, place))
    started = root.data.get("ckpt_path")
    if started is not None and started.data in WORDS_FOR_CHECKPOINTS:
        del root.data["ckpt_path"]
        root.data.pop("schedule", None)
    return root


def _apply_override(root: Value, override: str) -> Value:
    try:
        if override.startswith("~"):
            return place_value(root, parse_path(override[1:]), None)
        key, equals, text = override.partition("=")
        if not equals:
            raise ConfigError(f"expected key.path=value.{nearest(override, root.data)}")
        add, key = key.endswith("+"), key.removesuffix("+")
        path = parse_path(key)
        if not text:
            raise ConfigError(
                f"there is no value after '='. Write {key}=null for None, {key}='\"\"' for an empty string, or ~{key} "
                "to remove it."
            )
        return normalize(place_value(root, path, parse_override_value(text), add))
    except ConfigError as error:
        raise ConfigError(f"{COMMAND_LINE}: {override}: {error}") from None


def parse_override_value(text: str, source: str = COMMAND_LINE) -> Value:
    """Parse the value of an override: a list, a mapping or quoted text as YAML, any other text as a scalar."""
    if text[0] in "[{\"'":
        parsed = parse(text, "the value", lines=False)
        assert parsed is not None
        return _replace_sources(parsed, lambda _: source)
    try:
        parsed = parse_scalar(text)
    except ValueError as error:
        raise ConfigError(f"{text[:40]!r} can't be read as a number: {error}.") from error
    return Value(parsed, source, None if isinstance(parsed, str) else text)


def _replace_sources(value: Value, new: Callable[[str], str]) -> Value:
    data, source = value.data, new(value.source)
    if isinstance(data, dict):
        return replace(value, data={key: _replace_sources(item, new) for key, item in data.items()}, source=source)
    if isinstance(data, list):
        return replace(value, data=[_replace_sources(item, new) for item in data], source=source)
    return replace(value, source=source)


def parse_path(key: str) -> Path:
    """Split a dotted key into a path. LightningCLI's form (``model.init_args.lr``) is accepted, too."""
    parts = key.split(".")
    if not all(re.fullmatch(r"[\w-]+", part) for part in parts):
        raise ConfigError(f"{key!r} is not a key. Keys are words joined by dots, such as trainer.max_epochs.")
    return tuple("class" if part == "class_path" else part for part in parts if part != "init_args")


def resolve_references(root: Value, explicit: Container[str] = (COMMAND_LINE,)) -> Value:
    """Return the values with every ``${...}`` resolved.

    Values under ``vars`` whose source is in ``explicit`` must be used by a reference.
    """
    leaves = {path: value for path, value in iterate_values(root) if isinstance(value.data, str)}
    missing = next(((path, value) for path, value in leaves.items() if value.data == "???"), None)
    if missing is not None:
        raise ConfigError(f"{missing[1].source}: {format_path(missing[0])} is still '???'. Set a value.")
    marked = {path: value for path, value in leaves.items() if "${" in value.data}
    for path, value in marked.items():
        if problem := _find_reference_error(value.data):
            raise ConfigError(f"{value.source}: {format_path(path)}={value.data!r}{problem}")
    references = _References(root)
    references.check(marked)
    _refuse_idle(root, references.targets, explicit)
    return references.fill((), OmegaConf.create(to_plain(root))) if marked else root


def _find_reference_error(text: str) -> str | None:
    """Return a message about a syntax error in a text's references; None if they are valid."""
    for opened in _OPEN.finditer(text):
        resolver = _RESOLVER.match(text, opened.start())
        if resolver is None and _REFERENCE.match(text, opened.start()) is None:
            if "${" in text[opened.end() :].partition("}")[0]:
                return ": a reference can't be nested in the key of another reference. Write out the key."
            return f" contains an invalid reference. {_REFERENCE_HINT}"
        if resolver is not None and _REFUSED.match(resolver[1]):
            return f": {resolver[1]!r} is not supported. Use ${{section.key}} or ${{oc.env:NAME,default}}."
        if resolver is not None and resolver[1] == "oc.env" and not _VARIABLE.match(text, opened.end() - 2):
            return ": write the variable's name without quotes or references: ${oc.env:NAME} or ${oc.env:NAME,default}."
    try:
        OmegaConf.create([text])
    except OmegaConfBaseException as error:
        return f" contains an invalid reference: {_get_first_line(error)}. {_REFERENCE_HINT}"
    return None


def _refuse_idle(root: Value, targets: set[Path], explicit: Container[str]) -> None:
    """Raise a ConfigError if an explicitly set variable would have no effect, because no reference uses it."""
    section = root.data.get("vars")
    for path, value in iterate_values(section, ("vars",)) if section is not None else ():
        alone = not isinstance(value.data, dict | list) and value.source in explicit
        if alone and not any(path[: len(target)] == target for target in targets):
            valid_targets = [format_path(target) for target in targets if target[:1] == ("vars",)]
            raise ConfigError(
                f"{value.source}: {format_path(path)}={value.data!r} has no effect, because no reference uses it."
                f"{nearest(format_path(path), valid_targets)} Remove {format_path(path)}. In the configuration of an "
                "earlier run, references are already replaced by their values, so set the keys that contain these "
                "values."
            )


def _interpolate(value: Value, path: Path, carried: Any) -> Value:
    text = value.data
    try:
        node = carried
        for key in path:
            node = node[key]
        if OmegaConf.is_config(node):
            node = OmegaConf.to_container(node, resolve=True)
    except (OmegaConfBaseException, RecursionError) as error:
        unset = [
            variable[1]
            for variable in _VARIABLE.finditer(text)
            if variable[0].endswith("}") and variable[1] not in os.environ
        ]
        reason = "references are nested too deeply" if "recursion depth" in str(error) else _get_first_line(error)
        words = _describe_unset_variable(unset[0]) if unset else f"{reason}."
        raise ConfigError(f"{value.source}: {format_path(path)}={text!r}: {words}") from error
    return make_value(node, value.source)


def _describe_unset_variable(name: str) -> str:
    default = f"${{oc.env:{name},default}}"
    return f"environment variable {name!r} is not set. Set it, or add a default: {default}.{nearest(name, os.environ)}"


def _get_first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def _collect_secrets(root: Value) -> dict[str, str]:
    texts = [value.data for _, value in iterate_values(root) if isinstance(value.data, str)]
    names = {match[1] for text in texts for match in _VARIABLE.finditer(text) if _SECRET.search(match[1])}
    return {os.environ[name]: f"${{oc.env:{name}}}" for name in sorted(names) if os.environ.get(name)}


class _References:
    """References between values, with their targets and results."""

    def __init__(self, root: Value) -> None:
        self.values = dict(iterate_values(root))
        self.extents: dict[Path, int] = {}
        self.open: list[Path] = []
        self.targets: set[Path] = set()
        self.resolved_values: dict[Path, Value] = {}

    def check(self, marked: Iterable[Path]) -> None:
        """Raise a ConfigError for invalid references, and for those that expand to too many values."""
        for path in marked:
            value = self.values[path]
            try:
                extent = self.measure_extent(path)
            except RecursionError as error:
                raise ConfigError(f"{value.source}: {format_path(path)}: references are nested too deeply.") from error
            if extent > MOST_EXPANDED:
                raise ConfigError(
                    f"{value.source}: {format_path(path)}={value.data!r:.100} expands to more than "
                    f"{MOST_EXPANDED:,} values, the limit for a configuration."
                )

    def measure_extent(self, path: Path) -> int:
        """Return the number of values at a path with every reference expanded.

        Each full 100 characters of a text count as another value.
        """
        if path in self.extents:
            return self.extents[path]
        value = self.values[path]
        if path in self.open:
            circle = " -> ".join(format_path(step) for step in [*self.open[self.open.index(path) :], path])
            raise ConfigError(
                f"{value.source}: {format_path(path)}: the references are circular: {circle}. Replace one of them with "
                "a value."
            )
        self.open.append(path)
        extent = 1 + sum(self.measure_extent((*path, key)) for key in _list_keys(value.data))
        if isinstance(value.data, str):
            extent += len(value.data) // 100
            extent += sum(
                self.measure_extent(self.find_target(path, match[1])) for match in _REFERENCE.finditer(value.data)
            )
        self.open.pop()
        self.extents[path] = extent
        return extent

    def find_target(self, path: Path, reference: str) -> Path:
        """Return the path of a reference's target. A reference with leading dots is relative, as in OmegaConf."""
        name = reference.lstrip(".")
        ups = len(reference) - len(name)
        target: Path = path[: max(0, len(path) - ups)] if ups else ()
        for part in name.replace("[", ".").replace("]", "").split("."):
            container = self.values[target].data
            step = next((key for key in _list_keys(container) if str(key) == part), None)
            if step is None:
                value, valid_keys = self.values[path], [str(key) for key in _list_keys(container)]
                above = f" in {format_path(target)!r}" if target else ""
                raise ConfigError(
                    f"{value.source}: {format_path(path)}={value.data!r}: the referenced key {part!r} does not "
                    f"exist{above}.{nearest(part, valid_keys)}"
                )
            target = (*target, step)
        self.targets.add(target)
        return target

    def fill(self, path: Path, carried: Any) -> Value:
        """Return the value at a path with every reference resolved.

        A value that is a single reference keeps the text of its target, so ``1.10`` does not become ``1.1`` where text
        is expected.
        """
        if path not in self.resolved_values:
            value = self.values[path]
            if isinstance(value.data, dict):
                value = replace(value, data={key: self.fill((*path, key), carried) for key in value.data})
            elif isinstance(value.data, list):
                value = replace(value, data=[self.fill((*path, number), carried) for number in _list_keys(value.data)])
            elif isinstance(value.data, str) and "${" in value.data:
                value = self._resolve_single(value.data, path, carried) or _interpolate(value, path, carried)
            self.resolved_values[path] = value
        return self.resolved_values[path]

    def _resolve_single(self, text: str, path: Path, carried: Any) -> Value | None:
        """Return the value of a text that is a single ``${...}``; None if OmegaConf must interpolate the text."""
        source = self.values[path].source
        if text.startswith("$") and (reference := _REFERENCE.fullmatch(text)) is not None:
            return _replace_sources(self.fill(self.find_target(path, reference[1]), carried), lambda _: source)
        variable = _SINGLE_VARIABLE.fullmatch(text)
        if variable is None:
            return None
        name, default = variable.groups()
        if name in os.environ:
            value_text = os.environ[name]
        elif default is None:
            raise ConfigError(f"{source}: {format_path(path)}={text!r}: {_describe_unset_variable(name)}")
        elif re.search(r"[{}'\"]", value_text := default.strip()):
            return self._resolve_single(value_text, path, carried)
        return Value(parse_scalar(value_text), source, value_text)  # as if the value were written there


def _list_keys(data: Any) -> list[str | int]:
    return list(data) if isinstance(data, dict) else list(range(len(data))) if isinstance(data, list) else []
