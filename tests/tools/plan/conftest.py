"""What tests of this folder share."""

import textwrap

import pytest
from support.planned_runs import CONFIG, TASK


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current folder, which has a configuration and its task."""
    (tmp_path / "planned_task.py").write_text(textwrap.dedent(TASK))
    (tmp_path / "run.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path
