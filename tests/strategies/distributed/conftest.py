"""What tests of this folder share."""

import pytest
from support.launches import WHOLE


@pytest.fixture
def no_launcher(monkeypatch):
    """The environment of a process that no launcher started."""
    for name in (*WHOLE, "TREADLE_SUPERVISOR"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch
