"""Check that the API reference documents every public name once, and that each name has a docstring.

    python .ci/check_reference.py

Public names are those in `__all__` of `treadle` and of its public modules, without a leading underscore. The names of
`treadle.compat` are excluded: they exist for the imports of other libraries, and docs/migrating lists them. Classes and
functions are written in the reference as ``::: treadle.Trainer``; a constant may be named in a code span instead.
"""

import importlib
import inspect
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "reference"


def list_public_names():
    """Return the public objects by name: ``{"treadle.callbacks.EarlyStopping": <class>, ...}``."""
    treadle = importlib.import_module("treadle")
    modules = [treadle] + [getattr(treadle, name) for name in treadle.__all__ if name != "compat"]
    return {
        f"{module.__name__}.{name}": getattr(module, name)
        for module in modules
        if inspect.ismodule(module)
        for name in module.__all__
        if not name.startswith("_")
    }


def read_reference():
    """Return the names that the pages document, and the names in their code spans."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in sorted(PAGES.rglob("*.md")))
    return re.findall(r"^::: (treadle[\w.]*)", text, re.MULTILINE), set(re.findall(r"`(treadle[\w.]+)`", text))


def resolve(path):
    """Return the object of a dotted name; raise AttributeError if there is none."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def find_faults():
    """Return the faults, one sentence each."""
    documented, spans = read_reference()
    faults = [f"{name} is documented twice." for name in sorted(set(documented)) if documented.count(name) > 1]
    objects = {id(resolve(name)): name for name in documented}
    for name, value in list_public_names().items():
        if not (inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value)):
            if name not in documented and name not in spans:
                faults.append(f"{name} has no place in docs/reference.")
            continue
        if not inspect.ismodule(value) and id(value) not in objects:
            faults.append(f"{name} has no place in docs/reference. Add ::: {name} to a page of docs/reference/api.")
        if not (value.__doc__ or "").strip():
            faults.append(f"{name} has no docstring.")
    return faults


if __name__ == "__main__":
    faults = find_faults()
    for fault in faults:
        print(fault)
    sys.exit(bool(faults))
