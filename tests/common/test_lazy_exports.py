"""Packages whose names are imported when they are first used."""

import importlib

import pytest
from support.processes import script
from support.trainers import says

import treadle

PACKAGES = {
    "treadle": ("Trianer", "Trainer"),
    "treadle.callbacks": ("ModelCheckpiont", "ModelCheckpoint"),
    "treadle.engine.weights": ("load_weight", "load_weights"),
    "treadle.engine.profilers": ("SimplProfiler", "SimpleProfiler"),
    "treadle.loggers": ("CSVLoger", "CSVLogger"),
    "treadle.trainer": ("TaskModul", "TaskModule"),
}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_wrong_name_is_answered_with_the_nearest(package):
    wrong, right = PACKAGES[package]
    module = importlib.import_module(package)
    with says(AttributeError, f"module '{package}' has no attribute '{wrong}'. Did you mean '{right}'"):
        getattr(module, wrong)
    assert not hasattr(module, "__nothing_of_this_name__")


@pytest.mark.parametrize(
    ("name", "package"),
    [("EarlyStopping", "callbacks"), ("CSVLogger", "loggers"), ("FSDP", "strategies"), ("SimpleProfiler", "profilers")],
)
def test_a_name_of_a_package_is_answered_with_the_package(name, package):
    with pytest.raises(AttributeError, match=rf"no attribute '{name}'\. Use treadle\.{package}\.{name}\.$"):
        getattr(treadle, name)
    with pytest.raises(ImportError, match=rf"Use treadle\.{package}\.{name}\.$"):
        exec(f"from treadle import {name}")


def test_python_adds_no_suggestion_of_its_own():
    done = script("import treadle\ntreadle.callbacks.EarlyStoping")
    assert done.stderr.count("Did you mean") == 1, done.stderr


@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_is_listed_and_found(package):
    module = importlib.import_module(package)
    assert dir(module) == sorted({*module.__all__} - {"__version__"})
    for name in module.__all__:
        assert getattr(module, name) is not None


SOURCE = """
import sys
import treadle, treadle.common.durations, treadle.common.lazy_exports, treadle.common.messages
print([name for name in ("torch", "numpy") if name in sys.modules])
"""


def test_the_lowest_room_does_not_import_torch():
    assert script(SOURCE, fresh=True).stdout.strip() == "[]"


def test_a_name_that_is_also_its_file_is_the_name():
    done = script("from treadle.cli import COMMANDS, main\nprint(callable(main), 'fit' in COMMANDS)")
    assert done.stdout.strip() == "True True", done.stderr
