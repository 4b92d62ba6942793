"""Fixtures of the command line."""

import sys

import pytest
from support.command_runs import RUN


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current folder, which has a configuration."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "run.yaml").write_text(RUN)
    return tmp_path
