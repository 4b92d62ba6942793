"""Configurations: files, then overrides, merged and resolved. OmegaConf's grammar fills in ``${...}``."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    dotted,
    flattened,
    hidden,
    merged,
    placed,
    plain,
    value_of,
    walk,
)
from .yaml_loader import parse, read, scalar

SECTIONS = {
    "trainer": "the Trainer's flags",
    "model": "the task: {class: my_module.MyTask, argument: ...}",
    "data": "the data module, likewise",
    "optimizer": "AdamW or {class: AdamW, lr: 1e-3}, in place of the task's configure_optimizers",
    "lr_scheduler": "{class: CosineAnnealingLR, T_max: 10, interval: step}, likewise",
    "seed": "of all random numbers; null leaves them alone",
    "ckpt_path": "a checkpoint to go on from, or to evaluate",
    "schedule": "with ckpt_path in fit: whose learning rates and schedule hold, saved or script",
    "run": "{name: default, dir: runs}: where the run's folder is",
    "vars": "whatever you like, to refer to as ${vars.name}",
}
"""What a configuration may hold."""

COMMAND_LINE = "command line"
MOST_EXPANDED = 100_000

_OPEN = re.compile(r"(?<!\\)(?:\\\\)*\$\{")  # two backslashes before it stand for one
_SOURCE = re.compile(r"  # ([^,#]+)[^#]*$")  # as `printed.as_yaml` writes it
_REFERENCE = re.compile(_OPEN.pattern + r"\s*(\.*[^\s${}:'\"()\\]+)\s*\}")
_RESOLVER = re.compile(_OPEN.pattern + r"\s*([\w.]+)\s*:")
_VARIABLE = re.compile(r"\$\{\s*oc\.env\s*:\s*(\w+)\s*(?:\}|,)")
_ONE_VARIABLE = re.compile(r"\$\{\s*oc\.env\s*:\s*(\w+)\s*(?:,(.*))?\}", re.DOTALL)
_REFUSED = re.compile(r"oc\.(?!env$|decode$)")  # they make configurations, or know of what is not written
_HOW_TO_REFER = "Write ${section.key}, ${oc.env:NAME,default}, or \\${ for the characters themselves."
_SECRET = re.compile(r"KEY|TOKEN(?!S|IZ)|SECRET|PASSW|PASS$|_PWD|CREDENTIAL|_AUTH$", re.IGNORECASE)


@dataclass(frozen=True)
class Config:
    """A configuration with nothing left open.

    Attributes:
        root: its values, each with its source.
        secrets: values of environment variables that look like secrets, and how the configuration refers to them;
            they are written down in no place.
    """

    root: Value
    secrets: Mapping[str, str] = field(default_factory=dict)

    def section(self, name: str) -> Value | None:
        """A section; None where there is none, or nothing in it."""
        found = self.root.data.get(name)
        return None if found is None or found.data is None else found

    def plain(self) -> dict[str, Any]:
        """The data alone."""
        return dict(plain(self.root))

    def where(self, key: str) -> str:
        """Where the value of a dotted key was written, or the nearest one above it."""
        value = self.root
        for part in key.split("."):
            inside = value.data
            if isinstance(inside, list) and part.isdecimal() and int(part) < len(inside):
                value = inside[int(part)]
            elif isinstance(inside, dict) and part in inside:
                value = inside[part]
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
    """Read, merge and resolve a configuration. Nothing in it is run, imported or built.

    Args:
        files: YAML files; a later one wins over those before.
        overrides: ``key.path=value`` (lists by number, the value as in YAML), ``key.path+=value`` to add to a list,
            ``~key.path`` to take out. They win over the files.
        defaults: what the files win over.
        earlier: name and YAML of the configuration of an earlier run, which comes before the files.

    Raises:
        ConfigError: names file, line and key.
    """
    root = flattened(value_of(dict(defaults or {}), "script"))
    if earlier is not None:
        root = merged(root, _of_earlier(*earlier))
    for file in files:
        root = merged(root, flattened(read(file)))
    for override in overrides:
        root = _overridden(root, override)
    secrets = _secrets(root)
    try:
        return Config(_resolved(root), secrets)
    except ConfigError as error:  # OmegaConf may have quoted a variable's value
        raise ConfigError(hidden(str(error), secrets)) from None


def _of_earlier(name: str, text: str) -> Value:
    """What an earlier run was configured with. If that went on from a checkpoint of its own, this begins anew."""
    found = parse(text, name)
    if found is None or found.data is None:
        return Value({}, name)
    places = {}
    for number, line in enumerate(text.splitlines(), 1):
        if first := _SOURCE.search(line):
            places[f"{name}:{number}"] = f"{first[1]}, {name}:{number}"
    root = _sourced(flattened(found), lambda place: places.get(place, place))
    started = root.data.get("ckpt_path")
    if started is not None and started.data in WORDS_FOR_CHECKPOINTS:
        del root.data["ckpt_path"]
        root.data.pop("schedule", None)
    return root


def _overridden(root: Value, override: str) -> Value:
    try:
        if override.startswith("~"):
            return placed(root, path_of(override[1:]), None)
        key, equals, text = override.partition("=")
        if not equals:
            raise ConfigError(f"write it as key.path=value.{nearest(override, root.data)}")
        add, key = key.endswith("+"), key.removesuffix("+")
        path = path_of(key)
        if not text:
            raise ConfigError(
                f"nothing stands behind '='. Write {key}=null for none, {key}='\"\"' for empty text, or ~{key} to take "
                "it out."
            )
        return flattened(placed(root, path, _given(text), add))
    except ConfigError as error:
        raise ConfigError(f"{COMMAND_LINE}: {override}: {error}") from None


def _given(text: str) -> Value:
    """The value of an override: YAML where it is a list, a mapping or in quotes, else one word or text."""
    if text[0] in "[{\"'":
        found = parse(text, "its value", lines=False)
        assert found is not None
        return _sourced(found, lambda _: COMMAND_LINE)
    try:
        found = scalar(text)
    except ValueError as error:
        raise ConfigError(f"{text[:40]!r} can't be read as a number: {error}.") from error
    return Value(found, COMMAND_LINE, None if isinstance(found, str) else text)


def _sourced(value: Value, new: Callable[[str], str]) -> Value:
    """The same values, said to come from elsewhere."""
    data, source = value.data, new(value.source)
    if isinstance(data, dict):
        return replace(value, data={key: _sourced(item, new) for key, item in data.items()}, source=source)
    if isinstance(data, list):
        return replace(value, data=[_sourced(item, new) for item in data], source=source)
    return replace(value, source=source)


def path_of(key: str) -> Path:
    """The parts of a dotted key, in LightningCLI's words too (``model.init_args.lr``).

    Raises:
        ConfigError: it is none.
    """
    parts = key.split(".")
    if not all(re.fullmatch(r"[\w-]+", part) for part in parts):
        raise ConfigError(f"{key!r} is no key: words with dots between them, as in trainer.max_epochs.")
    return tuple("class" if part == "class_path" else part for part in parts if part != "init_args")


def _resolved(root: Value) -> Value:
    """The values with every ``${...}`` filled in."""
    leaves = {path: value for path, value in walk(root) if isinstance(value.data, str)}
    missing = next(((path, value) for path, value in leaves.items() if value.data == "???"), None)
    if missing is not None:
        raise ConfigError(f"{missing[1].source}: {dotted(missing[0])} is still '???': give it a value.")
    marked = {path: value for path, value in leaves.items() if "${" in value.data}
    for path, value in marked.items():
        if wrong := _wrong_form(value.data):
            raise ConfigError(f"{value.source}: {dotted(path)}={value.data!r}{wrong}")
    references = _References(root)
    references.check(marked)
    _refuse_idle(root, references.targets)
    return references.filled((), OmegaConf.create(plain(root))) if marked else root


def _wrong_form(text: str) -> str | None:
    """What is wrong with a text as it is written; None if nothing is."""
    for opened in _OPEN.finditer(text):
        resolver = _RESOLVER.match(text, opened.start())
        if resolver is None and _REFERENCE.match(text, opened.start()) is None:
            if "${" in text[opened.end() :].partition("}")[0]:
                return ": no ${...} inside the key of another."
            return f" is no reference. {_HOW_TO_REFER}"
        if resolver is not None and _REFUSED.match(resolver[1]):
            return f": {resolver[1]!r} is not taken; use ${{section.key}} or ${{oc.env:NAME,default}}."
        if resolver is not None and resolver[1] == "oc.env" and not _VARIABLE.match(text, opened.end() - 2):
            return ": write the variable's own name: ${oc.env:NAME} or ${oc.env:NAME,default}."
    try:
        OmegaConf.create([text])
    except OmegaConfBaseException as error:
        return f" is no reference: {_first_line(error)}. {_HOW_TO_REFER}"
    return None


def _refuse_idle(root: Value, targets: set[Path]) -> None:
    """Raise for a variable on the command line that nothing refers to: setting it would do nothing."""
    section = root.data.get("vars")
    for path, value in walk(section, ("vars",)) if section is not None else ():
        alone = not isinstance(value.data, dict | list) and value.source == COMMAND_LINE
        if alone and not any(path[: len(target)] == target for target in targets):
            known = [dotted(target) for target in targets if target[:1] == ("vars",)]
            raise ConfigError(
                f"{COMMAND_LINE}: {dotted(path)}={value.data!r}: nothing refers to it.{nearest(dotted(path), known)} "
                "In the configuration of an earlier run references have become values: set those."
            )


def _interpolated(value: Value, path: Path, carried: Any) -> Value:
    """What OmegaConf makes of a text at a path."""
    text = value.data
    try:
        found = carried
        for key in path:
            found = found[key]
        if OmegaConf.is_config(found):
            found = OmegaConf.to_container(found, resolve=True)
    except (OmegaConfBaseException, RecursionError) as error:
        unset = [one[1] for one in _VARIABLE.finditer(text) if one[0].endswith("}") and one[1] not in os.environ]
        said = "too many references in a row" if "recursion depth" in str(error) else _first_line(error)
        words = _unset(unset[0]) if unset else f"{said}."
        raise ConfigError(f"{value.source}: {dotted(path)}={text!r}: {words}") from error
    return value_of(found, value.source)


def _unset(name: str) -> str:
    default = f"${{oc.env:{name},default}}"
    return f"the environment has no variable {name!r}. Set it, or give a default: {default}.{nearest(name, os.environ)}"


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def _secrets(root: Value) -> dict[str, str]:
    texts = [value.data for _, value in walk(root) if isinstance(value.data, str)]
    names = {found[1] for text in texts for found in _VARIABLE.finditer(text) if _SECRET.search(found[1])}
    return {os.environ[name]: f"${{oc.env:{name}}}" for name in sorted(names) if os.environ.get(name)}


class _References:
    """The references among values: where they lead, how much they stand for, what they become."""

    def __init__(self, root: Value) -> None:
        self.values = dict(walk(root))
        self.extents: dict[Path, int] = {}
        self.open: list[Path] = []
        self.targets: set[Path] = set()
        self.known: dict[Path, Value] = {}

    def check(self, marked: Iterable[Path]) -> None:
        """Refuse references to nothing, in a circle, or without end, before anything is written out."""
        for path in marked:
            value = self.values[path]
            try:
                extent = self.extent(path)
            except RecursionError as error:
                raise ConfigError(f"{value.source}: {dotted(path)}: too many references in a row.") from error
            if extent > MOST_EXPANDED:
                raise ConfigError(
                    f"{value.source}: {dotted(path)}={value.data!r:.100} has no end: written out, more than "
                    f"{MOST_EXPANDED:,} values."
                )

    def extent(self, path: Path) -> int:
        """How many values there are below a path once every reference is written out."""
        if path in self.extents:
            return self.extents[path]
        value = self.values[path]
        if path in self.open:
            circle = " -> ".join(dotted(one) for one in [*self.open[self.open.index(path) :], path])
            raise ConfigError(f"{value.source}: {dotted(path)}: references in a circle: {circle}.")
        self.open.append(path)
        extent = 1 + sum(self.extent((*path, key)) for key in _keys(value.data))
        if isinstance(value.data, str):
            extent += len(value.data) // 100
            extent += sum(self.extent(self.target(path, found[1])) for found in _REFERENCE.finditer(value.data))
        self.open.pop()
        self.extents[path] = extent
        return extent

    def target(self, path: Path, reference: str) -> Path:
        """Where a reference leads; dots before it go up, one stays in the same mapping."""
        name = reference.lstrip(".")
        ups = len(reference) - len(name)
        found: Path = path[: max(0, len(path) - ups)] if ups else ()
        for part in name.replace("[", ".").replace("]", "").split("."):
            here = self.values[found].data
            step = next((key for key in _keys(here) if str(key) == part), None)
            if step is None:
                value, known = self.values[path], [str(key) for key in _keys(here)]
                above = f" in {dotted(found)!r}" if found else ""
                raise ConfigError(
                    f"{value.source}: {dotted(path)}={value.data!r}: there is no {part!r}{above} to refer to."
                    f"{nearest(part, known)}"
                )
            found = (*found, step)
        self.targets.add(found)
        return found

    def filled(self, path: Path, carried: Any) -> Value:
        """The value at a path with every reference in it filled in.

        One that is a single reference becomes what is there, as it was written: ``1.10`` may be meant as text.

        Args:
            path: see above.
            carried: all values in OmegaConf's hands, which fills in the others.
        """
        if path not in self.known:
            value = self.values[path]
            if isinstance(value.data, dict):
                value = replace(value, data={key: self.filled((*path, key), carried) for key in value.data})
            elif isinstance(value.data, list):
                value = replace(value, data=[self.filled((*path, number), carried) for number in _keys(value.data)])
            elif isinstance(value.data, str) and "${" in value.data:
                value = self._alone(value.data, path, carried) or _interpolated(value, path, carried)
            self.known[path] = value
        return self.known[path]

    def _alone(self, text: str, path: Path, carried: Any) -> Value | None:
        """What a text stands for that is one reference or variable and nothing else; None for any other."""
        source = self.values[path].source
        if text.startswith("$") and (reference := _REFERENCE.fullmatch(text)) is not None:
            return _sourced(self.filled(self.target(path, reference[1]), carried), lambda _: source)
        variable = _ONE_VARIABLE.fullmatch(text)
        if variable is None:
            return None
        name, default = variable.groups()
        if name in os.environ:
            found = os.environ[name]
        elif default is None:
            raise ConfigError(f"{source}: {dotted(path)}={text!r}: {_unset(name)}")
        elif re.search(r"[{}'\"]", found := default.strip()):
            return self._alone(found, path, carried)
        return Value(scalar(found), source, found)  # as if it were written there


def _keys(data: Any) -> list[str | int]:
    return list(data) if isinstance(data, dict) else list(range(len(data))) if isinstance(data, list) else []
