"""`treadle runs`: which runs there are, how they stand, and a look at one of them."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from ...callbacks.reporting import format_duration, format_number
from ...common.messages import nearest
from ...trainer.runs import Run, index
from ..config import DEFAULT, printable
from .terminal_plot import plot

DESCRIPTION = """\
List the runs in a folder, the newest last, or open one of them here, with its curves.

    treadle runs                        those in runs/
    treadle runs DIR --state failed     those elsewhere that failed
    treadle runs show                   the newest
    treadle runs show 3                 the one with this number; NAME/3 where several names have it, or its path
    treadle runs show 3 --metric val_loss

A run is running, finished, failed, interrupted (Ctrl-C), killed (its process is gone and could not say why) or
unreadable. Nothing in the folders is changed, and nothing in them is run."""

STATES = ("running", "finished", "failed", "interrupted", "killed", "unreadable")
_NARROWEST, _WIDEST = 24, 120  # letters in a row
_LONGEST = 2000  # letters of a line that is shown


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parser(program: str = "treadle runs") -> argparse.ArgumentParser:
    """The options of the list."""
    made = _new_parser(program, DESCRIPTION)
    made.add_argument("dir", nargs="?", default="runs", metavar="DIR", help="where the runs are (default: runs)")
    made.add_argument("--name", help="only those of this name")
    made.add_argument("--state", help=f"only those in this state: {', '.join(STATES)}")
    made.add_argument("--json", action="store_true", help="print them as JSON, a list of objects")
    return made


def show_parser(program: str = "treadle runs show") -> argparse.ArgumentParser:
    """The options of a look at one."""
    made = _new_parser(program, "Open one run: facts, configuration, environment, last values, curves.")
    made.add_argument(
        "run",
        nargs="?",
        metavar="N|PATH",
        help="its number, NAME/NUMBER or path (default: the newest)",
    )
    made.add_argument("--dir", default="runs", help="where the runs are (default: runs)")
    made.add_argument("--name", help="only those of this name")
    made.add_argument("--metric", action="append", metavar="NAME", help="draw this curve only; may be given repeatedly")
    made.add_argument("--defaults", action="store_true", help="show the configuration with the defaults in it")
    made.add_argument("--width", type=int, help="letters in a row (default: as the terminal has them)")
    made.add_argument("--ascii", action="store_true", help="draw with plain letters")
    made.add_argument("--json", action="store_true", help="print all of it as JSON, an object")
    return made


def _new_parser(program: str, description: str) -> argparse.ArgumentParser:
    return _Parser(
        program, description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    try:
        if arguments and arguments[0] == "show":
            said = _show(show_parser().parse_args(arguments[1:]))
        else:
            said = _list(parser().parse_args(arguments))
    except (ValueError, OSError) as error:
        print(printable(f"treadle runs: {error}"), file=sys.stderr)
        return 2
    try:
        print(said.encode(_encoding(), "replace").decode(_encoding()), flush=True)
    except BrokenPipeError:  # `treadle runs | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


# -- the list ------------------------------------------------------------------------------------------------------


def _list(given: argparse.Namespace) -> str:
    runs = _named(index.find(Path(given.dir)), given.name)
    if given.state is not None:
        _check("--state", given.state, STATES)
        runs = [run for run in runs if run.state.partition(":")[0] == given.state]
    if given.json:
        return json.dumps([run.summary() for run in runs], indent=2)
    if not runs:
        return f"no such runs in {given.dir}" if given.name or given.state else f"no runs in {given.dir}"
    rows = [("run", "state", "began", "took", "steps", "epochs", "best"), *map(_row, runs)]
    rows = [tuple(map(printable, row)) for row in rows]
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    right = {3, 4, 5}
    return "\n".join(
        "  ".join(
            f"{cell:>{width}}" if place in right else f"{cell:<{width}}"
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _row(run: Run) -> tuple[str, ...]:
    best, took = run.best, run.seconds
    return (
        run.label,
        run.state,
        _ago(run.began),
        "" if took is None else format_duration(took),
        _count(run.facts.get("steps")),
        _count(run.facts.get("epochs")),
        "" if best is None else f"{best['metric']} {_value(best['value'])}",
    )


def _named(runs: list[Run], name: str | None) -> list[Run]:
    if name is None or not runs:
        return runs
    _check("--name", name, dict.fromkeys(run.name for run in runs))
    return [run for run in runs if run.name == name]


def _check(option: str, value: str, valid: Iterable[str]) -> None:
    names = list(valid)
    if value not in names:
        raise ValueError(f"{option} {value!r} is not one of {', '.join(names)}.{nearest(value, names)}")


# -- one of them ---------------------------------------------------------------------------------------------------


def _show(given: argparse.Namespace) -> str:
    if given.width is not None and not _NARROWEST <= given.width <= 1000:
        raise ValueError(f"--width {given.width} is not between {_NARROWEST} and 1000 letters.")
    directory = Path(given.dir)
    if given.name is not None:
        _named(index.find(directory), given.name)  # a name that no run has
    run = index.read(index.holding(index.locate(given.run, directory, given.name)))
    problems = [run.problem] if run.problem else []
    parts: dict[str, Any] = {"config": "", "environment": {}, "charts": {}}
    for name, look in (("config", index.config), ("environment", index.environment), ("charts", _curves)):
        try:
            parts[name] = look(run)
        except ValueError as error:
            problems.append(str(error))
    charts = _selected(parts["charts"], given.metric)
    if given.json:
        return json.dumps({**run.summary(), **parts, "charts": charts, "problems": problems}, indent=2)
    width = min(shutil.get_terminal_size().columns, _WIDEST) if given.width is None else given.width
    lines = [*_head(run), *(f"can't be shown: {problem}" for problem in problems)]
    title, config = "Configuration", parts["config"].rstrip().splitlines()
    if not given.defaults:
        title, config = "Configuration, without defaults", list(_without_defaults(config))
    lines += _section(title, [f"  {line}" for line in config])
    lines += _section("Environment", _table(parts["environment"]))
    lines += _section("Last values", _table({name: _value(value) for name, value in sorted(run.metrics.items())}))
    text = "\n".join(map(_cut, map(printable, lines)))
    ascii = given.ascii or not _can_print("⣿└─│┤")
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    for title, curves in charts.items():
        clean = {printable(name): (curve["steps"], curve["values"]) for name, curve in curves.items()}
        missing = sum(curve["missing"] for curve in curves.values())
        drawn = plot(printable(title), clean, max(_NARROWEST, width), ascii=ascii, colour=colour)
        text += "\n\n" + drawn + (f"\nnot drawn, as not finite: {missing:,}" if missing else "")
    return text


def _without_defaults(lines: Sequence[str]) -> Iterator[str]:
    """What somebody has written of a configuration, as `printed.as_yaml` marks it, and what it stands in."""
    written = [line for line in lines if f"  # {DEFAULT}" not in line]
    for line, after in pairwise([*written, ""]):
        if not line.endswith(":") or _indent(after) > _indent(line):
            yield line


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _head(run: Run) -> Iterator[str]:
    facts = run.facts
    yield f"{run.label}  {run.state}" + (f" ({facts['note']})" if _says_more(facts.get("note")) else "")
    yield str(run.path)
    began = f"began {_when(run.began)}, {_ago(run.began)}"
    resumed = f"; resumed {_when(facts['resumed'])}" if "resumed" in facts else ""
    took = "" if run.seconds is None else f"; took {format_duration(run.seconds)}"
    yield began + resumed + took
    counts = [_counted(facts[f"{name}s"], name) for name in ("step", "epoch", "sample") if f"{name}s" in facts]
    more = [str(facts["task"])] if "task" in facts else []
    if (processes := facts.get("processes", 1)) != 1:
        more.append(_counted(processes, "process", "processes"))
    if facts.get("host"):
        more.append(f"on {facts['host']}")
    if counts or more:
        yield ", ".join(counts + more)
    if run.best is not None:
        saved = f", {run.best['checkpoint']}" if run.best.get("checkpoint") else ""
        yield f"best {run.best['metric']} {_value(run.best['value'])}{saved}"
    if facts.get("error"):
        yield from facts["error"].splitlines()[:20]


def _says_more(note: str | None) -> bool:
    return bool(note) and note != "finished"


def _curves(run: Run) -> dict[str, dict[str, dict[str, Any]]]:
    return {
        title: {
            name: {"steps": points[0], "values": points[1], "missing": missing}
            for name, (points, missing) in curves.items()
        }
        for title, curves in index.charts(run).items()
    }


def _selected(charts: dict[str, dict[str, Any]], wanted: list[str] | None) -> dict[str, dict[str, Any]]:
    if not wanted:
        return charts
    known = [name for curves in charts.values() for name in curves]
    for name in wanted:
        _check("--metric", name, known)
    chosen = {title: {name: one for name, one in curves.items() if name in wanted} for title, curves in charts.items()}
    return {title: curves for title, curves in chosen.items() if curves}


def _section(title: str, lines: list[str]) -> list[str]:
    return ["", title, *lines] if lines else []


def _table(rows: Mapping[str, str]) -> list[str]:
    width = min(max(map(len, rows), default=0), 40)
    return [f"  {name:<{width}}  {value}" for name, value in rows.items()]


# -- words ---------------------------------------------------------------------------------------------------------


def _value(value: Any) -> str:
    return value if isinstance(value, str) else format_number(value)


def _count(value: Any) -> str:
    return "" if value is None else f"{int(value):,}"


def _counted(value: Any, one: str, many: str = "") -> str:
    return f"{_count(value)} {one if value == 1 else many or one + 's'}"


def _when(moment: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))
    except (OverflowError, ValueError, OSError):  # no clock shows that
        return "?"


def _ago(moment: float) -> str:
    """How long ago that was, in the unit that fits."""
    seconds = max(0.0, time.time() - moment)
    for unit, length in (("day", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            count = int(seconds // length)
            return f"{count} {unit}{'s' if unit == 'day' and count != 1 else ''} ago"
    return f"{int(seconds)} s ago"


def _cut(line: str) -> str:
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}... ({len(line):,} letters)"


def _encoding() -> str:
    return getattr(sys.stdout, "encoding", None) or "utf-8"


def _can_print(text: str) -> bool:
    try:
        text.encode(_encoding())
    except (UnicodeError, LookupError):
        return False
    return os.environ.get("TERM") != "dumb"
