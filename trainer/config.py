"""Configurations: files, then overrides, merged and resolved. OmegaConf's grammar fills in ``${...}``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from .config_files import parse, read, scalar
from .config_values import ConfigError, Path, Value, dotted, flattened, meant, merged, placed, plain, value_of, walk

SECTIONS = {
    "trainer": "the Trainer's flags",
    "model": "the task: {class: my_module.MyTask, argument: ...}",
    "data": "the data module, likewise",
    "optimizer": "AdamW or {class: AdamW, lr: 1e-3}, in place of the task's configure_optimizers",
    "lr_scheduler": "{class: CosineAnnealingLR, T_max: 10, interval: step}, likewise",
    "seed": "of all random numbers; null leaves them alone",
    "ckpt_path": "a checkpoint to go on from, or to evaluate",
    "run": "{name: default, dir: runs}: where the run's folder is",
    "vars": "whatever you like, to refer to as ${vars.name}",
}
"""What a configuration may hold."""

COMMAND_LINE = "command line"
MOST_EXPANDED = 100_000

_REFERENCE = re.compile(r"(?<!\\)\$\{(\.*[\w.\[\]-]+)\}")
_VARIABLE = re.compile(r"\$\{oc\.env:([^,}]+)(?:,([^{}]*))?\}")
_INSIDE_A_KEY = re.compile(r"\$\{[^:{}]*\$\{")
_MAKES_CONFIGS = re.compile(r"\$\{oc\.(select|create|deprecated|dict\.\w+):")
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)


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
    texts: Sequence[tuple[str, str]] = (),
) -> Config:
    """Read, merge and resolve a configuration. Nothing in it is run, imported or built.

    Args:
        files: YAML files; a later one wins over those before.
        overrides: ``key.path=value`` (lists by number, the value as in YAML), ``key.path+=value`` to add to a list,
            ``~key.path`` to take out. They win over the files.
        defaults: what the files win over.
        texts: names and YAML of what comes before the files: the configuration of an earlier run.

    Raises:
        ConfigError: names file, line and key.
    """
    root = flattened(value_of(dict(defaults or {}), "script"))
    for name, text in texts:
        found = parse(text, name)
        if found is not None:
            root = merged(root, flattened(found))
    for file in files:
        root = merged(root, flattened(read(file)))
    for override in overrides:
        root = _overridden(root, override)
    return Config(_resolved(root), _secrets(root))


def _overridden(root: Value, override: str) -> Value:
    try:
        if override.startswith("~"):
            return placed(root, path_of(override[1:]), None)
        key, equals, text = override.partition("=")
        if not equals:
            raise ConfigError(f"write it as key.path=value.{meant(override, root.data)}")
        add = key.endswith("+")
        path = path_of(key.removesuffix("+"))
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
        return _from(found, COMMAND_LINE)
    try:
        found = scalar(text)
    except ValueError as error:
        raise ConfigError(f"{text[:40]!r} can't be read as a number: {error}.") from error
    return Value(found, COMMAND_LINE, None if isinstance(found, str) else text)


def _from(value: Value, source: str) -> Value:
    if isinstance(value.data, dict):
        return replace(value, data={key: _from(item, source) for key, item in value.data.items()}, source=source)
    if isinstance(value.data, list):
        return replace(value, data=[_from(item, source) for item in value.data], source=source)
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
        _check_form(path, value)
    extent = _Extent(root)
    extent.check(marked)
    _refuse_idle(root, extent.targets)
    if not marked:
        return root
    carried = OmegaConf.create(plain(root))
    return _filled(root, (), set(marked), carried)


def _check_form(path: Path, value: Value) -> None:
    if _INSIDE_A_KEY.search(value.data):
        raise ConfigError(f"{value.source}: {dotted(path)}={value.data!r}: no ${{...}} inside the key of another.")
    if found := _MAKES_CONFIGS.search(value.data):
        raise ConfigError(
            f"{value.source}: {dotted(path)}={value.data!r}: '{found[0][2:-1]}' is not taken; use ${{section.key}} or "
            "${oc.env:NAME,default}."
        )
    try:
        OmegaConf.create([value.data])
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"{value.source}: {dotted(path)}={value.data!r} is no reference: {_first_line(error)}. Write "
            "${section.key}, ${oc.env:NAME,default}, or \\${ for the characters themselves."
        ) from error


def _refuse_idle(root: Value, targets: set[Path]) -> None:
    """Raise for a variable on the command line that nothing refers to: setting it would do nothing."""
    section = root.data.get("vars")
    for path, value in walk(section, ("vars",)) if section is not None else ():
        alone = not isinstance(value.data, dict | list) and value.source == COMMAND_LINE
        if alone and not any(path[: len(target)] == target for target in targets):
            known = [dotted(target) for target in targets if target[:1] == ("vars",)]
            raise ConfigError(
                f"{COMMAND_LINE}: {dotted(path)}={value.data!r}: nothing refers to it.{meant(dotted(path), known)} In "
                "the configuration of an earlier run references have become values: set those."
            )


def _filled(value: Value, path: Path, marked: set[Path], carried: Any) -> Value:
    if path in marked:
        return _interpolated(value, path, carried)
    if isinstance(value.data, dict):
        inside = {key: _filled(item, (*path, key), marked, carried) for key, item in value.data.items()}
        return replace(value, data=inside)
    if isinstance(value.data, list):
        return replace(value, data=[_filled(item, (*path, n), marked, carried) for n, item in enumerate(value.data)])
    return value


def _interpolated(value: Value, path: Path, carried: Any) -> Value:
    text = value.data
    try:
        found = carried
        for key in path:
            found = found[key]
        if OmegaConf.is_config(found):
            found = OmegaConf.to_container(found, resolve=True)
    except (OmegaConfBaseException, RecursionError) as error:
        raise ConfigError(f"{value.source}: {dotted(path)}={text!r}: {_explained(error, text)}") from error
    variable = _VARIABLE.fullmatch(text)
    made = value_of(found, value.source)
    if variable and isinstance(found, str):
        made = replace(made, data=scalar(found), text=found)  # as if it were written there
    return made


def _explained(error: Exception, text: str) -> str:
    for name, _ in _VARIABLE.findall(text):
        if name.strip() not in os.environ:
            close = meant(name.strip(), os.environ)
            return (
                f"the environment has no variable {name.strip()!r}. Set it, or give a default: "
                f"${{oc.env:{name.strip()},default}}.{close}"
            )
    return f"{_first_line(error)}."


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def _secrets(root: Value) -> dict[str, str]:
    texts = [value.data for _, value in walk(root) if isinstance(value.data, str)]
    found = [match for text in texts for match in _VARIABLE.finditer(text) if _SECRET.search(match[1])]
    return {secret: match[0] for match in found if (secret := os.environ.get(match[1].strip()))}


class _Extent:
    """How long values would be if every reference were written out; found before anything is."""

    def __init__(self, root: Value) -> None:
        self.values = dict(walk(root))
        self.known: dict[Path, int] = {}
        self.open: list[Path] = []
        self.targets: set[Path] = set()

    def check(self, marked: Iterable[Path]) -> None:
        """Refuse references to nothing, in a circle, or without end."""
        for path in marked:
            try:
                extent = self.of(path)
            except RecursionError as error:
                raise ConfigError(
                    f"{self.values[path].source}: {dotted(path)}: too many references in a row."
                ) from error
            if extent > MOST_EXPANDED:
                value = self.values[path]
                raise ConfigError(
                    f"{value.source}: {dotted(path)}={value.data!r:.100} has no end: written out, more than "
                    f"{MOST_EXPANDED:,} values."
                )

    def of(self, path: Path) -> int:
        if path in self.known:
            return self.known[path]
        value = self.values[path]
        if path in self.open:
            circle = " -> ".join(dotted(one) for one in [*self.open[self.open.index(path) :], path])
            raise ConfigError(f"{value.source}: {dotted(path)}: references in a circle: {circle}.")
        self.open.append(path)
        extent = 1
        if isinstance(value.data, dict):
            extent += sum(self.of((*path, key)) for key in value.data)
        elif isinstance(value.data, list):
            extent += sum(self.of((*path, number)) for number in range(len(value.data)))
        elif isinstance(value.data, str):
            extent += len(value.data) // 100
            extent += sum(self.of(self.target(path, found[1])) for found in _REFERENCE.finditer(value.data))
        self.open.pop()
        self.known[path] = extent
        return extent

    def target(self, path: Path, reference: str) -> Path:
        """Where a reference leads; dots before it go up, one stays in the same mapping."""
        name = reference.lstrip(".")
        ups = len(reference) - len(name)
        found: Path = path[: len(path) - ups] if ups else ()
        if ups > len(path):
            found = ()
        for part in name.replace("[", ".").replace("]", "").split("."):
            here = self.values[found].data
            step = next((key for key in _keys(here) if str(key) == part), None)
            if step is None:
                value, known = self.values[path], [str(key) for key in _keys(here)]
                above = f" in {dotted(found)!r}" if found else ""
                raise ConfigError(
                    f"{value.source}: {dotted(path)}={value.data!r}: there is no {part!r}{above} to refer to."
                    f"{meant(part, known)}"
                )
            found = (*found, step)
        self.targets.add(found)
        return found


def _keys(data: Any) -> list[str | int]:
    return list(data) if isinstance(data, dict) else list(range(len(data))) if isinstance(data, list) else []
