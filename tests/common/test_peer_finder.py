"""Modules that only the tables of the peers' names have behave as files do."""

import importlib
import importlib.util
import pickle
import pkgutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import treadle.compat
from treadle.common.peer_names import list_paths

import treadle

ROOT = Path(__file__).parents[2]


def test_no_file_stands_for_a_section_of_a_table():
    files = [path for room in ("compat", "treadle") for path in (ROOT / room).rglob("*.py")]
    assert len(files) < 90
    assert [path for path in files if "enerated" in path.read_text(encoding="utf-8").partition("\n")[0]] == []


def test_every_path_of_the_tables_and_no_other_is_found():
    paths = [f"treadle.compat.{path}" for path in list_paths() if path]
    listed = {module.name for module in pkgutil.walk_packages(treadle.compat.__path__, "treadle.compat.")}
    assert len(paths) > 200
    assert set(paths) <= listed
    assert [path for path in paths if importlib.util.find_spec(path) is None] == []
    direct = {module.name for module in pkgutil.iter_modules(treadle.__path__)}
    assert {"data_loader", "logging", "state", "tracking", "utils", "profilers"} <= direct
    assert not {"core", "loops", "optimizer"} & direct
    for missing in ("treadle.compat.nothing", "treadle.utils.nothing", "treadle.core", "treadle.plugins.precision"):
        assert importlib.util.find_spec(missing) is None
        with pytest.raises(ModuleNotFoundError, match=f"No module named '{missing}'"):
            importlib.import_module(missing)


def test_a_folder_without_a_face_keeps_its_own_modules():
    from treadle.compat.callbacks import EarlyStopping

    progress = importlib.import_module("treadle.compat.callbacks.progress.tqdm_progress")
    assert Path(progress.__file__) == ROOT / "compat" / "callbacks" / "progress" / "tqdm_progress.py"
    for kind in (progress.Tqdm, EarlyStopping):
        assert pickle.loads(pickle.dumps(kind)) is kind
    assert pickle.loads(b"ctreadle.compat.callbacks.early_stopping\nEarlyStopping\n.") is EarlyStopping


def test_names_are_attributes_that_can_be_listed_and_replaced():
    module = importlib.import_module("treadle.compat.utils.operations")
    gather = module.gather
    assert {"gather", "send_to_device"} <= set(dir(module)) == set(module.__all__)
    with mock.patch("treadle.compat.utils.operations.gather", "replaced"):
        assert module.gather == "replaced"
    assert module.gather is gather
    assert not hasattr(module, "__file__")
    names = {}
    exec("from treadle.compat.utils.operations import *", names)
    assert names["gather"] is gather


@pytest.mark.parametrize("name", ["nothing", "DummyOptim", pytest.param("_nothing", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("module", ["treadle", "treadle.compat.utils", "treadle.utils", "treadle.plugins"])
def test_a_missing_name_is_an_import_error_for_imports_only(module, name):
    """``from module import name`` would replace the text of an AttributeError; hasattr() accepts nothing else."""
    assert not hasattr(importlib.import_module(module), name)
    with pytest.raises(ImportError, match=rf"^(module '{module}' has no attribute '{name}'|{module} has no {name}: )"):
        exec(f"from {module} import {name}", {})


@pytest.mark.long
def test_a_module_with_the_name_of_a_function_does_not_hide_it():
    source = "import treadle.utils.tqdm, treadle.compat.utils.tqdm\n"
    for name in ("tqdm", "gather"):
        source += f"print(treadle.utils.{name}.__module__)\n"
        source += f"assert treadle.compat.utils.{name} is treadle.utils.{name}\n"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout == "treadle.compat.environment\ntreadle.compat.operations\n"


@pytest.mark.long
def test_nothing_is_imported_before_its_use():
    source = (
        "import sys, treadle, treadle.compat\n"
        "print([name for name in sys.modules if name.startswith('treadle') or name in ('torch', 'tomllib')])\n"
        "import treadle.compat.callbacks.early_stopping\n"
        "print('treadle.callbacks.timer' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    loaded, others = done.stdout.splitlines()
    modules = {f"treadle.common.{module}" for module in ("lazy_exports", "peer_finder", "rank_zero")}
    assert set(eval(loaded)) == {"treadle", "treadle.common", "treadle.compat", *modules}
    assert others == "False"
