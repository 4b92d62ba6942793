"""Comparison of runs: their metrics side by side, differences between their configurations, and an HTML page."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..callbacks.reporting import (
    Chart,
    Points,
    choose_styles,
    escape,
    format_duration,
    format_number,
    group_names,
    make_chart_script,
    render_charts,
    render_document,
    render_section,
)
from ..common.messages import format_count
from ..trainer.runs import Run, index
from .config import ConfigError, format_path, iterate_values, parse

_OWN_FOLDER = "trainer.default_root_dir"  # it differs between any two runs

Rows = dict[str, list[str]]
"""Table rows by name, with one cell per run; "" if the run does not have a value of that name."""


class Comparison:
    """Comparison of two or more runs, with one column per run.

    Attributes:
        labels: Name and number of each run; the run's path if several runs have the same name and number.
        config: Configuration keys whose values differ, except ``trainer.default_root_dir``.
        shared_config: Number of configuration keys whose values are the same in all runs.
        hyperparameters: Recorded hyperparameters of the task and the data module whose values differ.
        environment: Versions, revision and hardware that differ.
        metrics: Last value of each metric that any run logged.
        weights: Two of the steps at which all runs recorded a digest of their weights: the last one at which they are
            equal, and the first one at which they differ. None if there is none.
        charts: Points of each curve, by the curve's name and then by the run's label.
        problems: A message for each file that cannot be read; its run is treated as if the file were empty.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = list(runs)
        self.labels = _label_runs(self.runs)
        self.problems = [
            f"{label}: {run.problem}" for label, run in zip(self.labels, self.runs, strict=True) if run.problem
        ]
        self.facts = _drop_empty({name: [get(run) for run in self.runs] for name, get in _FACTS.items()})
        configs = _tabulate(self._read_each(_flatten_config))
        self.config = {name: cells for name, cells in configs.items() if _differ(cells)}
        self.shared_config = len(configs) - len(self.config)
        hyperparameters = _tabulate([run.facts.get("hyperparameters", {}) for run in self.runs])
        self.hyperparameters = {name: cells for name, cells in hyperparameters.items() if _differ(cells)}
        environments = _tabulate(self._read_each(index.environment))
        self.environment = {name: cells for name, cells in environments.items() if _differ(cells)}
        self.metrics = _tabulate(
            [{name: format_value(value) for name, value in sorted(run.metrics.items())} for run in self.runs]
        )
        self.weights = self._compare_digests()
        self.charts = self._collect_charts()

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as nested dicts and lists that ``json.dumps`` accepts."""
        return {
            "runs": [run.summary() for run in self.runs],
            "labels": self.labels,
            "config": self.config,
            "hyperparameters": self.hyperparameters,
            "environment": self.environment,
            "metrics": self.metrics,
            "weights": dict(zip(("equal_until", "differ_at"), self.weights, strict=True)),
            "charts": {
                metric: {
                    label: {"steps": list(steps), "values": list(values)} for label, (steps, values) in lines.items()
                }
                for metric, lines in self.charts.items()
            },
            "problems": self.problems,
        }

    def _read_each(self, read: Callable[[Run], Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return the result of ``read`` for each run. If a file is unreadable, add a problem and use an empty dict."""
        contents: list[Mapping[str, Any]] = []
        for label, run in zip(self.labels, self.runs, strict=True):
            try:
                contents.append(read(run))
            except (ValueError, OSError) as error:
                self.problems.append(f"{label}: {error}")
                contents.append({})
        return contents

    def _compare_digests(self) -> tuple[int | None, int | None]:
        columns = [run.facts.get("digests", {}) for run in self.runs]
        steps = sorted(int(step) for step in set.intersection(*map(set, columns)) if step.isdecimal())
        equal = None
        for step in steps:
            if len({column[str(step)] for column in columns}) > 1:
                return equal, step
            equal = step
        return equal, None

    def _collect_charts(self) -> dict[str, dict[str, Points]]:
        charts: dict[str, dict[str, Points]] = {}
        columns = self._read_each(index.charts)
        # Rates are named after the optimizers, which may differ between the runs.
        single = {title for saved in columns for title in saved if all(len(s.get(title, ())) <= 1 for s in columns)}
        for label, saved in zip(self.labels, columns, strict=True):
            for title, lines in saved.items():
                for metric, (points, _) in lines.items():
                    is_named = group_names([metric]).keys() == {title}
                    name = title if title in single else f"{title}: {metric}"
                    charts.setdefault(metric if is_named else name, {})[label] = points
        return charts


def _label_runs(runs: Sequence[Run]) -> list[str]:
    labels = [run.label for run in runs]
    return [str(run.path) if labels.count(run.label) > 1 else run.label for run in runs]


def format_value(value: Any) -> str:
    """Return a logged value as text. Text is returned unchanged, because runs store non-finite values as text."""
    return value if isinstance(value, str) else format_number(value)


def _format_count(run: Run, name: str) -> str:
    return "" if (count := run.facts.get(name)) is None else f"{int(count):,}"


_FACTS: dict[str, Callable[[Run], str]] = {
    "state": lambda run: run.state,
    "took": lambda run: "" if run.seconds is None else format_duration(run.seconds),
    "steps": lambda run: _format_count(run, "steps"),
    "epochs": lambda run: _format_count(run, "epochs"),
    "samples": lambda run: _format_count(run, "samples"),
    "processes": lambda run: _format_count(run, "processes"),
    "best": lambda run: "" if run.best is None else f"{run.best['metric']} {format_value(run.best['value'])}",
}


def _flatten_config(run: Run) -> dict[str, str]:
    """Return a run's configuration values by dotted key, or the Trainer's flags if the run has no configuration."""
    text = index.config(run)
    if not text:
        flags = {f"trainer.{name}": value for name, value in run.facts.get("flags", {}).items()}
        return {name: value for name, value in flags.items() if name != _OWN_FOLDER}
    try:
        root = parse(text, "config.yaml")
    except ConfigError as error:
        raise ValueError(str(error)) from error
    if root is None:
        return {}
    return {
        format_path(path): _format_scalar(value.data)
        for path, value in iterate_values(root)
        if path and not (isinstance(value.data, dict | list) and value.data) and format_path(path) != _OWN_FOLDER
    }


def _format_scalar(data: Any) -> str:
    return data if isinstance(data, str) else json.dumps(data)


def _tabulate(columns: Sequence[Mapping[str, Any]]) -> Rows:
    """Return one row for each name in any of the columns, in the order in which the names appear."""
    names = dict.fromkeys(name for column in columns for name in column)
    return {name: [str(column.get(name, "")) for column in columns] for name in names}


def _differ(cells: Sequence[str]) -> bool:
    return len(set(cells)) > 1


def _drop_empty(rows: Rows) -> Rows:
    return {name: cells for name, cells in rows.items() if any(cells)}


_MARK = "<!-- written by treadle runs compare -->"
_STYLE = """
.compared { overflow-x: auto; } .compared .numbers td, .compared th { white-space: pre-wrap; }
.compared th { font-weight: 600; color: var(--ink); } .compared .key { margin-left: 6px; }
"""


def write_page(comparison: Comparison, path: Path) -> None:
    """Write the HTML page of a comparison to a file atomically. An earlier comparison is replaced.

    Raises:
        ValueError: If a folder, or a file that is not a comparison, exists at the path.
    """
    from ..engine.weights import write_atomically  # imports torch, which the other commands for runs do not need

    if path.exists() and not _is_comparison(path):
        raise ValueError(
            f"{path} exists and is not a comparison of runs, so it is not replaced. Pass --output with another file."
        )
    text = render_page(comparison)
    write_atomically(path, lambda part: Path(part).write_text(text, encoding="utf-8", errors="replace"))


def _is_comparison(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_MARK)) == _MARK.encode()


def render_page(comparison: Comparison) -> str:
    """Return a comparison as an HTML page with metadata, curves, last values, and the settings that differ."""
    line_styles = dict(zip(comparison.labels, choose_styles(comparison.labels), strict=True))
    charts = [Chart(metric, lines, line_styles) for metric, lines in comparison.charts.items()]
    title = " and ".join(comparison.labels) if len(comparison.labels) == 2 else f"{len(comparison.labels)} runs"
    sections = {
        "Last values": comparison.metrics,
        "Configuration: differences": comparison.config,
        "Hyperparameters: differences": comparison.hyperparameters,
        "Environment: differences": comparison.environment,
    }
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p>written {time.strftime('%Y-%m-%d %H:%M:%S')}</p>",
        *(f'<p class="error">{escape(problem)}</p>' for problem in comparison.problems),
        _render_rows(comparison.facts, line_styles),
        *render_charts(charts),
    ]
    for name, rows in sections.items():
        body.append(render_section(name, _render_rows(rows, line_styles) if rows else "<p>None.</p>"))
    shared = format_count(comparison.shared_config, "configuration value")
    body.append(f"<p>The same in all runs: {shared}.</p>")
    return f"{_MARK}\n{render_document(title, body, make_chart_script(charts), _STYLE)}"


def _render_rows(rows: Rows, line_styles: dict[str, str]) -> str:
    return f'<div class="compared"><table class="numbers">{"".join(_iterate_rows(rows, line_styles))}</table></div>'


def _iterate_rows(rows: Rows, line_styles: dict[str, str]) -> Iterator[str]:
    heads = (
        f'<th>{escape(label)}<svg class="key" viewBox="0 0 18 4"><line x2="18" y1="2" y2="2" {style}/></svg></th>'
        for label, style in line_styles.items()
    )
    yield f"<tr><th></th>{''.join(heads)}</tr>"
    for name, cells in rows.items():
        yield f"<tr><td>{escape(name)}</td>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
