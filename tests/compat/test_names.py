"""Names that scripts import: each that the site's page of names lists, and Lightning's own in one module."""

import importlib
import re
import subprocess
import sys

import pytest
import treadle.compat as pl
from support.house import load_script
from support.processes import script

import treadle

make_migration = load_script(".ci/make_migration.py")


@pytest.fixture(scope="module")
def names():
    return make_migration.find_names()


def test_every_counterpart_can_be_imported(names):
    for rows, _, _ in names.values():
        assert sum(map(len, rows.values())) > 100
        for (_, home), listed in rows.items():
            for name in listed:
                found: dict[str, object] = {}
                exec(f"from {home} import {name}", found)
                assert found[name] is not None


def test_every_answer_is_what_an_import_says(names):
    for _, answers, _ in names.values():
        assert answers
        for sentence, listed in answers.items():
            for dotted in listed:
                module, _, name = dotted.rpartition(".")
                path = module.removeprefix("lightning.pytorch").removeprefix("accelerate")
                with pytest.raises(ImportError, match=re.escape(sentence)):
                    exec(f"from treadle.compat{path} import {name}", {})


def test_every_name_has_a_counterpart_or_an_answer(names):
    assert [name for _, _, unknown in names.values() for name in unknown] == []


def test_the_page_lists_each_name(names, monkeypatch):
    monkeypatch.setattr(make_migration, "find_names", lambda: names)
    page = make_migration.write_names()
    assert "| `lightning.pytorch` | `treadle` | `Callback`, `LightningDataModule`, " in page
    for rows, answers, _ in names.values():
        for listed in (*rows.values(), *answers.values()):
            assert ", ".join(f"`{name}`" for name in listed) in page


def test_the_table_of_differences_is_the_one_that_make_compat_writes():
    assert make_migration.SIGNS.read_text(encoding="utf-8") == make_migration.write_signs(), "run `make compat`"


def test_the_version_is_our_own():
    assert treadle.__version__ == importlib.import_module("treadle.common").__version__
    assert pl.__version__ == treadle.__version__


def test_old_names():
    assert issubclass(pl.LightningModule, treadle.TaskModule)
    assert issubclass(pl.LightningDataModule, treadle.DataModule)
    assert pl.Trainer is treadle.Trainer
    assert pl.callbacks.ModelCheckpoint is treadle.callbacks.ModelCheckpoint


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


@pytest.mark.long
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
    done = script("\n".join(["import treadle.compat", *chains]))
    assert done.returncode == 0, done.stderr


def test_names_of_files_that_accelerates_utils_have() -> None:
    from treadle.compat.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, WEIGHTS_NAME

    assert (SAFE_WEIGHTS_NAME, WEIGHTS_NAME) == ("model.safetensors", "pytorch_model.bin")
    assert SAFE_WEIGHTS_INDEX_NAME == "model.safetensors.index.json"


@pytest.mark.parametrize(
    "path",
    [
        "loggers.logger.DummyLogger",
        "utilities.types._EVALUATE_OUTPUT",
        "fabric.accelerators.cuda.num_cuda_devices",
        "fabric.utilities.data.AttributeDict",
        "fabric.plugins.io.torch_io.TorchCheckpointIO",
    ],
)
def test_names_of_submodules_are_attributes_before_an_import_too(path):
    source = f"import treadle.compat as pl; pl.{path}"
    subprocess.run([sys.executable, "-c", source], check=True)
