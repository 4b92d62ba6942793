"""A trial reports to its study."""

from pathlib import Path

import pytest
from support.studies import TEXT, make
from treadle.tools.sweep.study import Study, open_trial


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs/s").mkdir(parents=True)


def test_another_process_reports_to_a_trial():
    study = Study(make(TEXT + "prune: median\n"))
    number = study.ask()
    other = Study(make(TEXT + "prune: median\n"))
    open_trial(other.study, number).report(0.5, 1)
    assert study.list_trials()[number].intermediate_values == {1: 0.5}
