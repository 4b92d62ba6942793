"""Self-contained HTML report of a sweep, with SVG charts of its trials."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from ...callbacks.reporting import (
    COLORS,
    LARGEST,
    choose_ticks,
    escape,
    format_duration,
    format_number,
    pad_range,
    render_document,
    render_section,
)
from ...cli.commands import format_parameter, format_parameters, shorten_keys
from ...trainer.runs import Run, index
from .study import Study
from .sweep_file import Choices, Parameter

_BEST, _WORST = COLORS[0], COLORS[1]  # colors that people with any form of color vision can distinguish
_WIDTH, _HEIGHT = 560, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 14, 12, 28  # margins
_MOST_LETTERS = 16  # characters of a choice next to its axis
_MOST_CHOICES = 24  # choices that are named next to an axis

STYLE = """
.wide { margin-bottom: 16px; }
.trial { fill: none; stroke-width: 1.6; stroke-linejoin: round; }
.trial.pruned { stroke-dasharray: 5 3; opacity: 0.45; }
.trial.best { stroke-width: 3.4; }
.spot:not(.pruned) { stroke: none; } .spot.pruned { fill-opacity: 0; stroke-width: 1.5; }
.so-far { fill: none; stroke: var(--soft); stroke-width: 1.5; }
.scale line { stroke: var(--soft); } .scale text { fill: var(--soft); font-size: 11px; }
.scale text { paint-order: stroke; stroke: var(--card); stroke-width: 4px; stroke-linejoin: round; }
.scale .name { fill: var(--ink); font-size: 12px; font-weight: 600; }
.dim .trial:not(.hot), .dim .spot:not(.hot) { opacity: 0.12; }
.trial.hot { stroke-width: 4; opacity: 1; }
tr.hot td { background: var(--card); }
.legend { display: inline-block; width: 90px; height: 8px; border-radius: 4px; margin: 0 6px; }
.importance td { padding: 4px 14px 4px 0; } .importance .track { width: 320px; max-width: 40vw; }
.importance i { display: block; height: 12px; border-radius: 4px; min-width: 2px; }
.trials { overflow-x: auto; } .trials table { white-space: nowrap; } .trials th { padding-right: 18px; }
a { color: inherit; }
"""
SCRIPT = """
const parts = [...document.querySelectorAll("[data-trial]")];
for (const part of parts) {
  const same = parts.filter(other => other.dataset.trial === part.dataset.trial);
  const show = on => {
    document.querySelectorAll("figure").forEach(figure => figure.classList.toggle("dim", on));
    same.forEach(other => other.classList.toggle("hot", on));
  };
  part.addEventListener("mouseenter", () => show(true));
  part.addEventListener("mouseleave", () => show(false));
}
"""
"""JavaScript that highlights the trial under the pointer in every chart and in the table."""


@dataclass(frozen=True)
class TrialPoint:
    """Data of one trial that the charts show.

    Attributes:
        run: The number of the trial's run folder.
        parameters: The values of the trial's parameters by key, as the study stores them.
        words: The text of the trial's tooltip.
    """

    run: int
    value: float
    parameters: dict[str, Any]
    words: str
    pruned: bool = False
    color: str = _BEST
    is_best: bool = False

    @property
    def attributes(self) -> str:
        """SVG attributes of the trial's point: its run number and color."""
        return f'data-trial="{self.run}" stroke="{self.color}" fill="{self.color}"'

    @property
    def kind(self) -> str:
        """CSS classes that mark a pruned trial and the best trial."""
        return " pruned" * self.pruned + " best" * self.is_best


def color_by_rank(rank: int, count: int) -> str:
    """Return the color, as ``#rrggbb``, of the trial in place ``rank`` among ``count`` trials. The best place is 0."""
    share = 0.0 if count < 2 else rank / (count - 1)
    best, worst = ([int(color[start : start + 2], 16) for start in (1, 3, 5)] for color in (_BEST, _WORST))
    return "#" + "".join(f"{round(b + (w - b) * share):02x}" for b, w in zip(best, worst, strict=True))


@dataclass(frozen=True)
class Axis:
    """Axis that maps values to a scale from 0 to 1.

    Attributes:
        choices: The values of a categorical axis, in order; empty for a numeric axis.
    """

    name: str
    low: float = 0.0
    high: float = 1.0
    log: bool = False
    choices: list[Any] = field(default_factory=list)

    @classmethod
    def of_parameter(cls, parameter: Parameter, name: str) -> Axis:
        """Return the axis of a parameter."""
        space = parameter.space
        if isinstance(space, Choices):
            return cls(name, choices=space.labels)
        return cls(name, *_part(float(space.low), float(space.high), space.log), space.log)

    @classmethod
    def of_values(cls, name: str, values: Sequence[float]) -> Axis:
        """Return an axis that spans all values."""
        low, high = min(values), max(values)
        log = low > 0 and high / low >= 100
        return cls(name, *pad_range(low, high, log), log)

    def place(self, value: Any) -> float:
        """Return the position of a value on the scale from 0 to 1."""
        if self.choices:
            return (self.choices.index(value) + 0.5) / len(self.choices)
        low, high = self._scale(self.low), self._scale(self.high)
        return (self._scale(float(value)) - low) / (high - low)

    def _scale(self, value: float) -> float:
        return math.log10(value) if self.log else value

    def list_ticks(self) -> list[tuple[float, str]]:
        """Return the positions and labels of the ticks."""
        if self.choices:
            every = -(-len(self.choices) // _MOST_CHOICES)
            words = [format_parameter(choice) for choice in self.choices]
            short = [word if len(word) <= _MOST_LETTERS else f"{word[: _MOST_LETTERS - 1]}…" for word in words]
            return [(self.place(choice), short[n]) for n, choice in enumerate(self.choices) if n % every == 0]
        ticks = choose_ticks(self.low, self.high, self.log)
        if len(ticks) < 2:  # the range is less than an order of magnitude
            ticks = [self.low, self.high]
        return [(self.place(tick), format_number(tick)) for tick in ticks]


def _part(low: float, high: float, log: bool) -> tuple[float, float]:
    return (low, high) if low < high else pad_range(low, high, log)


def draw_history(points: Sequence[TrialPoint], values: Axis, goal: str) -> str:
    """Return an HTML figure that plots each trial's value by run number, with a line for the best value so far."""
    runs = [point.run for point in points]
    axis = Axis(f"{values.name} of each trial", min(runs) - 0.5, max(runs) + 0.5)
    ticks = [(axis.place(run), f"{run:.0f}") for run in choose_ticks(axis.low, axis.high, False) if run == int(run) > 0]
    better = min if goal == "minimize" else max
    best: float | None = None
    steps: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda point: point.run):
        if not point.pruned:
            before, best = best, point.value if best is None else better(best, point.value)
            steps += [(point.run, value) for value in (before, best) if value is not None]
    if best is not None:
        steps.append((axis.high, best))
    line = " ".join("{:.1f},{:.1f}".format(*_place(axis.place(run), values.place(value))) for run, value in steps)
    keys = '<div class="keys"><span>line: the best so far</span><span>hollow: pruned</span></div>'
    places = [axis.place(run) for run in runs]
    return _draw_scatter(
        points, places, ticks, values, (axis.name, values.log), keys, f'<polyline class="so-far" points="{line}"/>'
    )


def draw_slice(points: Sequence[TrialPoint], key: str, axis: Axis, values: Axis) -> str:
    """Return an HTML figure that plots the metric against one parameter, with a point for each trial."""
    places = [axis.place(point.parameters[key]) for point in points]
    return _draw_scatter(points, places, axis.list_ticks(), values, (key, axis.log))


def _place(x: float, y: float) -> tuple[float, float]:
    """Return the SVG coordinates of a place in a scatter plot, given from 0 to 1."""
    return _LEFT + x * (_WIDTH - _LEFT - _RIGHT), _HEIGHT - _BOTTOM - y * (_HEIGHT - _TOP - _BOTTOM)


def _draw_scatter(
    points: Sequence[TrialPoint],
    places: Sequence[float],
    ticks: Sequence[tuple[float, str]],
    values: Axis,
    caption: tuple[str, bool],
    keys: str = "",
    line: str = "",
) -> str:
    """Return an HTML figure with a point for each trial at its place on the horizontal axis, from 0 to 1.

    ``caption`` is the title, and whether an axis is logarithmic.
    """
    marks = []
    for place, word in values.list_ticks():
        _, level = _place(0, place)
        marks.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{level:.1f}" y2="{level:.1f}"/>')
        marks.append(f'<text x="{_LEFT - 6}" y="{level + 4:.1f}" text-anchor="end">{escape(word)}</text>')
    for place, word in ticks:
        at, _ = _place(place, 0)
        marks.append(f'<text x="{at:.1f}" y="{_HEIGHT - 9}" text-anchor="middle">{escape(word)}</text>')
    spots = []
    for point, place in reversed(list(zip(points, places, strict=True))):  # the best is drawn above the others
        x, y = _place(place, values.place(point.value))
        spots.append(
            f'<circle class="spot{point.kind}" cx="{x:.1f}" cy="{y:.1f}" r="{5 if point.is_best else 4}" '
            f"{point.attributes}><title>{escape(point.words)}</title></circle>"
        )
    title = escape(caption[0])
    return (
        f"<figure><figcaption>{title}{' (logarithmic)' if caption[1] else ''}</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(values.name)} over {title}">'
        f'<g class="axis">{"".join(marks)}</g>{line}{"".join(spots)}</svg>{keys}</figure>'
    )


def draw_parallel_coordinates(points: Sequence[TrialPoint], axes: Sequence[tuple[str, Axis]], values: Axis) -> str:
    """Return an HTML figure with an axis for each parameter, an axis for the metric, and a line for each trial."""
    width, height, side, top, bottom = 1140, 340, 70, 34, 14
    gap = (width - 2 * side) / max(1, len(axes))

    def y(place: float) -> float:
        return height - bottom - place * (height - top - bottom)

    scales = []
    for number, axis in enumerate([*(axis for _, axis in axes), values]):
        at = side + number * gap
        scales.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{height - bottom}"/>')
        log = " (log)" if axis.log else ""
        scales.append(
            f'<text class="name" x="{at:.1f}" y="{top - 16}" text-anchor="middle">{escape(axis.name + log)}</text>'
        )
        for place, word in axis.list_ticks():
            scales.append(f'<line x1="{at - 4:.1f}" x2="{at:.1f}" y1="{y(place):.1f}" y2="{y(place):.1f}"/>')
            scales.append(f'<text x="{at - 7:.1f}" y="{y(place) + 4:.1f}" text-anchor="end">{escape(word)}</text>')
    lines = []
    for point in reversed(points):  # so that the best is drawn above the others
        places = [axis.place(point.parameters[key]) for key, axis in axes] + [values.place(point.value)]
        corners = " ".join(f"{side + number * gap:.1f},{y(place):.1f}" for number, place in enumerate(places))
        lines.append(
            f'<polyline class="trial{point.kind}" points="{corners}" data-trial="{point.run}" stroke="{point.color}">'
            f"<title>{escape(point.words)}</title></polyline>"
        )
    gradient = f"linear-gradient(to right,{_BEST},{_WORST})"
    return (
        '<figure class="wide"><figcaption>Parallel coordinates</figcaption>'
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="Parallel coordinates">'
        f'{"".join(lines)}<g class="scale">{"".join(scales)}</g></svg>'
        f'<div class="keys"><span>best<i class="legend" style="background:{gradient}"></i>worst</span>'
        "<span>dashed: pruned</span></div></figure>"
    )


def is_drawn(value: float | None) -> bool:
    """Return whether a value can be drawn: it must be set, finite, and at most `LARGEST` in magnitude."""
    return value is not None and math.isfinite(value) and abs(value) <= LARGEST


_MOST_LINES = 500  # trials that charts show, the best ones
_MOST_ROWS = 1000  # trials in the table, the best ones
_STATES = {TrialState.COMPLETE: "complete", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}


class Report:
    """HTML report of a sweep, with charts, the importance of the parameters, and a table of the trials."""

    def __init__(self, study: Study, folder: Path) -> None:
        self.study, self.sweep, self.folder = study, study.sweep, folder
        self.trials = study.list_trials()
        self.best = study.find_best()
        self.varied = [parameter for parameter in self.sweep.parameters if (parameter.list_grid() or [0, 1])[1:]]
        self.names = shorten_keys(parameter.key for parameter in self.sweep.parameters)
        self.points = self._make_points()

    def render(self) -> str:
        """Return the report as an HTML document."""
        body = [*self._render_head(), *self._render_best(), *self._render_charts(), *self._render_importance()]
        body += [*self._render_trials(), *self._render_failures()]
        return render_document(f"sweep {self.sweep.name}", body, f"<script>{SCRIPT}</script>", STYLE)

    def _make_points(self) -> list[TrialPoint]:
        """Return the trials to draw: complete ones, then pruned ones, and each group from the best to the worst."""
        shown = [trial for trial in self.trials if trial.state in (TrialState.COMPLETE, TrialState.PRUNED)]
        shown = [trial for trial in shown if is_drawn(trial.value)]
        sign = 1 if self.sweep.metric.goal == "minimize" else -1
        shown.sort(key=lambda trial: (trial.state is TrialState.PRUNED, sign * (trial.value or 0.0)))
        points = []
        for trial in shown[:_MOST_LINES]:
            run, value = int(trial.user_attrs["run"]), float(trial.value or 0.0)
            words = f"{self.sweep.name}/{run}: {self.sweep.metric.name} {format_number(value)}"
            words += " (pruned)" if trial.state is TrialState.PRUNED else ""
            points.append(
                TrialPoint(
                    run,
                    value,
                    dict(trial.params),
                    f"{words}, {format_parameters(trial.params)}",
                    trial.state is TrialState.PRUNED,
                    is_best=self.best is not None and trial.number == self.best.number,
                )
            )
        return [replace(point, color=color_by_rank(rank, len(points))) for rank, point in enumerate(points)]

    # -- sections of the page ------------------------------------------------------------------------------------

    def _render_head(self) -> Iterator[str]:
        sweep, counts = self.sweep, Counter(trial.state for trial in self.trials)
        left = sweep.trials - sum(trial.state.is_finished() for trial in self.trials)
        state, mood = ("under way", "open") if left > 0 else ("finished", "good")
        yield f'<h1>sweep {escape(sweep.name)} <span class="state {mood}">{state}</span></h1>'
        method = f"{sweep.method.kind} over {', '.join(parameter.key for parameter in sweep.parameters)}"
        prune = f"; pruned by {sweep.prune.kind}" if sweep.prune is not None else ""
        goal = f"{sweep.metric.goal} {sweep.metric.name}, the {sweep.metric.take} value of each trial"
        lines = [f"written {time.strftime('%Y-%m-%d %H:%M:%S')}", goal, method + prune]
        yield f"<p>{'<br>'.join(map(escape, lines))}</p>"
        tiles = {word: f"{counts[state]:,}" for state, word in _STATES.items() if counts[state]}
        tiles |= {"left": f"{left:,}"} if left > 0 else {}
        if self.best is not None:
            tiles[f"best {sweep.metric.name}"] = format_number(self.best.value or 0.0)
        yield '<div class="tiles">'
        yield from (f"<div><b>{escape(value)}</b>{escape(name)}</div>" for name, value in tiles.items())
        yield "</div>"

    def _render_best(self) -> Iterator[str]:
        if self.best is None:
            return
        run = self.best.user_attrs["run"]
        rows = [f"<tr><td>run</td><td>{self._link(run)}</td></tr>"]
        for key, value in self.best.params.items():
            rows.append(f"<tr><td>{escape(key)}</td><td>{escape(_write(value))}</td></tr>")
        command = f"treadle validate --from-run {self.folder.name}/{run}"
        yield render_section("Best trial", f"<table>{''.join(rows)}</table><pre>{escape(command)}</pre>")

    def _render_charts(self) -> Iterator[str]:
        if not self.points:
            return
        values = Axis.of_values(self.sweep.metric.name, [point.value for point in self.points])
        axes = [(parameter.key, Axis.of_parameter(parameter, self.names[parameter.key])) for parameter in self.varied]
        slices = [draw_slice(self.points, key, axis, values) for key, axis in axes]
        history = draw_history(self.points, values, self.sweep.metric.goal)
        wide = draw_parallel_coordinates(self.points, axes, values)
        yield render_section("Charts", f'{wide}<div class="charts">{history}{"".join(slices)}</div>')

    def _render_importance(self) -> Iterator[str]:
        importances, measure = self.study.compute_importances()
        if not importances:
            return
        rows = []
        for key, share in sorted(importances.items(), key=lambda item: -item[1]):
            bar = f'<i style="width:{100 * share:.1f}%;background:{COLORS[0]}"></i>'
            rows.append(f'<tr><td>{escape(key)}</td><td class="track">{bar}</td><td>{share:.2f}</td></tr>')
        table = f'<table class="numbers importance">{"".join(rows)}</table>'
        yield render_section("Importance", f"{table}<p>{escape(measure)}.</p>")

    def _render_trials(self) -> Iterator[str]:
        if not self.trials:
            return
        sign = 1 if self.sweep.metric.goal == "minimize" else -1
        order = [TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING, TrialState.WAITING, TrialState.FAIL]
        trials = sorted(
            self.trials,
            key=lambda trial: (order.index(trial.state), sign * (_get_value(trial) or 0.0), trial.number),
        )
        keys = [parameter.key for parameter in self.sweep.parameters]
        titles = ["run", "state", self.sweep.metric.name, *(self.names[key] for key in keys), "steps", "took"]
        head = "".join(f"<th>{escape(title)}</th>" for title in titles)
        rows = "".join(self._render_row(trial, keys) for trial in trials[:_MOST_ROWS])
        more = f"<p>{len(trials) - _MOST_ROWS:,} more</p>" if len(trials) > _MOST_ROWS else ""
        table = f'<div class="trials"><table class="numbers"><tr>{head}</tr>{rows}</table></div>{more}'
        yield render_section("Trials", table)

    def _render_row(self, trial: FrozenTrial, keys: list[str]) -> str:
        run = trial.user_attrs.get("run")
        record = None if run is None else _read_run(self.folder / str(run))
        state = _STATES.get(trial.state) or ("waiting" if record is None else record.state)
        value = _get_value(trial)
        # The value of a trial that has not ended.
        if value is None and record is not None and "objective" in record.facts:
            value = float(record.facts["objective"]["value"])
        cells = [
            "" if run is None else self._link(run),
            escape(state),
            "" if value is None else escape(format_number(value)),
            *(escape(format_parameter(trial.params[key])) if key in trial.params else "" for key in keys),
            "" if record is None else f"{int(record.facts.get('steps', 0)):,}",
            "" if record is None or record.seconds is None else format_duration(record.seconds),
        ]
        return f'<tr data-trial="{run}">{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'

    def _render_failures(self) -> Iterator[str]:
        failed = [trial for trial in self.trials if trial.state is TrialState.FAIL]
        rows = [
            f"<tr><td>{self._link(trial.user_attrs.get('run', ''))}</td>"
            f'<td><span class="error">{escape(trial.user_attrs.get("error", "unknown"))}</span></td></tr>'
            for trial in failed[:_MOST_ROWS]
        ]
        if rows:
            yield render_section("Failed trials", f"<table>{''.join(rows)}</table>")

    def _link(self, run: Any) -> str:
        """Return a trial's name, as a link to its run's report if the report exists."""
        name = escape(f"{self.folder.name}/{run}")
        return f'<a href="{run}/report.html">{name}</a>' if (self.folder / str(run) / "report.html").is_file() else name


def _get_value(trial: FrozenTrial) -> float | None:
    return trial.value if trial.state.is_finished() and trial.values is not None else None


def _read_run(path: Path) -> Run | None:
    try:
        return index.read(path)
    except ValueError:
        return None


def _write(value: Any) -> str:
    return repr(value) if isinstance(value, float) else format_parameter(value)
