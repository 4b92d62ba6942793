"""A sweep's page: every trial in charts and table, by itself, safe with whatever names hold."""

import re
from html.parser import HTMLParser

import optuna
import pytest
from support.studies import make
from treadle.cli.config import Value
from treadle.tools.sweep.report import Axis, Report, color_by_rank
from treadle.tools.sweep.study import Study, open_trial
from treadle.tools.sweep.sweep_file import Choices, Parameter, Range
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


@pytest.fixture
def report(runs_folder):
    """Ten complete trials, of which the fourth is the best; a pruned one, a failed one, and one that is at work."""
    study = Study(make(TEXT))
    for number in range(13):
        study.draw(study.ask())
        study.note(number, run=number + 1)
        RunFolder.prepare(study.sweep.folder / str(number + 1), "", {"trial": number, "steps": 100 + number})
        if number < 10:
            study.tell(number, optuna.trial.TrialState.COMPLETE, abs(number - 3) + 0.5)
    open_trial(study.study, 10).report(40.0, 1)
    study.tell(10, optuna.trial.TrialState.PRUNED)
    study.note(11, error="ValueError: <script>alert(1)</script>")
    study.tell(11, optuna.trial.TrialState.FAIL)
    (study.sweep.folder / "4" / "report.html").write_text("")
    return Report(study, study.sweep.folder)


@pytest.mark.long
def test_the_page_shows_every_trial_and_needs_nothing_else(report):
    page = report.render()
    tags = Tags(page)
    assert tags.open == []
    assert set(tags.addresses) == {"4/report.html"}  # the one report that is there
    assert "http" not in page.replace("http-equiv", "")
    assert "<script>alert" not in page
    assert "&lt;b&gt;loss" in page
    assert tags.counts["tr"] == 1 + 1 + 13 + 1 + 4 + 3  # head, best run, trials, failed, best values, importances
    assert tags.counts["figure"] == 1 + 1 + 3  # parallel coordinates, history, and what is varied
    lines = re.findall(r'<polyline class="trial([^"]*)"[^>]*data-trial="(\d+)"', page)
    assert len(lines) == 11
    assert lines[-1] == (" best", "4")  # above the others
    assert lines[0] == (" pruned", "11")
    assert page.count('class="spot') == 4 * 11
    assert "<b>10</b>complete" in page
    assert "<b>2</b>left" in page
    assert "PED-ANOVA: what distinguishes the best 5 of 10 trials from the others" in page
    assert "treadle validate --from-run s/4" in page
    row = re.search(r'<tr data-trial="4">.*?</tr>', page)[0]
    assert "complete</td><td>0.5</td>" in row
    assert "<td>103</td>" in row
    assert "waiting" in re.search(r'<tr data-trial="13">.*?</tr>', page)[0]


def test_a_sweep_without_a_trial_has_a_page(runs_folder):
    study = Study(make(TEXT))
    assert Tags(Report(study, study.sweep.folder).render()).open == []


def test_axes():
    log = Axis.of_parameter(Parameter("lr", "", Range(1e-4, 1e-2, None, True, False)), "lr")
    assert [log.place(value) for value in (1e-4, 1e-3, 1e-2)] == pytest.approx([0.0, 0.5, 1.0])
    assert [word for _, word in log.list_ticks()] == ["0.0001", "0.001", "0.01"]
    words = Axis.of_parameter(Parameter("x", "", Choices((Value("a", ""), Value("b" * 40, "")))), "x")
    assert [words.place("a"), words.place("b" * 40)] == [0.25, 0.75]
    assert words.list_ticks()[1][1] == "b" * 15 + "…"
    assert Axis.of_values("loss", [0.1, 20.0]).log
    assert not Axis.of_values("loss", [-1.0, 20.0]).log
    assert 0 < Axis.of_values("loss", [3.0]).place(3.0) < 1
    assert Axis.of_parameter(Parameter("x", "", Range(1, 1, None, False, True)), "x").place(1) == 0.5


def test_colours_go_from_the_best_to_the_worst():
    assert (color_by_rank(0, 3), color_by_rank(2, 3)) == ("#0072b2", "#e69f00")
    assert color_by_rank(0, 1) == "#0072b2"
