"""What tests of loggers share."""

import os
import re

import pytest
from lightning_utilities.core.rank_zero import rank_zero_only
from support.tracking_services import SERVICES


@pytest.fixture
def rank_one(monkeypatch):
    monkeypatch.setattr(rank_zero_only, "rank", 1, raising=False)


@pytest.fixture
def alone(request, monkeypatch, tmp_path):
    """In the environment, only what keeps each service here, and what the module adds to that as `VARIABLES`."""
    for name in [name for name in os.environ if re.match("(CLEARML|COMET|MLFLOW|SWANLAB|WANDB)_", name)]:
        if name != "COMET_DISABLE_AUTO_LOGGING":
            monkeypatch.delenv(name)
    variables = dict(getattr(request.module, "VARIABLES", {}))
    for service in SERVICES:
        variables |= service.environment(tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
