"""A sweep's page: every trial in charts and table, by itself, safe with whatever names hold."""

import json
import re
from html.parser import HTMLParser

import optuna
import pytest
from support.studies import make
from treadle.tools.sweep.report import Report
from treadle.tools.sweep.study import Study, open_trial
from treadle.trainer.runs import RunFolder

TEXT = """
config: {model: {class: tasks.Line}}
method: random
metric: {name: "<b>loss", goal: minimize}
trials: 14
parameters:
  model.lr: {min: 1e-4, max: 1e-1, log: true}
  model.width: [8, 16]
  optimizer: [SGD, {class: torch.optim.AdamW, lr: 0.1}]
  model.constant: [1]
"""


class Tags(HTMLParser):
    """Counts tags, and sees that they are closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.counts, self.addresses = [], {}, []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.addresses += [value for name, value in attrs if name in ("href", "src")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def read_charts(page):
    charts = re.findall(r'Plotly\.newPlot\(\s*"[^"]+",\s*(\[.*?\]),\s+\{', page, re.DOTALL)
    return [json.loads(chart) for chart in charts]


@pytest.fixture
def report(runs_folder):
    """Ten complete trials, of which the fourth is the best; a pruned one, a failed one, and one that is at work."""
    study = Study(make(TEXT))
    for number in range(13):
        study.draw(study.ask())
        study.record_attributes(number, run=number + 1)
        RunFolder.prepare(study.sweep.folder / str(number + 1), "", {"trial": number, "steps": 100 + number})
        if number < 10:
            study.tell(number, optuna.trial.TrialState.COMPLETE, abs(number - 3) + 0.5)
    open_trial(study.study, 10).report(40.0, 1)
    study.tell(10, optuna.trial.TrialState.PRUNED)
    study.record_attributes(11, error="ValueError: <script>alert(1)</script>")
    study.tell(11, optuna.trial.TrialState.FAIL)
    (study.sweep.folder / "4" / "report.html").write_text("")
    return Report(study, study.sweep.folder)


@pytest.mark.long
def test_the_page_shows_every_trial_and_needs_nothing_else(report):
    page = report.render()
    tags = Tags(page)
    assert tags.open == []
    assert set(tags.addresses) == {"4/report.html"}  # the one report that is there
    assert "<script>alert" not in page
    assert "&lt;b&gt;loss" in page
    assert tags.counts["tr"] == 1 + 1 + 13 + 1 + 4  # head, best run, trials, failed, best values
    charts = read_charts(page)
    kinds = [[curve["type"] for curve in chart] for chart in charts]
    assert kinds == [*(["scatter"] * n for n in (10 + 1, 3, 3, 1)), ["bar"]]  # 10 trials and their colors
    parallel, history, slices, curves, importance = charts
    assert [len(line["y"]) for line in parallel[:10]] == [4] * 10  # the metric, and what is varied
    assert history[0]["y"] == [abs(number - 3) + 0.5 for number in range(10)]
    assert [len(curve["x"]) for curve in slices] == [10, 10, 10]  # of what is varied
    assert curves[0]["y"] == [40.0]  # of the pruned trial
    assert "<b>10</b>complete" in page
    assert "<b>2</b>left" in page
    assert {*importance[0]["y"]} == {"model.lr", "model.width", "optimizer"}
    assert "treadle validate --from-run s/4" in page
    rows = re.findall(r"<tr>.*?</tr>", page[page.index("<h2>Trials</h2>") :])
    row = next(row for row in rows if "s/4" in row)
    assert "complete</td><td>0.5</td>" in row
    assert "<td>103</td>" in row
    assert "waiting" in next(row for row in rows if "s/13<" in row)


def test_importance_names_the_parameter_that_matters(runs_folder):
    study = Study(make())
    for number in range(20):
        values = study.draw(study.ask())
        study.record_attributes(number, run=number + 1)
        study.tell(number, optuna.trial.TrialState.COMPLETE, values["model.width"] + 0.001 * values["model.lr"])
        if number == 8:
            assert len(read_charts(Report(study, study.sweep.folder).render())) == 3  # too few trials
    *_, (importance,) = read_charts(Report(study, study.sweep.folder).render())
    assert importance["type"] == "bar"
    assert max(zip(importance["x"], importance["y"], strict=True))[1] == "model.width"


def test_a_sweep_without_a_trial_has_a_page(runs_folder):
    study = Study(make(TEXT))
    assert Tags(Report(study, study.sweep.folder).render()).open == []
