"""The examples in the docstrings of public names are run: each gives the output that it shows."""

import doctest
import importlib
import inspect
import sys
import warnings

import pytest
from support.house import load_script

check_reference = load_script(".ci/check_reference.py")


def list_modules():
    """Return the public modules, ``treadle`` first."""
    treadle = importlib.import_module("treadle")
    names = (f"treadle.{name}" for name in treadle.__all__ if inspect.ismodule(getattr(treadle, name)))
    return ["treadle", *(name for name in names if name != "treadle.compat")]


def list_objects(module):
    """Return the public classes and functions of a module that no earlier module has, by name."""
    objects, seen = {}, set()
    for name, value in check_reference.list_public_names().items():
        home = getattr(value, "__module__", None) or ""
        is_ours = home.startswith("treadle.") and (inspect.isclass(value) or inspect.isroutine(value))
        if is_ours and id(value) not in seen:
            seen.add(id(value))
            if name.rpartition(".")[0] == module:
                objects[name] = value
    return objects


def find_examples(objects):
    """Return the examples of docstrings, of methods too; names are looked up where the object is defined."""
    for name, value in objects.items():
        names = dict(vars(sys.modules[value.__module__]))
        yield from (test for test in doctest.DocTestFinder().find(value, name, globs=names) if test.examples)


@pytest.mark.parametrize("module", list_modules())
def test_examples(module, tmp_path, monkeypatch, capsys):
    importlib.import_module(module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["example.py"])
    failures = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in find_examples(list_objects(module)):
        with warnings.catch_warnings():
            warnings.simplefilter("default")
            warnings.showwarning = print_warning
            if runner.run(test, out=failures.append, clear_globs=True).failed:
                failures.append("\n")
    assert not failures, "".join(failures)


def print_warning(message, category, filename, lineno, file=None, line=None):
    """Print a warning as a script does: to standard error, which no example compares."""
    print(warnings.formatwarning(message, category, filename, lineno, line), end="", file=sys.stderr)


def test_there_are_examples():
    count = sum(len(list(find_examples(list_objects(module)))) for module in list_modules())
    assert count > 100
