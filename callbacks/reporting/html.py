"""HTML pages with charts and tables."""

from __future__ import annotations

import html
import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files

Points = tuple[Sequence[int], Sequence[float]]

LARGEST = 1e300
"""Largest number that is drawn: beyond it, the ends of an axis would not be finite."""
_SMALLEST = 1e-300  # smaller ranges cannot be divided into ticks

_WIDTH, _HEIGHT = 560, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 16, 10, 26
_DIGIT = 7  # width of a digit of the labels, in the widest of the common fonts
_SMOOTHED = 30  # points from which on a line is smoothed
_STAGES = ("train", "training", "val", "valid", "validation", "test", "eval")
# Okabe and Ito's colors, which people with any form of color vision can distinguish; from the seventh on lines are
# dashed.
COLORS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9")
_STAGE_OF = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
_OF_STAGE = dict(zip(("train", "val", "test"), COLORS, strict=False))
# Fixed, so that an activity has the same color on the pages of all runs.
_OF_ACTIVITY = {
    **{name: _OF_STAGE[stage] for name, stage in _STAGE_OF.items()},
    **dict(zip(("checkpoints", "setup", "predict"), COLORS[3:], strict=True)),
}
_OTHER_COLOR = "#8a8f98"
LEARNING_RATE, THROUGHPUT = "learning rate", "samples per second"
"""Titles of the charts of every run. The throughput is folded; it varies little, and a chart takes much room."""


@dataclass(frozen=True)
class Failure:
    """Error that ended a stage.

    Attributes:
        message: The error's class and message.
        frames: Frames of the traceback that are in neither Treadle nor torch, as text.
        trace: The whole traceback, as text.
    """

    stage: str
    message: str
    frames: str
    trace: str


@dataclass
class Page:
    """Content of an HTML page. Empty sections are omitted.

    Attributes:
        state: Current state or outcome of the run, such as ``"finished"``.
        ended_well: Whether the run succeeded; None if this is not known yet.
        tiles: Key figures as text, by name.
        charts: Steps and values of each line, by the chart's title and the line's name.
        times: Duration of each activity, and the part of it that was spent waiting for batches, in seconds.
        verdict: Sentences about ``times``; "" if there is nothing to say.
        tables: Rows of each table, by heading.
        folded: By heading, the label that unfolds a table's hidden rows, and these rows.
    """

    title: str
    state: str
    ended_well: bool | None = None
    notes: Sequence[str] = ()
    tiles: Mapping[str, str] = field(default_factory=dict)
    charts: Mapping[str, Mapping[str, Points]] = field(default_factory=dict)
    times: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    verdict: str = ""
    tables: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    folded: Mapping[str, tuple[str, Mapping[str, str]]] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    failures: Sequence[Failure] = ()

    def render(self) -> str:
        """Return the page as the text of an HTML file."""
        charts = [Chart(title, lines) for title, lines in self.charts.items()]
        body = [
            *self._render_head(),
            *self._render_failures(),
            *render_charts(charts),
            *self._render_times(),
            *(render_section(name, f"<pre>{escape(text)}</pre>") for name, text in self.texts.items()),
            *self._render_tables(),
        ]
        return render_document(self.title, body, make_chart_script(charts))

    def _render_head(self) -> Iterator[str]:
        mood = {True: "good", False: "bad", None: "open"}[self.ended_well]
        yield f'<h1>{escape(self.title)} <span class="state {mood}">{escape(self.state)}</span></h1>'
        if self.notes:
            yield f"<p>{'<br>'.join(map(escape, self.notes))}</p>"
        tiles = [f"<div><b>{escape(value)}</b>{escape(name)}</div>" for name, value in self.tiles.items()]
        if tiles:
            yield f'<div class="tiles">{"".join(tiles)}</div>'

    def _render_failures(self) -> Iterator[str]:
        for failure in self.failures:
            frames = f"<pre>{escape(failure.frames)}</pre>" if failure.frames else ""
            full_trace = render_fold("the whole traceback", f"<pre>{escape(failure.trace)}</pre>")
            yield render_section(
                f"What ended {failure.stage}", f'<p class="error">{escape(failure.message)}</p>{frames}{full_trace}'
            )

    def _render_times(self) -> Iterator[str]:
        total_seconds = sum(seconds for seconds, _ in self.times.values())
        if not total_seconds:
            return
        bars, rows = [], []
        parts = sorted(self.times.items(), key=lambda item: -item[1][0])
        for name, (seconds, waited) in parts:
            color = _OF_ACTIVITY.get(name, _OTHER_COLOR)
            bars.append(f'<i style="width:{100 * seconds / total_seconds:.2f}%;background:{color}"></i>')
            cells = (
                f"{format_duration(seconds)}",
                f"{100 * seconds / total_seconds:.1f} %",
                format_duration(waited) if waited else "",
            )
            dot = f'<span class="dot" style="background:{color}"></span>'
            rows.append(f"<tr><td>{dot}{escape(name)}</td>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
        head = "<tr><th></th><th>time</th><th>share</th><th>of it, waiting for batches</th></tr>"
        table = f'<table class="numbers">{head}{"".join(rows)}</table>'
        verdict = f'<p class="verdict">{escape(self.verdict)}</p>' if self.verdict else ""
        yield render_section("Where the time went", f'<div class="bar">{"".join(bars)}</div>{verdict}{table}')

    def _render_tables(self) -> Iterator[str]:
        for name, rows in self.tables.items():
            words, more = self.folded.get(name, ("", {}))
            if rows or more:
                yield render_section(
                    name, _render_table(rows) + (render_fold(words, _render_table(more)) if more else "")
                )


class Chart:
    """Line chart over the optimizer steps. Long lines are thinned, and identical lines are merged.

    ``styles`` holds the SVG attributes of each line, by default those of `choose_styles`.

    Attributes:
        missing: Number of values that cannot be drawn, because they are not finite or their magnitude exceeds
            `LARGEST`.
    """

    def __init__(self, title: str, lines: Mapping[str, Points], styles: Mapping[str, str] | None = None) -> None:
        self.title = title
        drawn: list[tuple[list[str], tuple[list[int], list[float]]]] = []  # names, and the line they have in common
        self.missing = 0
        means: list[tuple[list[int], list[float]]] = []  # of the sections of each drawn line
        for name, (steps, values) in lines.items():
            finite_points = [(step, value) for step, value in zip(steps, values, strict=True) if abs(value) <= LARGEST]
            self.missing += len(steps) - len(finite_points)
            line = thin_points(finite_points, _WIDTH - _LEFT - _RIGHT)
            # One of two identical lines would hide the other.
            names: list[str] = next((names for names, other in drawn if other == line and line[0]), [])
            if not names:
                drawn.append((names, line))
                means.append(average_points(finite_points, _WIDTH - _LEFT - _RIGHT))
            names.append(name)
        self.lines = {_join_names(names): line for names, line in drawn}
        self._means = means
        self._styles = choose_styles(self.lines) if styles is None else [styles[names[0]] for names, _ in drawn]
        all_values = [value for _, values in self.lines.values() for value in values]
        steps = [step for steps, _ in self.lines.values() for step in steps]
        self.logarithmic = bool(all_values) and min(all_values) > 0 and max(all_values) / min(all_values) >= 100
        self.bottom, self.top = pad_range(min(all_values, default=0.0), max(all_values, default=1.0), self.logarithmic)
        self.first, self.last = min(steps, default=0), max(steps, default=1)
        if self.first == self.last:
            self.first, self.last = self.first - 1, self.last + 1

    def x(self, step: float) -> float:
        """Return the horizontal position of a step in SVG coordinates."""
        return _LEFT + self.scale_step(step) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        """Return the vertical position of a value in SVG coordinates."""
        return _HEIGHT - _BOTTOM - self.scale_value(value) * (_HEIGHT - _TOP - _BOTTOM)

    def scale_step(self, step: float) -> float:
        """Return the horizontal position of a step, from 0 to 1."""
        return (step - self.first) / (self.last - self.first)

    def scale_value(self, value: float) -> float:
        """Return the height of a value, from 0 to 1."""
        bottom, top = self._scale(self.bottom), self._scale(self.top)
        return (self._scale(value) - bottom) / (top - bottom)

    def _scale(self, value: float) -> float:
        return math.log10(value) if self.logarithmic else value

    def data(self) -> dict[str, object]:
        """Return the chart's data for the page's script."""
        lines = []
        for (name, (steps, values)), means in zip(self.lines.items(), self._means, strict=True):
            line: dict[str, object] = {"name": name, "steps": steps, "values": values}
            if means[0] != steps:
                line["means"] = means
            lines.append(line)
        smooth = self.title != LEARNING_RATE  # a schedule has no noise
        scale = {"bottom": self.bottom, "top": self.top, "logarithmic": self.logarithmic, "smooth": smooth}
        return {"first": self.first, "last": self.last, **scale, "lines": lines}

    def draw(self, number: int) -> str:
        """Return the chart as an HTML figure."""
        marks = []
        for value in choose_ticks(self.bottom, self.top, self.logarithmic):
            y = self.y(value)
            marks.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            text = format_number(value)
            if len(text) * _DIGIT > _LEFT:
                text = f"{value:.2g}"
            marks.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
        for step in choose_ticks(self.first, self.last, False):
            if step >= 0 and step == int(step):
                text = f"{int(step):,}"
                x = min(self.x(step), _WIDTH - len(text) * _DIGIT / 2)  # so that the last one is not clipped
                marks.append(f'<text x="{x:.1f}" y="{_HEIGHT - 8}" text-anchor="middle">{text}</text>')
        drawn, keys = [], []
        for line, ((name, (steps, values)), style) in enumerate(zip(self.lines.items(), self._styles, strict=True)):
            points = [f"{self.x(step):.1f},{self.y(value):.1f}" for step, value in zip(steps, values, strict=True)]
            if len(points) == 1:
                left, _, top = points[0].partition(",")
                drawn.append(f'<circle cx="{left}" cy="{top}" r="3" {style}/>')
            elif points:
                drawn.append(f'<polyline points="{" ".join(points)}" {style} data-line="{line}"/>')
            newest = format_number(values[-1]) if values else "none"
            mark = f'<svg class="key" viewBox="0 0 18 4"><line x2="18" y1="2" y2="2" {style}/></svg>'
            keys.append(f"<span>{mark}{escape(name)} <b>{newest}</b></span>")
        missing = ""
        if self.missing:
            missing = f'<p class="missing">not drawn, because not finite or above {LARGEST:.0e}: {self.missing:,}</p>'
        label = f"{escape(self.title)} over the optimizer steps"
        return (
            f'<figure data-chart="{number}"><figcaption>{escape(self.title)}'
            f"{' (logarithmic)' if self.logarithmic else ''}</figcaption>"
            f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">'
            f'<g class="axis">{"".join(marks)}</g>{"".join(drawn)}<line class="pointer"/></svg>'
            f'<div class="keys">{"".join(keys)}</div>{missing}</figure>'
        )


def render_charts(charts: Sequence[Chart]) -> Iterator[str]:
    """Yield the section with the charts, if any. The script of `make_chart_script` shows the control for smoothing."""
    shown = [chart.draw(number) for number, chart in enumerate(charts) if chart.title != THROUGHPUT]
    folded = [chart.draw(number) for number, chart in enumerate(charts) if chart.title == THROUGHPUT]
    parts = [_SMOOTHING, f'<div class="charts">{"".join(shown)}</div>'] if shown else []
    parts += [render_fold(THROUGHPUT, f'<div class="charts">{"".join(folded)}</div>')] if folded else []
    if parts:
        yield render_section("Curves", "".join(parts))


def make_chart_script(charts: Sequence[Chart]) -> str:
    """Return the HTML script elements of the charts."""
    data = json.dumps([chart.data() for chart in charts]).replace("<", "\\u003c")
    code = f"const frame = {json.dumps(_FRAME)};\n{_read_asset('page.js')}"
    return f'<script type="application/json" id="data">{data}</script><script>{code}</script>'


def _join_names(names: Sequence[str]) -> str:
    return " = ".join(names) if len(names) <= 3 else f"{names[0]} = ... = {names[-1]} ({len(names)} are the same)"


def choose_styles(names: Collection[str]) -> list[str]:
    """Return the SVG attributes of a chart's lines."""
    stages = [_STAGE_OF.get(split_stage(name)[0], "") for name in names]
    free = [color for color in COLORS if color not in {_OF_STAGE[stage] for stage in stages if stage}]
    drawn: Counter[tuple[str, bool]] = Counter()
    line_styles = []
    for name, stage in zip(names, stages, strict=True):
        number = drawn["", False]
        color = _OF_STAGE[stage] if stage else free[number % len(free)]
        is_pale = name.endswith("_step") and f"{name.removesuffix('_step')}_epoch" in names
        turn = drawn[stage, is_pale] if stage else number // len(free)
        drawn[stage, is_pale and bool(stage)] += 1
        dash = f' stroke-dasharray="{2 + 4 * turn} 3"' if turn else ""
        line_styles.append(f'stroke="{color}" fill="{color}"{dash}' + (' opacity="0.6"' if is_pale else ""))
    return line_styles


def thin_points(points: Sequence[tuple[int, float]], most: int) -> tuple[list[int], list[float]]:
    """Return the steps and values of a curve, thinned if it has more than ``2 * most`` points.

    Of each of at most ``most`` sections, the minimum and the maximum are kept. Both ends of the curve are kept, too.
    """
    if len(points) > 2 * most:
        width = -(-len(points) // most)
        extremes = []
        for begin in range(0, len(points), width):
            stretch = range(begin, min(begin + width, len(points)))
            extremes += sorted({min(stretch, key=lambda i: points[i][1]), max(stretch, key=lambda i: points[i][1])})
        points = [points[i] for i in sorted({0, *extremes, len(points) - 1})]
    return [step for step, _ in points], [value for _, value in points]


def average_points(points: Sequence[tuple[int, float]], most: int) -> tuple[list[int], list[float]]:
    """Return the steps and values of a curve; if it is thinned by `thin_points`, the mean of each section instead."""
    if len(points) > 2 * most:
        width = -(-len(points) // most)
        sections = [points[begin : begin + width] for begin in range(0, len(points), width)]
        points = [(section[-1][0], sum(value for _, value in section) / len(section)) for section in sections]
    return [step for step, _ in points], [value for _, value in points]


def pad_range(low: float, high: float, logarithmic: bool) -> tuple[float, float]:
    """Return the limits of an axis for values from ``low`` to ``high``, with a margin."""
    if logarithmic:
        return low / 1.2, high * 1.2
    space = (high - low) * 0.05 or abs(high) * 0.05
    if space < _SMALLEST:
        space = 1.0
    return low - space, high + space


def choose_ticks(low: float, high: float, logarithmic: bool) -> list[float]:
    """Return the values at which an axis has ticks."""
    if logarithmic:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        power_step = max(1, len(powers) // 5)
        return [10.0**power for power in powers if power % power_step == 0 and low <= 10.0**power <= high]
    rough = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(rough))
    step = unit * next(factor for factor in (1, 2, 5, 10) if factor * unit >= rough * 0.999)
    return [n * step for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def format_number(value: float) -> str:
    """Format a number with four significant digits, or without decimals from 10,000."""
    return f"{value:,.0f}" if abs(value) >= 10_000 and abs(value) < 1e15 else f"{value:.4g}"


def format_duration(seconds: float) -> str:
    """Return a duration as text, such as ``"12 ms"`` or ``"2:05 min"``."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, remainder = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{remainder:02} h" if hours else f"{minutes}:{remainder:02} min"


def group_names(names: Iterable[str]) -> dict[str, list[str]]:
    """Return names grouped by quantity, such as ``loss`` for ``val_loss``."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(split_stage(name)[1], []).append(name)
    return groups


def split_stage(name: str) -> tuple[str, str]:
    """Return the stage with which a name begins, or "", and the rest, without suffixes such as ``_epoch``."""
    base_name = name.split("/dataloader_idx_")[0].removesuffix("_step").removesuffix("_epoch")
    for stage in _STAGES:
        if len(base_name) > len(stage) + 1 and base_name.startswith(stage) and base_name[len(stage)] in "_/-. ":
            return stage, base_name[len(stage) + 1 :]
    return "", base_name


def _render_table(rows: Mapping[str, str]) -> str:
    lines = [f"<tr><td>{escape(key)}</td><td>{escape(value)}</td></tr>" for key, value in rows.items()]
    return f"<table>{''.join(lines)}</table>" if lines else ""


def render_document(title: str, body: Iterable[str], script: str = "", style: str = "") -> str:
    """Return a self-contained HTML page."""
    return "\n".join(
        [
            "<!DOCTYPE html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<style>{_read_asset('page.css')}{style}</style></head><body><main>",
            *body,
            f"</main>{script}</body></html>",
        ]
    )


def render_fold(words: str, content: str) -> str:
    """Return HTML with content that unfolds on a click."""
    return f"<details><summary>{escape(words)}</summary>{content}</details>"


def render_section(name: str, content: str) -> str:
    """Return an HTML section with a heading."""
    return f"<section><h2>{escape(name)}</h2>{content}</section>"


def escape(text: str) -> str:
    """Return text that is escaped for HTML."""
    return html.escape(str(text))


_SMOOTHING = (
    '<label class="smoothing" hidden>smoothing <input type="range" min="0" max="0.99" step="0.01" value="0.6">'
    "<output></output></label>"
)
_FRAME = {
    "left": _LEFT,
    "width": _WIDTH,
    "right": _RIGHT,
    "top": _TOP,
    "low": _HEIGHT - _BOTTOM,
    "smoothed_from": _SMOOTHED,
}


@cache
def _read_asset(name: str) -> str:
    """Return a file of this folder. It is part of each page, which is to be a single file."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
