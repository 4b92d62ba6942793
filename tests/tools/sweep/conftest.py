"""What tests of this folder share."""

from pathlib import Path

import pytest


@pytest.fixture
def runs_folder(tmp_path, monkeypatch):
    """The current folder, in which a sweep `s` may put its runs."""
    monkeypatch.chdir(tmp_path)
    Path("runs/s").mkdir(parents=True)
