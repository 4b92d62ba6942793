"""Self-contained HTML report of a sweep."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from optuna.trial import FrozenTrial, TrialState

from ...callbacks.reporting import COLORS, escape, format_duration, format_number, render_document, render_section
from ...cli.commands import format_parameter, format_parameters, shorten_keys
from ...trainer.runs import Run, index
from .charts import (
    SCRIPT,
    STYLE,
    Axis,
    TrialPoint,
    color_by_rank,
    draw_history,
    draw_parallel_coordinates,
    draw_slice,
    is_drawn,
)
from .study import Study

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
