"""pytest plugin: record each test's outcome, and with ``LIBRARY_SWAP=1`` let imports of Lightning find Treadle.

``lightning.pytorch.X`` and ``pytorch_lightning.X`` become ``treadle.compat.X`` or, if that has no such name,
``treadle.X``; ``lightning.fabric.X`` becomes ``treadle.compat.fabric.X``; ``accelerate.X`` likewise. A name that
neither has raises the same error as in a program whose imports were changed by hand. The outcomes are written to the
file ``LIBRARY_OUTCOMES``, one JSON line per test.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest

PREFIXES = {
    "lightning.pytorch": "",
    "lightning.fabric": "fabric",
    "lightning": "",
    "pytorch_lightning": "",
    "lightning_fabric": "fabric",
    "accelerate": "",
}
VERSIONS = {"lightning": "2.6.6", "pytorch_lightning": "2.6.6", "lightning_fabric": "2.6.6", "accelerate": "1.15.0"}


class _Stand(ModuleType):
    """Module whose names are those of Treadle's modules."""

    def __init__(self, name: str, modules: list[ModuleType]) -> None:
        super().__init__(name)
        self._modules = modules
        names = getattr(modules[0], "__all__", None)
        if names is not None:
            self.__all__ = list(names)

    def __getattr__(self, name: str) -> Any:
        if name == "__version__" and self.__name__ in VERSIONS:
            return VERSIONS[self.__name__]
        if name.startswith("__"):
            raise AttributeError(name)
        if self.__name__ == "lightning" and name in ("pytorch", "fabric"):
            return importlib.import_module(f"lightning.{name}")
        errors = []
        for module in self._modules:
            try:
                return getattr(module, name)
            except (AttributeError, ImportError) as error:
                errors.append(error)
        raise AttributeError(str(errors[0]))


class _Swap(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        prefix = next((p for p in PREFIXES if f"{fullname}.".startswith(f"{p}.")), None)
        if prefix is None:
            return None
        inner = ".".join(filter(None, (PREFIXES[prefix], fullname.removeprefix(prefix).strip("."))))
        modules = []
        for candidate in ("treadle.compat", "treadle"):
            name = f"{candidate}.{inner}".rstrip(".")
            try:
                modules.append(importlib.import_module(name))
            except ModuleNotFoundError as error:
                if not f"{name}.".startswith(f"{error.name}."):
                    raise
        if not modules:
            return None
        spec = ModuleSpec(fullname, self, is_package=True)
        spec.loader_state = modules
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Stand(spec.name, spec.loader_state)

    def exec_module(self, module: ModuleType) -> None:
        pass


if os.environ.get("LIBRARY_SWAP") == "1":
    sys.meta_path.insert(0, _Swap())


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = (yield).get_result()
    if report.failed or (report.when == "call" and report.passed) or report.skipped:
        _record(item.nodeid, report.outcome, "" if call.excinfo is None else call.excinfo.exconly()[:500])


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _record(report.nodeid, "failed", str(report.longrepr)[-500:])


def _record(test: str, outcome: str, reason: str) -> None:
    with open(os.environ["LIBRARY_OUTCOMES"], "a", encoding="utf-8") as file:
        file.write(json.dumps({"test": test, "outcome": outcome, "reason": reason}) + "\n")
