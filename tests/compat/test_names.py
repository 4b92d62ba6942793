"""Names that scripts import: every row of docs/migrating/names.md, and Lightning's own in one module."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import treadle.compat as pl

import treadle

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "migrating" / "names.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `([a-z]+\.?[\w.]*)` \| `(treadle[\w.]*)` \| (`.*`) \|$", TEXT, re.MULTILINE)
PARTS = re.findall(r"^<!-- answers for \w+, .* -->\n(.*?)^<!-- end -->", TEXT, re.MULTILINE | re.DOTALL)
ANSWERS = re.findall(r"^\| (`.*?`) \| (.*) \|$", "".join(PARTS), re.MULTILINE)


def split_names(cell):
    return re.findall(r"`([\w.]+)`", cell)


@pytest.mark.parametrize(("old", "new", "names"), ROWS, ids=[f"{old}-{new}" for old, new, _ in ROWS])
def test_every_new_path_can_be_imported(old, new, names):
    for name in split_names(names):
        found: dict[str, object] = {}
        exec(f"from {new} import {name}", found)
        assert found[name] is not None


def test_every_answer_is_what_an_import_says():
    for names, sentence in ANSWERS:
        for dotted in split_names(names):
            module, _, name = dotted.rpartition(".")
            path = module.removeprefix("lightning.pytorch").removeprefix("accelerate")
            with pytest.raises(ImportError, match=re.escape(sentence)):
                exec(f"from treadle.compat{path} import {name}", {})


def test_there_are_rows():
    counts = dict.fromkeys(("lightning", "accelerate"), 0)
    for old, _, names in ROWS:
        counts[old.partition(".")[0]] += len(split_names(names))
    assert counts["lightning"] > 100
    assert counts["accelerate"] > 100


def test_document_and_tables_are_those_that_make_compat_writes():
    check = [sys.executable, str(ROOT / ".ci" / "make_migration.py"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}: run `make compat`"


def test_the_version_is_our_own():
    assert treadle.__version__ == importlib.import_module("treadle.common").__version__
    assert pl.__version__ == treadle.__version__


def test_old_names():
    assert issubclass(pl.LightningModule, treadle.TaskModule)
    assert issubclass(pl.LightningDataModule, treadle.DataModule)
    assert pl.Trainer is treadle.Trainer
    assert pl.callbacks.ModelCheckpoint is treadle.callbacks.ModelCheckpoint
    for name in pl.__all__:
        assert hasattr(pl, name)


@pytest.mark.parametrize(
    ("module", "name", "words"),
    [
        ("treadle.compat.plugins", "PrecisionPlugin", "Did you mean 'Precision'"),
        ("treadle.compat.plugins.precision", "MixedPrecisionPlugin", "Did you mean 'MixedPrecision'"),
        ("treadle.compat.accelerators", "HPUAccelerator", "has no attribute"),
        ("treadle.compat.plugins.precision.double", "LightningDoublePrecisionModule", "precision='64-true'"),
    ],
)
def test_names_that_lightning_has_deprecated(module, name, words):
    with pytest.raises(ImportError, match=words):
        exec(f"from {module} import {name}", {})


def test_modules_are_attributes_without_an_import_of_their_own():
    """As with the peers, whose packages import all their modules."""
    chains = (
        "treadle.loops.fit_loop",
        "treadle.compat.state.PartialState",
        "treadle.state.PartialState",
        "treadle.core.module.LightningModule",
        "treadle.utilities.rank_zero.rank_zero_only",
        "treadle.plugins.precision.Precision",
        "treadle.compat.utilities.rank_zero.rank_zero_only",
    )
    source = "\n".join(["import treadle.compat", *chains])
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
