"""Fixtures of LightningCLI."""

import sys

import pytest


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    return tmp_path


@pytest.fixture(autouse=True)
def only_torchs_optimizers():
    """Hide bitsandbytes' AdamW and SGD: once peft has imported them, a name without its module is ambiguous."""
    classes = [kind for kind in vars(sys.modules.get("bitsandbytes.optim", sys)).values() if isinstance(kind, type)]
    classes = [kind for kind in classes if kind.__module__.startswith("bitsandbytes")]
    for kind in classes:
        kind.__qualname__ = f"hidden.<locals>.{kind.__name__}"
    yield
    for kind in classes:
        kind.__qualname__ = kind.__name__
