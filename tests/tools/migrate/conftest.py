"""What tests of this folder share."""

import pytest


@pytest.fixture
def project(tmp_path, monkeypatch):
    """An empty folder, in which the command is run."""
    folder = tmp_path / "project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder
