"""Content of run folders. Files are not trusted, so only data is read."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ...common.messages import name_type
from ...common.remote_path import AnyPath, RemotePath, absolute, as_path, is_url, lexists
from .file_names import CONFIG, CURVES, ENVIRONMENT, ERROR, LOCK, RECORD
from .lock import holder, read_start

if TYPE_CHECKING:
    from ...callbacks.reporting import Points

T = TypeVar("T")

_MOST_BYTES = 2**24  # largest file that is read
_AT_ONCE = 16  # runs read from a store at the same time

WAITING = "waiting"
"""State of a run whose folder is prepared and that has not begun."""

_NUMBERS = (
    "began",
    "resumed",
    "ended",
    "updated",
    "seconds",
    "steps",
    "epochs",
    "samples",
    "processes",
    "pid",
    "trial",
)
_WORDS = ("state", "stage", "note", "error", "task", "host", "companion")


@dataclass(frozen=True)
class Run:
    """Run as recorded in its folder.

    Attributes:
        name: Name of the run's group, which is the name of the parent folder.
        number: Number of the run; 0 if the folder's name is not a number.
        state: State, such as ``"running"``, ``"finished"``, ``"failed: <Error>"`` or ``"interrupted"``. It is
            ``"killed"`` if the record states that the run is running, but no process holds the lock.
        facts: Entries of the record whose values have the right types.
        problem: The reason why the record cannot be read; "" if it can.
    """

    path: AnyPath
    name: str
    number: int
    state: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""

    @property
    def label(self) -> str:
        """Name and number of the run: ``"digits/3"``."""
        return f"{self.name}/{self.path.name}"

    @property
    def began(self) -> float:
        """Start time in seconds since 1970; if unknown, the time of the folder's last change, or 0."""
        if (began := self.facts.get("began")) is not None:
            return float(began)
        try:
            return self.path.stat().st_mtime if isinstance(self.path, Path) else 0.0
        except OSError:
            return 0.0

    @property
    def seconds(self) -> float | None:
        """Total duration of the run's sessions in seconds; None if unknown."""
        seconds = self.facts.get("seconds")
        if seconds is not None and self.state == "running":
            seconds += max(0.0, time.time() - self.facts.get("updated", math.inf))
        return seconds

    @property
    def best(self) -> Mapping[str, Any] | None:
        """Best value: ``metric``, ``value`` and, if recorded, ``mode`` and ``checkpoint``. None if unknown."""
        return self.facts.get("best")

    @property
    def parameters(self) -> Mapping[str, Any]:
        """Parameters that a sweep set, by dotted key."""
        return self.facts.get("parameters", {})

    @property
    def metrics(self) -> Mapping[str, float | str]:
        """Last metrics by name; a value that is not finite is a string."""
        return self.facts.get("metrics", {})

    def summary(self) -> dict[str, Any]:
        """Return the entries of the record as plain data, with the run's path, name, number, state and duration."""
        identity = {"path": str(self.path), "name": self.name, "number": self.number, "state": self.state}
        return {
            **self.facts,
            **identity,
            "seconds": self.seconds,
            **({"problem": self.problem} if self.problem else {}),
        }


def read(path: str | AnyPath) -> Run:
    """Read the record of a run from its folder.

    Raises:
        ValueError: If the path is not a run's folder.
        OSError: If the object store reports an error.
    """
    path = absolute(path)
    if not path.is_dir():
        reason = "is a file, not a run's folder" if path.is_file() else "does not exist"
        raise ValueError(f"{path} {reason}.")
    if not (lexists(path / RECORD) or lexists(path / LOCK)):
        raise ValueError(
            f"{path} is not a run's folder, because it has no {RECORD}. Pass a folder such as runs/default/1."
        )
    number = int(path.name) if path.name.isascii() and path.name.isdigit() else 0
    try:
        facts = _select_facts(_read_json(path / RECORD))
    except ValueError as error:
        is_locked = holder(path) is not None
        return Run(path, path.parent.name, number, "running" if is_locked else "unreadable", {}, f"{RECORD}: {error}")
    state = facts.pop("state", "unreadable")
    if state == "running" and holder(path) is None:
        state = "killed"
    if state == "killed" or state.startswith("failed"):
        first_error = _read_first_error(path)  # another process may have failed before rank zero did, or was killed
        state = first_error.pop("state", state)
        facts |= first_error
    return Run(path, path.parent.name, number, state, facts)


def _read_first_error(path: AnyPath) -> dict[str, str]:
    try:
        record = _read_json(path / ERROR)
    except ValueError:
        return {}
    return {name: record[name] for name in ("state", "error") if isinstance(record.get(name), str)}


def find(directory: AnyPath) -> list[Run]:
    """Return the runs in the folders ``<name>/<number>`` or ``<number>`` of a directory or URL, earliest first.

    Raises:
        ValueError: If the directory cannot be read.
    """
    try:
        names = _list_names(directory)
    except OSError as error:
        raise ValueError(
            f"{directory} cannot be read: {error.strerror or error}. Pass the directory that contains the runs."
        ) from error
    folders = [directory] + [directory / name for name in names if not name.startswith(".")]
    numbered = [path for folder in folders for path in _list_numbered(folder)]
    if isinstance(directory, RemotePath):  # each request takes a while
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            runs = list(pool.map(_read_or_none, numbered))
    else:
        runs = list(map(_read_or_none, numbered))
    return sorted(filter(None, runs), key=lambda run: (run.began, run.name, run.number))


def _list_names(folder: AnyPath) -> list[str]:
    return folder.names() if isinstance(folder, RemotePath) else sorted(os.listdir(folder))


def _list_numbered(folder: AnyPath) -> list[AnyPath]:
    """Return the paths in a folder whose names are numbers."""
    try:
        return [folder / name for name in _list_names(folder) if name.isascii() and name.isdigit()]
    except OSError:
        return []


def _read_or_none(path: AnyPath) -> Run | None:
    try:
        return read(path)
    except (ValueError, OSError):
        return None  # not a run's folder


def locate(reference: str | None, directory: AnyPath, name: str | None = None) -> AnyPath:
    """Resolve a command's reference to a run, and return the path.

    The reference is a number, a name and number (``"digits/3"``), the path of a run or of something in its folder, or
    None for the latest run. For a number or None, only runs with the given ``name`` are considered.

    Raises:
        ValueError: If no run, or more than one, matches the reference.
    """
    is_number = reference is not None and reference.isascii() and reference.isdigit()
    if reference is not None and not is_number:
        if is_url(reference):
            return as_path(reference)
        for path in (Path(reference), directory / reference):
            if lexists(path):
                return path
        raise ValueError(
            f"there is no run {reference!r}. Pass the number of a run, its name and number (default/3), or its path."
        )
    runs = [run for run in find(directory) if name in (None, run.name)] if directory.is_dir() or not is_number else []
    if reference is None and runs:
        return runs[-1].path
    matches = [run for run in runs if run.number == int(reference or 0)]
    if len(matches) > 1:
        names = ", ".join(run.label for run in matches)
        raise ValueError(
            f"{reference} is the number of several runs: {names}. Also pass the name, as in {matches[0].label}."
        )
    if matches:
        return matches[0].path
    if is_number and Path(str(reference)).is_dir():
        return Path(str(reference))
    if not runs:
        raise ValueError(f"there are no runs {'' if name is None else f'with the name {name!r} '}in {directory}.")
    command = "treadle runs" if str(directory) == "runs" else f"treadle runs {directory}"
    raise ValueError(f"there is no run {reference} in {directory}. `{command}` lists the runs.")


def holding(path: AnyPath) -> AnyPath:
    """Return the run folder that contains a path, or the path itself if there is none."""
    path = absolute(path)
    return next((folder for folder in (path, *path.parents) if lexists(folder / RECORD)), path)


def charts(run: Run) -> dict[str, dict[str, tuple[Points, int]]]:
    """Return the curves of each chart, by the names of the chart and the curve.

    A curve consists of its points (steps and values) and the number of points that were left out.

    Raises:
        ValueError: If the run's file of curves exists but cannot be read.
    """
    return _read_if_present(run, CURVES, _parse_charts, {})


def _parse_charts(path: AnyPath) -> dict[str, dict[str, tuple[Points, int]]]:
    return {
        str(title): {str(name): _parse_points(curve) for name, curve in lines.items()}
        for title, lines in _read_json(path)["charts"].items()
    }


def _parse_points(curve: Any) -> tuple[Points, int]:
    """Return the points of a saved curve without infinite, NaN and huge values, and the number of points left out."""
    from ...callbacks.reporting import LARGEST

    steps, values = curve["steps"], curve["values"]
    points = [(s, float(v)) for s, v in zip(steps, values, strict=True) if _is_number(s) and _is_number(v)]
    points = sorted((step, value) for step, value in points if abs(step) <= LARGEST and abs(value) <= LARGEST)
    missing = curve.get("missing", 0)
    omitted = len(steps) - len(points) + (missing if _is_number(missing) else 0)
    return ([step for step, _ in points], [value for _, value in points]), int(omitted)


def environment(run: Run) -> dict[str, str]:
    """Return the versions, git revision and hardware that the run recorded; an empty dict if it recorded none.

    Raises:
        ValueError: If the file with this record exists but cannot be read.
    """
    return _read_if_present(run, ENVIRONMENT, lambda path: {key: str(v) for key, v in _read_json(path).items()}, {})


def config(run: Run) -> str:
    """Return the YAML text of the configuration; "" if there is none.

    Raises:
        ValueError: If the configuration file exists but cannot be read.
    """
    return _read_if_present(run, CONFIG, _read_text, "")


def _read_if_present(run: Run, name: str, read: Callable[[AnyPath], T], default: T) -> T:
    if not lexists(run.path / name):
        return default
    try:
        return read(run.path / name)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{name} cannot be read: {reason}") from error


def _read_text(path: AnyPath) -> str:
    """Return a file's text; raise a ValueError if it is missing, not a file, too large, or not text."""
    try:
        data = read_start(path, _MOST_BYTES + 1)
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from error
    if len(data) > _MOST_BYTES:
        raise ValueError(f"it is larger than {_MOST_BYTES:,} bytes")
    return data.decode("utf-8")


def _read_json(path: AnyPath) -> dict[str, Any]:
    try:
        document = json.loads(_read_text(path), parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(document, dict):
        raise ValueError(f"it contains {name_type(document)}, not a JSON object")
    return document


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"it contains {text}, which is not valid JSON")


def _select_facts(record: dict[str, Any]) -> dict[str, Any]:
    facts = {name: record[name] for name in _NUMBERS if _is_number(record.get(name)) and 0 <= record[name] < 1e15}
    facts |= {name: record[name] for name in _WORDS if isinstance(record.get(name), str)}
    metrics = record.get("metrics")
    if isinstance(metrics, dict):
        facts["metrics"] = {name: value for name, value in metrics.items() if _is_value(value)}
    for name in ("best", "objective"):
        best = record.get(name)
        if isinstance(best, dict) and isinstance(best.get("metric"), str) and _is_value(best.get("value")):
            words = {name: best[name] for name in ("mode", "checkpoint") if isinstance(best.get(name), str)}
            facts[name] = {"metric": best["metric"], "value": best["value"], **words}
    for name in ("hyperparameters", "flags", "digests"):
        texts = record.get(name)
        if isinstance(texts, dict):
            facts[name] = {key: text for key, text in texts.items() if isinstance(text, str)}
    parameters = record.get("parameters")
    if isinstance(parameters, dict):
        facts["parameters"] = {n: v for n, v in parameters.items() if isinstance(v, str | bool | None) or _is_number(v)}
    return facts


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_value(value: Any) -> bool:
    return _is_number(value) or (isinstance(value, str) and value in ("nan", "inf", "-inf"))
