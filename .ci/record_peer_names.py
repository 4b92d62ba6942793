"""Record the public names of Lightning and Accelerate in `.ci/peer_names.json`, which `make compat` and tests read.

    .venv-bench/bin/python .ci/record_peer_names.py

A name is public if neither it nor its module's path begins with an underscore, and the module lists it in `__all__`,
defines it or, in a package, re-exports it from below. Run it in an environment with both libraries.
"""

import importlib
import inspect
import json
import pkgutil
import warnings
from importlib.metadata import version
from pathlib import Path

FILE = Path(__file__).with_name("peer_names.json")
ROOTS = {"lightning": "lightning.pytorch", "accelerate": "accelerate"}
LEFT_OUT = ("test_utils", "commands", "testing")


def list_names(root):
    """Return the public names below a package by module path."""
    package = importlib.import_module(root)
    walked = pkgutil.walk_packages(package.__path__, f"{root}.", onerror=lambda name: None)
    names = {}
    for module in (root, *(found.name for found in walked)):
        parts = module.removeprefix(root).split(".")
        if any(part.startswith("_") or part in LEFT_OUT for part in parts):
            continue
        try:
            public = read_module(importlib.import_module(module), root)
        except ImportError:  # it needs a package that is not here
            continue
        if public:
            names[module[len(root) + 1 :]] = sorted(set(public))
    return names


def read_module(module, root):
    """Return the public names of a module."""
    if listed := getattr(module, "__all__", None):
        return list(listed)
    found = []
    for name, value in vars(module).items():
        if name.startswith("_") or not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        home = getattr(value, "__module__", None) or ""
        if home == module.__name__ or (hasattr(module, "__path__") and home.startswith(root)):
            found.append(name)
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    record = {peer: {"version": version(peer), "names": list_names(root)} for peer, root in ROOTS.items()}
    FILE.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")
