"""`treadle runs`: list runs, show a run, or compare several."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...callbacks.reporting import LARGEST, Chart, Points, format_duration, format_number
from ...common.command_results import fail, report
from ...common.messages import format_count, nearest
from ...common.remote_path import as_path
from ...trainer.runs import Run, index
from ..config import DEFAULT, make_printable
from ..run_comparison import Comparison, format_value, write_page
from .argument_parser import CommandParser

DESCRIPTION = """\
List the runs in a folder, latest last, or show one of them with its curves.

    treadle runs                        the runs in runs/
    treadle runs DIR --state failed     failed runs in DIR, which may be a URL such as s3://bucket/runs
    treadle runs show                   the latest
    treadle runs show 3                 the run with this number; NAME/3 if several runs have it, or its path
    treadle runs show 3 --metric val_loss
    treadle runs compare 3 4            the differences between two runs, and a page with their curves

A run is running, finished, failed, interrupted (Ctrl-C), killed (its process died without recording why) or
unreadable; a trial of a sweep may also be waiting or pruned. The folders are only read: no file is changed, and no
code in them is run."""

STATES = ("running", "waiting", "finished", "pruned", "failed", "interrupted", "killed", "unreadable")
_NARROWEST, _WIDEST = 24, 120  # characters in a row
_LONGEST = 2000  # characters of a line that are shown
_BARS, _ASCII_BARS = "▁▂▃▄▅▆▇█", "_.-=+*%#"
_WIDEST_CELL = 40  # characters of a value in a comparison; the page shows all


def build_parser(program: str = "treadle runs") -> argparse.ArgumentParser:
    """Return the argument parser of `treadle runs`. It raises a ValueError for an invalid command line."""
    parser = CommandParser(program, DESCRIPTION)
    parser.add_argument("dir", nargs="?", default="runs", metavar="DIR", help="folder of the runs (default: runs)")
    parser.add_argument("--name", help="only runs of this name")
    parser.add_argument("--state", help=f"only runs in this state: {', '.join(STATES)}")
    return parser


def build_show_parser(program: str = "treadle runs show") -> argparse.ArgumentParser:
    """Return the argument parser of `treadle runs show`. It raises a ValueError for an invalid command line."""
    parser = CommandParser(program, "Show one run: metadata, configuration, environment, last values, curves.")
    parser.add_argument(
        "run",
        nargs="?",
        metavar="N|PATH",
        help="its number, NAME/NUMBER or path (default: the latest)",
    )
    parser.add_argument("--dir", default="runs", help="folder of the runs (default: runs)")
    parser.add_argument("--name", help="only runs of this name")
    parser.add_argument("--metric", action="append", metavar="NAME", help="draw only this curve; may be repeated")
    parser.add_argument("--defaults", action="store_true", help="show the configuration with its defaults")
    parser.add_argument("--width", type=int, help="characters per row (default: the terminal's width)")
    parser.add_argument("--ascii", action="store_true", help="draw with ASCII characters")
    return parser


def build_compare_parser(program: str = "treadle runs compare") -> argparse.ArgumentParser:
    """Return the argument parser of `treadle runs compare`. It raises a ValueError for an invalid command line."""
    parser = CommandParser(
        program,
        "Compare runs: state, last values, and the configuration keys, hyperparameters and versions that differ.\n"
        "A page with the curves of all of them is written to the working directory. Any browser can open it, without\n"
        "a server or a network connection.",
    )
    parser.add_argument("runs", nargs="*", metavar="N|PATH", help="two or more: number, NAME/NUMBER or path")
    parser.add_argument("--dir", default="runs", help="folder of the runs (default: runs)")
    parser.add_argument("--name", help="only runs of this name")
    parser.add_argument("--output", metavar="FILE", help="the page's file (default: compare-NAME-N-NAME-N.html)")
    parser.add_argument("--no-page", action="store_true", help="print the differences only")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run `treadle runs` and return the exit status: 0 after success, 2 after an error."""
    try:
        if arguments and arguments[0] == "show":
            output = _show(build_show_parser().parse_args(arguments[1:]))
        elif arguments and arguments[0] == "compare":
            output = _compare(build_compare_parser().parse_args(arguments[1:]))
        else:
            output = _list(build_parser().parse_args(arguments))
    except (ValueError, OSError) as error:
        return fail("treadle runs", error)
    report(output.encode(_get_encoding(), "replace").decode(_get_encoding()))
    return 0


# -- the list ------------------------------------------------------------------------------------------------------


def _list(options: argparse.Namespace) -> str:
    try:
        runs = _filter_by_name(index.find(as_path(options.dir)), options.name)
    except ValueError as error:
        raise ValueError(f"{error}{nearest(options.dir, ('show', 'compare'))}") from error
    if options.state is not None:
        _check("--state", options.state, STATES)
        runs = [run for run in runs if run.state.partition(":")[0] == options.state]
    if options.json:
        return json.dumps([run.summary() for run in runs], indent=2)
    if not runs:
        kind = f"{options.state} runs" if options.state else "runs"
        return f"no {kind}{f' named {options.name!r}' if options.name else ''} in {options.dir}"
    rows = [("run", "state", "began", "took", "steps", "epochs", "best", "parameters"), *map(_format_row, runs)]
    if not any(run.parameters for run in runs):  # no run is a trial of a sweep
        rows = [row[:-1] for row in rows]
    return _format_columns(rows, right={3, 4, 5})


def _format_columns(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> str:
    """Format rows as a table with aligned columns."""
    rows = [tuple(map(make_printable, row)) for row in rows]
    columns = len(rows[0])
    widths = [max(len(row[place]) for row in rows if len(row) == columns) for place in range(columns)]
    return "\n".join(
        "  ".join(
            f"{cell:>{width}}" if place in right else f"{cell:<{width}}"
            for place, (cell, width) in enumerate(zip(row, widths, strict=False))
        ).rstrip()
        for row in rows
    )


def _format_row(run: Run) -> tuple[str, ...]:
    best, took = run.facts.get("objective") or run.best, run.seconds
    return (
        run.label,
        run.state,
        _format_age(run.began),
        "" if took is None else format_duration(took),
        _format_count(run.facts.get("steps")),
        _format_count(run.facts.get("epochs")),
        "" if best is None else f"{best['metric']} {format_value(best['value'])}",
        format_parameters(run.parameters),
    )


def _filter_by_name(runs: list[Run], name: str | None) -> list[Run]:
    if name is None or not runs:
        return runs
    _check("--name", name, dict.fromkeys(run.name for run in runs))
    return [run for run in runs if run.name == name]


def _check(option: str, value: str, valid: Iterable[str]) -> None:
    names = list(valid)
    if value not in names:
        choices = f"is not one of {', '.join(names)}" if len(names) > 1 else f"must be {names[0]!r}"
        raise ValueError(f"{option} {value!r} {choices}.{nearest(value, names) if len(names) > 1 else ''}")


# -- one run -------------------------------------------------------------------------------------------------------


def _show(options: argparse.Namespace) -> str:
    if options.width is not None and not _NARROWEST <= options.width <= 1000:
        raise ValueError(f"--width {options.width} must be between {_NARROWEST} and 1000 characters.")
    directory = as_path(options.dir)
    if options.name is not None:
        _filter_by_name(index.find(directory), options.name)  # raises an error if no run has the name
    run = index.read(index.holding(index.locate(options.run, directory, options.name)))
    problems = [run.problem] if run.problem else []
    parts: dict[str, Any] = {"config": "", "environment": {}, "charts": {}}
    for name, look in (("config", index.config), ("environment", index.environment), ("charts", _read_curves)):
        try:
            parts[name] = look(run)
        except ValueError as error:
            problems.append(str(error))
    charts = _select_charts(parts["charts"], options.metric)
    if options.json:
        return json.dumps({**run.summary(), **parts, "charts": charts, "problems": problems}, indent=2)
    width = min(shutil.get_terminal_size().columns, _WIDEST) if options.width is None else options.width
    lines = [*_format_head(run), *(f"can't be shown: {problem}" for problem in problems)]
    title, config = "Configuration", parts["config"].rstrip().splitlines()
    if not options.defaults:
        title, config = "Configuration, without defaults", list(_drop_defaults(config))
    lines += _format_section(title, [f"  {line}" for line in config])
    lines += _format_section("Environment", _format_table(parts["environment"]))
    lines += _format_section(
        "Last values", _format_table({name: format_value(value) for name, value in sorted(run.metrics.items())})
    )
    text = "\n".join(map(_cut, map(make_printable, lines)))
    bars = _ASCII_BARS if options.ascii or not _can_print(_BARS) else _BARS
    for title, curves in charts.items():
        clean = {make_printable(name): (curve["steps"], curve["values"]) for name, curve in curves.items()}
        missing = sum(curve["missing"] for curve in curves.values())
        text += "\n\n" + draw_curves(make_printable(title), clean, max(_NARROWEST, width), bars)
        text += f"\nnot drawn, because not finite: {missing:,}" if missing else ""
    return text


def _drop_defaults(lines: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a configuration that are not defaults, with the sections that contain them."""
    written = [line for line in lines if f"  # {DEFAULT}" not in line and not line.startswith("#")]
    for line, after in pairwise([*written, ""]):
        if not line.endswith(":") or _count_indent(after) > _count_indent(line):
            yield line


def _count_indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _format_head(run: Run) -> Iterator[str]:
    facts = run.facts
    yield f"{run.label}  {run.state}" + (f" ({facts['note']})" if _is_informative(facts.get("note")) else "")
    yield str(run.path)
    began = f"began {_format_time(run.began)}, {_format_age(run.began)}"
    resumed = f"; resumed {_format_time(facts['resumed'])}" if "resumed" in facts else ""
    took = "" if run.seconds is None else f"; took {format_duration(run.seconds)}"
    yield began + resumed + took
    counts = [format_count(int(facts[f"{name}s"]), name) for name in ("step", "epoch", "sample") if f"{name}s" in facts]
    more = [str(facts["task"])] if "task" in facts else []
    if (processes := facts.get("processes", 1)) != 1:
        more.append(format_count(int(processes), "process"))
    if facts.get("host"):
        more.append(f"on {facts['host']}")
    if counts or more:
        yield ", ".join(counts + more)
    if run.best is not None:
        saved = f", {run.best['checkpoint']}" if run.best.get("checkpoint") else ""
        yield f"best {run.best['metric']} {format_value(run.best['value'])}{saved}"
    if run.parameters:
        yield f"trial {facts.get('trial', '?')} of a sweep: {format_parameters(run.parameters)}"
    if facts.get("error"):
        yield from facts["error"].splitlines()[:20]


def _is_informative(note: str | None) -> bool:
    return bool(note) and note != "finished"


def _read_curves(run: Run) -> dict[str, dict[str, dict[str, Any]]]:
    return {
        title: {
            name: {"steps": points[0], "values": points[1], "missing": missing}
            for name, (points, missing) in curves.items()
        }
        for title, curves in index.charts(run).items()
    }


def _select_charts(charts: dict[str, dict[str, Any]], metrics: list[str] | None) -> dict[str, dict[str, Any]]:
    if not metrics:
        return charts
    valid_names = [name for curves in charts.values() for name in curves]
    if not valid_names:
        raise ValueError(f"--metric {metrics[0]!r} can't be drawn, because the run has no curves. Remove --metric.")
    for name in metrics:
        _check("--metric", name, valid_names)
    chosen = {
        title: {name: curve for name, curve in curves.items() if name in metrics} for title, curves in charts.items()
    }
    return {title: curves for title, curves in chosen.items() if curves}


def draw_curves(title: str, lines: Mapping[str, Points], width: int = 80, bars: str = _BARS) -> str:
    """Return a text with one row of bars for each curve, over the optimizer steps, and on the same scale.

    Values that are not finite or are too large are not drawn. ``width`` is the number of characters per row, at least
    24, and ``bars`` contains the characters from the lowest to the highest bar.
    """
    chart = Chart(title, lines)
    drawn = {name: points for name, points in chart.lines.items() if points[0]}
    heading = f"{title} (logarithmic)" if chart.logarithmic else title
    if not drawn:
        return (
            f"{heading}: none of {chart.missing:,} values is finite and at most {LARGEST:.0e}"
            if chart.missing
            else f"{heading}: no values"
        )
    values = [value for _, some in drawn.values() for value in some]
    if len(drawn) == 1 and not chart.missing and len(values) > 1 and len(set(values)) == 1:
        return f"{title}: {format_number(values[0])} throughout"
    ends = {name: f"{format_number(some[0])} to {format_number(some[-1])}" for name, (_, some) in drawn.items()}
    name_width = min(max(map(len, drawn)), width // 3)
    columns = max(1, width - name_width - max(map(len, ends.values())) - 6)
    rows = [
        f"  {name[:name_width]:<{name_width}}  {_draw_bars(chart, points, columns, bars)}  {ends[name]}"
        for name, points in drawn.items()
    ]
    scale = f"  from {format_number(min(values))} to {format_number(max(values))}"
    steps = [step for some, _ in drawn.values() for step in some]
    rows.append(f"{scale}, step {min(steps):,}" + (f" to {max(steps):,}" if len(set(steps)) > 1 else ""))
    if chart.missing:
        rows.append(f"not drawn, because not finite or above {LARGEST:.0e}: {chart.missing:,}")
    return "\n".join([heading, *rows])


def _draw_bars(chart: Chart, points: Points, columns: int, bars: str) -> str:
    heights: dict[int, float] = {}
    for step, value in zip(*points, strict=True):
        column, height = min(columns - 1, int(chart.scale_step(step) * columns)), chart.scale_value(value)
        previous_height = heights.get(column - 1, height)
        # Of several values in a column, the one that differs most from the column before, so that no peak is lost.
        if column not in heights or abs(height - previous_height) > abs(heights[column] - previous_height):
            heights[column] = height
    text, bar = "", " "
    for column in range(columns):
        if column in heights:
            bar = bars[min(len(bars) - 1, max(0, int(heights[column] * len(bars))))]
        text += bar
    return text


def _format_section(title: str, lines: list[str]) -> list[str]:
    return ["", title, *lines] if lines else []


def _format_table(rows: Mapping[str, str]) -> list[str]:
    width = min(max(map(len, rows), default=0), 40)
    return [f"  {name:<{width}}  {value}" for name, value in rows.items()]


# -- several runs ------------------------------------------------------------------------------------------------------


def _compare(options: argparse.Namespace) -> str:
    if len(options.runs) < 2:
        raise ValueError(
            f"compare needs two or more runs, but got {len(options.runs)}. Pass their numbers, NAME/NUMBER or paths: "
            "treadle runs compare 1 2."
        )
    directory = as_path(options.dir)
    if options.name is not None:
        _filter_by_name(index.find(directory), options.name)  # raises an error if no run has the name
    paths = [index.holding(index.locate(reference, directory, options.name)) for reference in options.runs]
    if repeated := [str(path) for path in paths if paths.count(path) > 1]:
        raise ValueError(f"{repeated[0]} is given twice. Pass each run once.")
    comparison = Comparison([index.read(path) for path in paths])
    if options.json:
        return json.dumps(comparison.to_json(), indent=2)
    lines = [f"can't be compared: {make_printable(problem)}" for problem in comparison.problems]
    lines.append(_format_columns(list(_tabulate_comparison(comparison))))
    equal, different = comparison.weights
    if different is not None:
        lines += [
            "",
            f"the weights differ at step {different}{'' if equal is None else f', after equality at {equal}'}",
        ]
    elif equal is not None:
        lines += ["", f"the weights are equal at all recorded steps, up to {equal}"]
    if not options.no_page:
        name = "-".join(re.sub(r"[^\w.-]+", "-", label).strip("-") for label in comparison.labels)
        path = Path(options.output or f"compare-{name}.html")
        write_page(comparison, path)
        lines += ["", f"page with the curves: {path}"]
    return "\n".join(lines)


def _tabulate_comparison(comparison: Comparison) -> Iterator[list[str]]:
    empty = [""] * (1 + len(comparison.labels))
    yield ["run", *comparison.labels]
    yield from ([name, *cells] for name, cells in comparison.facts.items())
    tables = {
        "Last values": comparison.metrics,
        "Configuration": comparison.config,
        "Hyperparameters": comparison.hyperparameters,
        "Environment": comparison.environment,
    }
    for title, rows in tables.items():
        if rows:
            yield from (empty, [title, *empty[1:]])
            yield from ([f"  {name}", *map(_cut_cell, cells)] for name, cells in rows.items())
    if comparison.shared_config:
        yield from (empty, [f"the same in all runs: {format_count(comparison.shared_config, 'configuration value')}"])


def _cut_cell(text: str) -> str:
    return text if len(text) <= _WIDEST_CELL else f"{text[: _WIDEST_CELL - 3]}..."


# -- formats -------------------------------------------------------------------------------------------------------


def _format_count(value: Any) -> str:
    return "" if value is None else f"{int(value):,}"


def _format_time(moment: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
    except (OverflowError, ValueError, OSError):  # the number is not a valid time
        return "?"


def _format_age(moment: float) -> str:
    seconds = max(0.0, time.time() - moment)
    for unit, length in (("day", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            count = int(seconds // length)
            return f"{count} {unit}{'s' if unit == 'day' and count != 1 else ''} ago"
    return f"{int(seconds)} s ago"


def _cut(line: str) -> str:
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}... ({len(line):,} characters)"


def _get_encoding() -> str:
    return getattr(sys.stdout, "encoding", None) or "utf-8"


def _can_print(text: str) -> bool:
    try:
        text.encode(_get_encoding())
    except (UnicodeError, LookupError):
        return False
    return os.environ.get("TERM") != "dumb"


def shorten_keys(keys: Iterable[str]) -> dict[str, str]:
    """Map each dotted key to its last part, such as ``lr`` for ``model.lr``, or to itself if the part is ambiguous."""
    ends = {key: key.rpartition(".")[2] for key in keys}
    return {key: end if list(ends.values()).count(end) == 1 else key for key, end in ends.items()}


def format_parameters(parameters: Mapping[str, Any]) -> str:
    """Return the parameters of a trial as one line, such as ``lr=0.003 batch_size=64``."""
    names = shorten_keys(parameters)
    return " ".join(f"{names[key]}={format_parameter(value)}" for key, value in parameters.items())


def format_parameter(value: Any) -> str:
    """Return a stored value as text: floats with at most four significant digits, objects with their class name."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if not isinstance(value, str):
        return json.dumps(value)
    if value.startswith('{"class": "'):
        with contextlib.suppress(ValueError):
            arguments = json.loads(value)
            name = arguments.pop("class").rpartition(".")[2]
            return f"{name}({', '.join(f'{key}={format_parameter(item)}' for key, item in arguments.items())})"
    return value
