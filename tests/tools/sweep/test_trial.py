"""A trial reports to its study."""

import pytest
from support.studies import TEXT, make
from treadle.tools.sweep.study import Study, open_trial

pytestmark = pytest.mark.usefixtures("runs_folder")


def test_another_process_reports_to_a_trial():
    study = Study(make(TEXT + "prune: median\n"))
    number = study.ask()
    other = Study(make(TEXT + "prune: median\n"))
    open_trial(other.study, number).report(0.5, 1)
    assert study.list_trials()[number].intermediate_values == {1: 0.5}
