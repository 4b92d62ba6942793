"""Names that other people's scripts import: every row of docs/migrating.md, and Lightning's own in one module."""

import importlib
import re
from pathlib import Path

import pytest
import treadle.compat as pl

import treadle

TEXT = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `([a-z]+\.[\w.]*)` \| `(treadle[\w.]*)` \|", TEXT, re.MULTILINE)


@pytest.mark.parametrize(("old", "new"), ROWS, ids=[old for old, _ in ROWS])
def test_every_new_path_can_be_imported(old, new):
    module, name = new.rsplit(".", 1)
    assert hasattr(importlib.import_module(module), name)


def test_there_are_rows():
    assert sum(old.startswith("accelerate") for old, _ in ROWS) > 30
    assert sum(old.startswith("lightning") for old, _ in ROWS) > 60


def test_old_names():
    assert issubclass(pl.LightningModule, treadle.TaskModule)
    assert issubclass(pl.LightningDataModule, treadle.DataModule)
    assert pl.Trainer is treadle.Trainer
    assert pl.callbacks.ModelCheckpoint is treadle.callbacks.ModelCheckpoint
    for name in pl.__all__:
        assert hasattr(pl, name)
    assert pl.__version__ == treadle.__version__
