"""Self-contained HTML report of a sweep, with Optuna's charts of its trials."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
from optuna import visualization
from optuna.trial import FrozenTrial, TrialState

from ...callbacks.reporting import (
    escape,
    format_duration,
    format_number,
    render_document,
    render_section,
)
from ...cli.commands import format_parameter, shorten_keys
from ...trainer.runs import Run, index
from .study import Study

STYLE = """
.trials { overflow-x: auto; } .trials table { white-space: nowrap; } .trials th { padding-right: 18px; }
a { color: inherit; }
"""
_MOST_ROWS = 1000  # trials in the table, the best ones
_BEST_TRIALS = 5  # minimum number of best trials that the importance distinguishes from the others
_STATES = {TrialState.COMPLETE: "complete", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}


class Report:
    """HTML report of a sweep, with charts and a table of the trials."""

    def __init__(self, study: Study, folder: Path) -> None:
        self.study, self.sweep, self.folder = study, study.sweep, folder
        self.trials = study.list_trials()
        self.best = study.find_best()
        self.varied = [parameter for parameter in self.sweep.parameters if (parameter.list_grid() or [0, 1])[1:]]
        self.names = shorten_keys(parameter.key for parameter in self.sweep.parameters)

    def render(self) -> str:
        """Return the report as an HTML document."""
        body = [*self._render_head(), *self._render_best(), *self._render_charts()]
        body += [*self._render_trials(), *self._render_failures()]
        return render_document(f"sweep {self.sweep.name}", body, style=STYLE)

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
        drawn = [trial for trial in self.trials if trial.value is None or math.isfinite(trial.value)]
        if not any(trial.state is TrialState.COMPLETE for trial in drawn):
            return
        study, metric = optuna.create_study(direction=self.sweep.metric.goal), self.sweep.metric.name
        study.add_trials(drawn)
        figures = [visualization.plot_optimization_history(study, target_name=metric)]
        if keys := [parameter.key for parameter in self.varied]:
            figures.insert(0, visualization.plot_parallel_coordinate(study, keys, target_name=metric))
            figures.append(visualization.plot_slice(study, keys, target_name=metric))
        if any(trial.intermediate_values for trial in drawn):
            figures.append(visualization.plot_intermediate_values(study))
        complete = [trial for trial in drawn if trial.state is TrialState.COMPLETE]
        if keys and len(complete) >= 2 * _BEST_TRIALS and len({trial.value for trial in complete}) > 1:
            share = min(0.5, max(0.1, _BEST_TRIALS / len(complete)))
            evaluator = optuna.importance.PedAnovaImportanceEvaluator(target_quantile=share)
            figures.append(visualization.plot_param_importances(study, evaluator, keys, target_name=metric))
        # The first figure brings plotly's script, 4.6 MB, so that the page is one file that needs no network.
        parts = [figure.to_html(full_html=False, include_plotlyjs=number == 0) for number, figure in enumerate(figures)]
        yield render_section("Charts", "".join(parts))

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
        return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"

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
